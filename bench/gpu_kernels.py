"""The Triton kernels on a GPU, checked against their twins and timed: `python bench/gpu_kernels.py [--only NAME]`.

A line a case: the error against the twin (relative, over the whole result), microseconds, TB/s and TFLOP/s by the bytes and
operations that cannot be avoided, the share of the aim, and what torch needs for the same. Times are medians of CUDA graphs
replayed, each over enough sets of inputs that none waits in the L2. A case that fails says why, and the next one runs.
`bench/gpu_prefill.py` tries tiles of the attention kernels. `--tiny` is for the interpreter: small sizes, times without meaning.
"""

import argparse
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from octavo.kernels.cache_layout import Layout, empty_cache
from octavo.kernels.reference import attention as plain_attention
from octavo.kernels.reference import layer as plain_layer
from octavo.kernels.reference import sampling as plain_sampling
from octavo.kernels.triton.attention.paged_attention import paged_attention, shares_of
from octavo.kernels.triton.gemv.products import linear, norm_gate_up, norm_linear
from octavo.kernels.triton.sampling.sample import sample
from octavo.kernels.triton.step.cache import write_kv
from octavo.kernels.triton.step.elementwise import silu_and_mul
from octavo.kernels.triton.step.norm import add_rms_norm

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16
HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
BEYOND_L2 = 200_000_000  # bytes of weights in one graph
SECONDS = 170  # no case begins later

Run = Callable[[], object]


@dataclass
class Case:
    name: str
    runs: list[Run]  # the same work over different inputs
    error: Callable[[], float]
    limit: float = 1e-2
    bytes: float = 0
    flops: float = 0
    aim: tuple[float, str] | None = None  # a rate in TB/s or TFLOP/s, or at most so many us
    peer: list[Run] = field(default_factory=list)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def laid_out(cache: Tensor, layout: Layout) -> Tensor:
    return empty_cache(layout, tuple(cache.shape), cache.dtype, cache.device).copy_(cache)


def distance(got: Tensor, exact: Tensor) -> float:
    """Returns the error relative to the length of the exact result. It is NaN, which no limit accepts, if a value is not finite."""
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def microseconds(runs: list[Run], spent: int = 150) -> float:
    """Returns the microseconds of one run. `spent`: milliseconds to spend on measuring."""
    if not ON_GPU:
        start = time.perf_counter()
        runs[0]()
        return (time.perf_counter() - start) * 1e6
    for run in runs:
        run()
    torch.cuda.synchronize()
    repeats = max(1, 10 // len(runs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for run in runs:
                run()
    return float(triton.testing.do_bench(graph.replay, warmup=20, rep=spent, return_mode="median")) * 1e3 / (repeats * len(runs))


@dataclass
class Rows:
    """Rows of one length over a shuffled pool of blocks; its first block is the null block."""

    rows: int
    context: int
    num_query: int
    layout: Layout = "nhd"

    def __post_init__(self) -> None:
        width = -(-self.context // BLOCK)
        self.tables = (torch.randperm(self.rows * width, device=DEVICE, dtype=torch.int32) + 1).view(self.rows, width)
        qkv = random(self.rows * self.num_query, HEADS + 2 * KV_HEADS, DIM)
        self.q, *self.fresh = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
        self.k, self.v = (random(self.rows * width + 1, BLOCK, KV_HEADS, DIM) for _ in range(2))
        new = torch.arange(self.context - self.num_query, self.context, device=DEVICE)
        slots = (self.tables.long()[:, new // BLOCK] * BLOCK + new % BLOCK).flatten()
        for cache, fresh in zip((self.k, self.v), self.fresh):
            cache.view(-1, KV_HEADS, DIM)[slots] = fresh
        self.k, self.v = (laid_out(cache, self.layout) for cache in (self.k, self.v))
        self.query_start = torch.arange(self.rows + 1, device=DEVICE, dtype=torch.int32) * self.num_query
        self.context_len = torch.full((self.rows,), self.context, device=DEVICE, dtype=torch.int32)
        self.shares = shares_of(self.query_start, self.context_len, self.k, None)  # once a step, for all layers
        self.out = torch.full(self.q.shape, torch.nan, device=DEVICE, dtype=DTYPE)

    def attend(self) -> Tensor:
        return paged_attention(
            self.q, self.k, self.v, self.tables, self.query_start, self.context_len, DIM**-0.5, self.out,
            self.num_query, shares=self.shares, fresh=(self.fresh[0], self.fresh[1]),
        )  # fmt: skip

    def error(self) -> float:
        """Returns the error against the twin, or infinity if a contiguous cache gives other bits."""
        self.out.fill_(torch.nan)
        paged = self.attend().clone()
        k, v = (cache[self.tables.long()].flatten(1, 2).contiguous() for cache in (self.k, self.v))  # [rows, length, kv_heads, dim]
        regions = torch.arange(self.rows, device=DEVICE, dtype=torch.int32)[:, None]
        lengths = self.query_start, self.context_len
        contiguous = paged_attention(self.q, k, v, regions, *lengths, DIM**-0.5, torch.empty_like(paged), self.num_query, paged=False)
        exact = plain_attention.paged_attention(self.q, self.k, self.v, self.tables, *lengths, DIM**-0.5, torch.empty_like(paged))
        return distance(paged, exact) if torch.equal(paged, contiguous) else float("inf")

    @property
    def bytes(self) -> float:
        return 2 * self.rows * self.context * KV_HEADS * DIM * DTYPE.itemsize + 2 * self.q.numel() * DTYPE.itemsize

    @property
    def flops(self) -> float:
        seen = self.num_query * (self.context - self.num_query) + self.num_query * (self.num_query + 1) / 2
        return 4 * self.rows * HEADS * DIM * seen

    def torch_attention(self) -> Run:
        """Returns a run of the same attention without blocks, by cuDNN."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q = self.q.view(self.rows, self.num_query, HEADS, DIM).transpose(1, 2).contiguous()
        k, v = (random(self.rows, KV_HEADS, self.context, DIM) for _ in range(2))

        def run() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return run


DECODE = {(256, 1024): 4.0, (64, 4096): 4.0, (1, 32768): 2.7}  # rows, context: TB/s to reach
PREFILL = {(4, 4096): 450, (16, 1024): 450}  # rows, tokens: TFLOP/s
PRODUCTS = [(1024, 4096), (1024, 6144), (3072, 1024), (4096, 24576), (12288, 4096)]  # in, out


def decode_cases(tiny: bool) -> Iterator[Case]:
    for (rows, context), aim in list(DECODE.items())[: 1 if tiny else None]:
        case = Rows(1, 20, 1) if tiny else Rows(rows, context, 1)
        yield Case(f"decode {rows} x {context}", [case.attend], case.error, bytes=case.bytes, flops=case.flops, aim=(aim, "TB/s"))


def prefill_cases(tiny: bool) -> Iterator[Case]:
    for (rows, tokens), aim in list(PREFILL.items())[: 1 if tiny else None]:
        case = Rows(1, 20, 20) if tiny else Rows(rows, tokens, tokens)
        peer = [case.torch_attention()] if ON_GPU else []
        yield Case(
            f"prefill {rows} x {tokens}", [case.attend], case.error, bytes=case.bytes, flops=case.flops, aim=(aim, "TFLOP/s"), peer=peer
        )


def layout_cases(tiny: bool) -> Iterator[Case]:
    """Yields cases of all kernels that use the cache, in both layouts: decode, prefill after cached tokens, writes."""
    rows_of = [(rows, context, 1) for rows, context in DECODE] + [(4, 8192, 1024)]
    for (rows, context, queries), layout in product(rows_of[: 1 if tiny else None], ("nhd", "hnd")):
        case = Rows(1, 20, 1, layout) if tiny else Rows(rows, context, queries, layout)
        yield Case(f"{layout} {rows} x {context}, {queries} new", [case.attend], case.error, bytes=case.bytes, flops=case.flops)
    for tokens, layout in product((256, 8192)[: 1 if tiny else None], ("nhd", "hnd")):
        yield _write_case(3 if tiny else tokens, tokens, layout)


def gemv_cases(tiny: bool) -> Iterator[Case]:
    for rows, (size, wide) in product((1, 4), [(64, 48)] if tiny else PRODUCTS):
        yield _product_case("linear", rows, size, wide)
    for rows, size in product((1, 4), [8] if tiny else [1024, 4096]):
        yield _product_case("norm_linear", rows, size, 6 * size)
        yield _product_case("gate_up", rows, size, 6 * size)
    if not tiny:
        yield _product_case("linear", 1, 1024, 151936)


def _product_case(name: str, rows: int, size: int, wide: int) -> Case:
    weight_bytes = size * wide * DTYPE.itemsize
    weights = [random(wide, size) * size**-0.5 for _ in range(min(max(1, BEYOND_L2 // weight_bytes), 16))]
    x, residual, norm_weight = random(rows, size), random(rows, size), random(size)

    def runs(module_linear: Callable, module_norm: Callable, module_gate: Callable) -> list[Run]:
        if name == "linear":
            return [lambda w=w: module_linear(x, w) for w in weights]
        function = module_norm if name == "norm_linear" else module_gate
        return [lambda w=w: function(x, residual, norm_weight, 1e-6, w) for w in weights]

    ours = runs(linear, norm_linear, norm_gate_up)
    theirs = runs(plain_layer.linear, plain_layer.norm_linear, plain_layer.norm_gate_up)

    def error() -> float:
        got, exact = ours[0](), theirs[0]()
        pairs = [(got, exact)] if name == "linear" else list(zip(got, exact))
        return max(distance(g, e) for g, e in pairs)

    return Case(
        f"{name} {rows}: {size} -> {wide}", ours, error, bytes=weight_bytes, flops=2 * rows * size * wide,
        aim=(4.0, "TB/s"), peer=theirs if ON_GPU else [],
    )  # fmt: skip


def small_cases(tiny: bool) -> Iterator[Case]:
    for tokens in (256, 8192)[: 1 if tiny else None]:
        rows, size = (3, 64) if tiny else (tokens, 4096)
        sets = 1 if rows * size * 8 > BEYOND_L2 else 4
        x, residual, weight = [random(rows, size) for _ in range(sets)], random(rows, size), random(size)
        yield Case(
            f"add_rms_norm {tokens} x 4096",
            [lambda a=a, r=residual, w=weight: add_rms_norm(a, r, w, 1e-6) for a in x],
            lambda a=x[0], r=residual, w=weight: max(map(distance, add_rms_norm(a, r, w, 1e-6), plain_layer.add_rms_norm(a, r, w, 1e-6))),
            bytes=4 * rows * size * DTYPE.itemsize,
            peer=[lambda a=a, r=residual, w=weight: plain_layer.add_rms_norm(a, r, w, 1e-6) for a in x] if ON_GPU else [],
        )
        both = [random(rows, 2 * (64 if tiny else 12288)) for _ in range(sets)]
        yield Case(
            f"silu_and_mul {tokens} x 12288",
            [lambda a=a: silu_and_mul(a) for a in both],
            lambda a=both[0]: distance(silu_and_mul(a), plain_layer.silu_and_mul(a)),
            bytes=1.5 * both[0].numel() * DTYPE.itemsize,
            peer=[lambda a=a: plain_layer.silu_and_mul(a) for a in both] if ON_GPU else [],
        )
        yield _write_case(rows, tokens)


def _write_case(rows: int, tokens: int, layout: Layout = "nhd") -> Case:
    qkv = random(rows, (HEADS + 2 * KV_HEADS) * DIM)
    cache = [laid_out(torch.zeros(rows // BLOCK + 2, BLOCK, KV_HEADS, DIM, device=DEVICE, dtype=DTYPE), layout) for _ in range(4)]
    slots = torch.randperm(rows, device=DEVICE) + BLOCK
    positions = torch.randint(0, 4096, (rows,), device=DEVICE)
    angle = torch.outer(torch.arange(4096, device=DEVICE).float(), 1e6 ** -(torch.arange(DIM // 2, device=DEVICE) / (DIM // 2)))
    cos, sin, norms = angle.cos(), angle.sin(), (random(DIM), random(DIM), 1e-6)

    def error() -> float:
        ours, exact = qkv.clone(), qkv.clone()
        write_kv(ours, norms, cos, sin, positions, slots, cache[0], cache[1])
        plain_attention.write_kv(exact, norms, cos, sin, positions, slots, cache[2], cache[3])
        return max(distance(ours, exact), distance(cache[0], cache[2]), distance(cache[1], cache[3]))

    moved = 2 * qkv.numel() * DTYPE.itemsize
    run = lambda: write_kv(qkv, norms, cos, sin, positions, slots, cache[0], cache[1])  # noqa: E731
    return Case(f"write_kv {tokens} tokens, {layout}", [run], error, bytes=moved)


def sampling_cases(tiny: bool) -> Iterator[Case]:
    rows, vocab = (2, 3000) if tiny else (256, 151936)
    logits = random(rows, vocab) * 3
    noise = torch.randint(0, 2**32, (rows, 4), device=DEVICE)
    positions = torch.randint(0, 4096, (rows,), device=DEVICE)
    for name, temperature, aim in (("noise", 0.8, 350), ("argmax", 0.0, 57)):
        heat = torch.full((rows,), temperature, device=DEVICE)
        given = logits, heat, noise, positions
        yield Case(
            f"sample {rows} x {vocab}, {name}",
            [lambda given=given: sample(*given)],
            lambda given=given: float((sample(*given) != plain_sampling.sample(*given)).double().mean()),
            bytes=logits.numel() * DTYPE.itemsize,
            aim=(aim, "us"),
        )


KINDS = {
    "decode": decode_cases, "prefill": prefill_cases, "small": small_cases, "sampling": sampling_cases, "gemv": gemv_cases,
    "layouts": layout_cases,
}  # fmt: skip


def line(case: Case) -> str:
    error = case.error()
    spent = microseconds(case.runs)
    rates = {"TB/s": case.bytes / spent / 1e6, "TFLOP/s": case.flops / spent / 1e6}
    share = ""
    if case.aim is not None:
        value, unit = case.aim
        share = f"{(value / spent if unit == 'us' else rates[unit] / value):5.0%} of {value:g} {unit}"
    peer = f"torch {microseconds(case.peer):8.1f} us" if case.peer else ""
    verdict = "ok" if error <= case.limit else "WRONG"
    speed = f"{spent:9.1f} us {rates['TB/s']:6.2f} TB/s {rates['TFLOP/s']:6.0f} TFLOP/s"
    return f"{case.name:34s} {verdict:5s} {error:8.1e} {speed}  {share:22s} {peer}"


def report(name: str, make: Callable[[bool], Iterator[Case]], tiny: bool, deadline: float) -> int:
    """Prints the cases of a kind and returns how many failed. An error while cases are built ends the kind, one in a run only that case."""
    failed = 0
    try:
        for case in make(tiny):
            if time.monotonic() > deadline:
                print(f"{name}: time is up, the rest is left out", flush=True)
                break
            try:
                text = line(case)
            except Exception as error:
                text = f"{case.name:34s} FAILED {type(error).__name__}: {str(error).strip().splitlines()[-1:]}"
                traceback.print_exc()
            failed += "WRONG" in text or "FAILED" in text
            print(text, flush=True)
    except Exception as error:
        print(f"{name} FAILED {type(error).__name__}: {error}", flush=True)
        return failed + 1
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(KINDS), help="one kind of kernel")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the interpreter")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    deadline = time.monotonic() + SECONDS
    name = torch.cuda.get_device_name() if ON_GPU else "no GPU"
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, {DTYPE}")
    kinds = {options.only: KINDS[options.only]} if options.only else KINDS
    with torch.inference_mode():
        failed = sum(report(kind, make, options.tiny, deadline) for kind, make in kinds.items())
    print(f"{failed} failed" if failed else "all agree with their twins")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
