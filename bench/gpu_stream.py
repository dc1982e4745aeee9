"""One stream of packed weights on a GPU, layer by layer as in a model of 8B: `python bench/gpu_stream.py`.

Checks the kernels against their twins; then for each group and number of rows the kernels of a layer in a chain, over layers that do
not fit the L2 together, as one CUDA graph: ways to divide each product are tried in the whole chain, one kernel at a time, best first.
Then each kernel of the best chain alone, and the vocabulary. `--rows 1 --groups 32 128` is one stream. Kernels are compiled first, by
as many processes as there are cores. What fails is named and passed over. `--tiny` is for the interpreter: the checks, and one chain
of small layers.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import triton
from torch import Tensor

from bench.gpu_packed import DEVICE, DTYPE, ON_GPU, distance, inputs, microseconds, random_codes
from octavo.kernels.device_codes import DeviceCodes, zero_codes
from octavo.kernels.reference import layer as twin
from octavo.kernels.reference.layer import add_rms_norm as twin_norm
from octavo.kernels.triton.attention.fused_decode import decode_attention_parts
from octavo.kernels.triton.gemv.products import merge_parts
from octavo.kernels.triton.packed import products as packed
from octavo.kernels.triton.packed.products import MEASURED, Gemv, How, SmallGemm, power_of_rows, rule
from octavo.kernels.triton.step.norm import add_rms_norm

HIDDEN, INNER, HEADS, KV_HEADS, DIM = 4096, 12288, 32, 8, 128
BITS = 4
VOCABULARY, VOCABULARY_BITS = 151936, 8
LAYERS = 36 if ON_GPU else 1  # of the model
CHAINED = 4  # of them here: 400 MB
CONTEXT, BLOCK = 384, 16
FLOATS = 4060.0  # microseconds of a step in bfloat16
SECONDS = 12.0  # for each group and number of rows
EPS = 1e-6
LIMIT = 1.5e-2
NORMED, GATED = ("qkv", "gate_up"), ("gate_up",)
Choice = dict[str, How]


@dataclass(frozen=True)
class Shape:
    hidden: int = HIDDEN
    inner: int = INNER
    heads: int = HEADS
    kv_heads: int = KV_HEADS

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Returns name -> (in, out)."""
        return {
            "qkv": (self.hidden, (self.heads + 2 * self.kv_heads) * DIM),
            "output": (self.heads * DIM, self.hidden),
            "gate_up": (self.hidden, 2 * self.inner),
            "down": (self.inner, self.hidden),
        }


@dataclass(frozen=True)
class Product:
    """A product of a layer, with what is computed before and after it in the same kernel."""

    name: str
    x: Tensor
    residual: Tensor
    norm_weight: Tensor
    weight: DeviceCodes

    def run(self, how: How) -> tuple[Tensor, Tensor]:
        """Returns (out, residual)."""
        x, residual, weight, gated = self.x, self.residual, self.weight, self.name in GATED
        out = torch.empty(len(x), len(weight) // 2 if gated else len(weight), dtype=x.dtype, device=x.device)
        if self.name in NORMED:
            x, residual = add_rms_norm(x, residual, self.norm_weight, EPS)
        if isinstance(how, Gemv):
            return packed.gemv(x, weight, None, out, how, gated=gated), residual
        if gated:
            return packed.small_gemm(x, weight, None, out, how, "swiglu"), residual
        return packed.divided(x, weight, None, out, how), residual

    def exact(self) -> Tensor:
        x = twin_norm(self.x, self.residual, self.norm_weight, EPS)[0] if self.name in NORMED else self.x
        return (twin.packed_gate_up if self.name in GATED else twin.packed_linear)(x, self.weight)

    def error(self, how: How, exact: Tensor) -> float:
        return distance(self.run(how)[0], exact)


class Chain:
    """Layers of random codes, a cache, and rows of one context each."""

    def __init__(self, shape: Shape, group: int, rows: int, layers: int) -> None:
        self.shape, self.group = shape, group
        self.weights = [{name: random_codes(*sizes, BITS, group) for name, sizes in shape.matrices.items()} for _ in range(layers)]
        self.norm_weight = torch.rand(shape.hidden, device=DEVICE).to(DTYPE)
        self.head_norms = torch.ones(DIM, device=DEVICE, dtype=DTYPE), torch.ones(DIM, device=DEVICE, dtype=DTYPE), EPS
        self.turns = torch.rand(CONTEXT, DIM // 2, device=DEVICE), torch.rand(CONTEXT, DIM // 2, device=DEVICE)
        self.set(rows)

    def set(self, rows: int) -> None:
        self.rows, blocks = rows, -(-CONTEXT // BLOCK)
        self.x, self.residual = inputs(rows, self.shape.hidden), inputs(rows, self.shape.hidden)
        self.tables = (torch.randperm(rows * blocks, device=DEVICE).view(rows, blocks) + 1).int()
        self.context_len = torch.full((rows,), CONTEXT, dtype=torch.int32, device=DEVICE)
        self.positions = self.context_len.long() - 1
        self.slots = self.tables[:, -1].long() * BLOCK + (CONTEXT - 1) % BLOCK
        size = rows * blocks + 1, BLOCK, self.shape.kv_heads, DIM
        self.caches = [[torch.randn(size, device=DEVICE).to(DTYPE) for _ in "kv"] for _ in self.weights]

    def attend(self, layer: int, qkv: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.positions, self.slots, self.tables, self.context_len
        return decode_attention_parts(qkv, self.head_norms, *self.turns, *rows, *self.caches[layer], DIM**-0.5)

    def step(self, choice: Choice) -> Tensor:
        x, residual = self.x, self.residual
        for layer, weights in enumerate(self.weights):

            def ran(name: str, x: Tensor, residual: Tensor, weights: dict[str, DeviceCodes] = weights) -> tuple[Tensor, Tensor]:
                return Product(name, x, residual, self.norm_weight, weights[name]).run(choice[name])

            qkv, residual = ran("qkv", x, residual)
            x = ran("output", merge_parts(*self.attend(layer, qkv), DTYPE), residual)[0]
            gated, residual = ran("gate_up", x, residual)
            x = ran("down", gated, residual)[0]
        return x

    def microseconds(self, choice: Choice) -> float:
        """Returns the microseconds of one layer."""
        return microseconds([lambda: self.step(choice)]) / len(self.weights)

    def alone(self, choice: Choice) -> Iterator[tuple[str, float, float]]:
        """Yields the name, microseconds and TB/s of each kernel over all layers."""
        shape = self.shape
        qkv = inputs(self.rows, shape.matrices["qkv"][1])
        parts = self.attend(0, qkv)
        yield "attend", microseconds([lambda i=i: self.attend(i, qkv) for i in range(len(self.weights))]), 0.0
        yield "merge", microseconds([lambda: merge_parts(*parts, DTYPE)] * 4), 0.0
        for name in shape.matrices:
            runs = [partial(self.product(name, layer).run, choice[name]) for layer in range(len(self.weights))]
            spent, weight = microseconds(runs), self.weights[0][name]
            yield name, spent, (weight.words.nbytes + weight.scales.nbytes) / spent / 1e6

    def product(self, name: str, layer: int = 0) -> Product:
        size, _ = self.shape.matrices[name]
        x = inputs(self.rows, size)
        return Product(name, x, inputs(self.rows, size), self.norm_weight if name in NORMED else x[0], self.weights[layer][name])


SINGLE = [(8, 1, 1, 4), (4, 1, 1, 4), (2, 1, 1, 4), (4, 2, 1, 4), (8, 2, 1, 4), (4, 4, 2, 4), (4, 1, 2, 2)]
SEVERAL = [(4, 1, 1, 4), (4, 1, 2, 4), (4, 1, 3, 4), (2, 1, 3, 4), (2, 1, 2, 4), (8, 1, 1, 4), (4, 1, 2, 2)]


def choices(name: str, size: int, wide: int, rows: int, group: int = 128) -> list[How]:
    """Returns ways to try. The way in the table is among them, if there is one."""
    blocks = size // (16 // BITS * 32)
    found: list[How] = []
    if rows == 1:
        found = [Gemv(*how) for how in (SINGLE if blocks == 32 else SEVERAL)]
    measured = MEASURED.get((size, wide))
    if measured:
        few = measured[power_of_rows(rows).bit_length() - 1]
        found.append(few._replace(shares=1) if name in GATED and isinstance(few, SmallGemm) else few)
    return found


def sweep(chain: Chain, seconds: float) -> Choice:
    deadline, rows = time.monotonic() + seconds, chain.rows
    matrices = chain.shape.matrices
    best: Choice = {name: rule(rows, chain.weights[0][name], name in GATED) for name in matrices}
    spent = attempt(partial(chain.microseconds, best))
    print(f"\n{rows} rows, groups of {chain.group}, us a layer by rule: {spent:.1f}", flush=True)
    for name in ("gate_up", "down", "qkv", "output"):
        product = chain.product(name)
        exact = product.exact()
        times = []
        for how in choices(name, *matrices[name], rows, chain.group):
            if time.monotonic() > deadline:
                print("  time is up")
                break
            error = attempt(partial(product.error, how, exact))
            if not error <= LIMIT:
                print(f"  WRONG {name} {how}: {error:.1e}", flush=True)
                continue
            times.append((attempt(partial(chain.microseconds, {**best, name: how})), how))
        times.sort(key=lambda one: one[0])
        if times:
            best[name] = times[0][1]
            shown = "  ".join(f"{value:.1f} {_short(how)}" for value, how in times[:6])
            print(f"  {name:8}{shown}  worst {times[-1][0]:.1f}", flush=True)
    return best


def attempt(work: Callable[[], float]) -> float:
    try:
        return work()
    except Exception as failure:
        print(f"  FAILED {type(failure).__name__}: {str(failure).strip().splitlines()[:1]}", flush=True)
        return float("inf")


def _short(how: How) -> str:
    return f"{type(how).__name__}{tuple(int(one) for one in how)}"


def checks(tiny: bool) -> Iterator[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    """Yields checks of widths, groups, rows, orders and gates, each as (label, kernel, twin)."""
    kinds = [(4, 32)] if tiny else list(product((4, 8), (16, 32, 64, 128)))
    for (bits, group), rows in product(kinds, (1, 3) if tiny else (1, 2, 3, 4)):
        order = rows == 3
        size = 1536 if group >= 64 else 8 * group * 4
        given = inputs(rows, size), random_codes(size, 72, bits, group, order)
        for name in ("packed_linear", "packed_gate_up"):
            label = f"{name} of {rows}, {bits} bits, groups of {group}, {size} -> 72{', in order' if order else ''}"
            yield label, lambda n=name, g=given: getattr(packed, n)(*g), lambda n=name, g=given: getattr(twin, n)(*g)


def check(tiny: bool) -> int:
    wrong = 0
    for label, kernel, exact in checks(tiny):
        error = attempt(lambda k=kernel, e=exact: distance(k(), e()))
        if not error <= LIMIT:
            wrong += 1
            print(f"WRONG {label}: {error:.1e}", flush=True)
    print(f"{wrong} wrong" if wrong else "all agree with their twins", flush=True)
    return wrong


def compiled_runs(rows_of: list[int], groups: list[int]) -> list[Callable[[], object]]:
    """Returns a run for each kernel, on few lines of a matrix."""
    runs: dict[tuple[Any, ...], Callable[[], object]] = {}
    for rows, group, (name, (size, wide)) in product(rows_of, groups, Shape().matrices.items()):
        by_rule = rule(rows, zero_codes(wide, size, BITS, group, "meta"), name in GATED)
        for how in [*choices(name, size, wide, rows, group), by_rule]:

            def call(name: str = name, rows: int = rows, group: int = group, size: int = size, how: How = how) -> object:
                x = inputs(rows, size)
                return Product(name, x, x, x[0], random_codes(size, 512, BITS, group)).run(how)

            runs.setdefault((name in GATED, name in NORMED, size, rows, group, *how), call)
    for group, how in product(groups, vocabulary_choices()):
        weight = partial(random_codes, HIDDEN, 512, VOCABULARY_BITS, group)
        runs[group, how] = lambda h=how, w=weight: Product("head", inputs(1, HIDDEN), inputs(1, HIDDEN), inputs(1, HIDDEN), w()).run(h)
    return [*runs.values(), *(kernel for _, kernel, _ in checks(tiny=False))]


def compile_all() -> None:
    start, processes = time.monotonic(), max(1, (os.cpu_count() or 1) - 2)
    command = [sys.executable, *sys.argv, "--compile"]
    workers = [subprocess.Popen([*command, f"{part}/{processes}"], stdout=subprocess.DEVNULL) for part in range(processes)]
    for worker in workers:
        worker.wait()
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)


def vocabulary_choices() -> list[How]:
    """Returns ways to try for the vocabulary, whose codes have 8 bits."""
    return [Gemv(8, 1, 1, 4), Gemv(8, 1, 2, 4), Gemv(4, 1, 2, 4), Gemv(8, 1, 1, 8), Gemv(4, 2, 1, 8), SmallGemm(64, 8, 1, 4, 4)]


def vocabulary(group: int) -> float:
    """Returns the microseconds of the logits of one row."""
    weight, times = random_codes(HIDDEN, VOCABULARY, VOCABULARY_BITS, group), []
    head = Product("head", inputs(1, HIDDEN), inputs(1, HIDDEN), inputs(1, HIDDEN), weight)
    exact = head.exact()
    for how in vocabulary_choices():
        error = attempt(partial(head.error, how, exact))
        times.append((attempt(lambda h=how: microseconds([lambda: head.run(h)])) if error <= LIMIT else float("inf"), how))
    times.sort(key=lambda one: one[0])
    print(f"  head    {'  '.join(f'{spent:.1f} {_short(how)}' for spent, how in times)}", flush=True)
    return times[0][0]


def measure(rows_of: list[int], groups: list[int]) -> None:
    for group in groups:
        chain = Chain(Shape(), group, rows_of[0], CHAINED)
        for rows in rows_of:
            chain.set(rows)
            best = sweep(chain, SECONDS)
            report(chain, best, vocabulary(group))


def report(chain: Chain, best: Choice, rest: float) -> None:
    spent = chain.microseconds(best)
    step = LAYERS * spent + rest
    print(f"  best: {spent:.1f} us a layer, {step / 1e3:.2f} ms a step, {FLOATS / step:.2f}x of bfloat16")
    alone = (f"{name} {value:.1f}" + (f" ({rate:.2f} TB/s)" if rate else "") for name, value, rate in chain.alone(best))
    print("  alone: " + ", ".join(alone))
    print("  " + ", ".join(f"{name}: {_short(how)}" for name, how in best.items()), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--groups", type=int, nargs="+", default=[128])
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the interpreter")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        if options.compile:
            part, of = map(int, options.compile.split("/"))
            for one in compiled_runs(options.rows, options.groups)[part::of]:
                attempt(lambda o=one: float(o() is None))
            return 0
        print(f"{torch.cuda.get_device_name() if ON_GPU else 'no GPU'}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
        if ON_GPU:
            compile_all()
        wrong = check(options.tiny)
        if options.tiny:
            chain = Chain(replace(Shape(), hidden=128, inner=256, heads=2, kv_heads=1), 32, 1, 1)
            spent = chain.microseconds(dict.fromkeys(chain.weights[0], Gemv(32, warps=1)))
            print(f"a layer took {spent:.0f} us")
        else:
            measure(options.rows, options.groups)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
