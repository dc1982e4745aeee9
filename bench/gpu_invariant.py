"""The kernels of `--deterministic` on a GPU: `python bench/gpu_invariant.py [--seconds 500] [--only qkv,decode] [--rows 1,256]`.

For each shape: microseconds of the tiles in use (`kernels/triton/invariant/tiles.py`), of the best ones tried, and of ordinary mode.
Every alternative must give the bits of the tiles in use: one that does not is printed as DIFFERENT and never wins, and the exit code is 1.
Products wait for each other as in a step, over more weights than the L2 cache holds. No case begins after the time is up;
cases of one row come first. A choice that cannot be compiled or does not fit is passed over. `--tiny` is for the interpreter.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from octavo.kernels.device_codes import zero_codes
from octavo.kernels.reference.dequant import FP4_TABLE
from octavo.kernels.reference.products import multiply
from octavo.kernels.triton.attention.paged_attention import paged_attention, shares_of
from octavo.kernels.triton.gemv import products as few
from octavo.kernels.triton.gemv.tiles import FUSED_ROWS, GEMV_ROWS
from octavo.kernels.triton.invariant import attention, fused, teams
from octavo.kernels.triton.invariant.products import by_tiles, invariant_gate_up, invariant_linear
from octavo.kernels.triton.invariant.tiles import (
    Reading,
    Tiles,
    decode_reading,
    direct_code_tiles,
    direct_tiles,
    fused_tiles,
    gated_tiles,
    prefill_reading,
    team_reading,
    tiles_for,
)
from octavo.kernels.triton.moe import direct
from octavo.kernels.triton.moe.products import FEW_TOKENS, mixture
from octavo.kernels.triton.step.elementwise import silu_and_mul
from octavo.kernels.triton.step.norm import add_rms_norm
from octavo.step.shared_keys import SharedKeys
from octavo.step.team_words import Teams, most_teams, team_words

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16
BEYOND_L2 = 160_000_000  # bytes of weights in one graph
SHARED_MEMORY = 227 * 1024
BLOCK = 16

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Product:
    model: str
    name: str
    wide: int  # numbers of a result
    size: int
    kind: str = "plain"  # or normed, gated


PRODUCTS = [
    Product("0.6B", "qkv", 4096, 1024, "normed"), Product("0.6B", "o", 1024, 2048), Product("0.6B", "gate_up", 3072, 1024, "gated"),
    Product("0.6B", "down", 1024, 3072), Product("8B", "qkv", 6144, 4096, "normed"), Product("8B", "o", 4096, 4096),
    Product("8B", "gate_up", 12288, 4096, "gated"), Product("8B", "down", 4096, 12288), Product("30B-A3B", "qkv", 5120, 2048, "normed"),
    Product("30B-A3B", "o", 2048, 4096), Product("30B-A3B", "router", 128, 2048, "normed"), Product("gpt-oss", "qkv", 5120, 2880, "normed"),
    Product("gpt-oss", "o", 2880, 4096), Product("gpt-oss", "router", 32, 2880, "normed"), Product("0.6B", "head", 151936, 1024),
]  # fmt: skip
EXPERTS = {"30B-A3B": (128, 8, 2048, 768, False), "gpt-oss": (32, 4, 2880, 2880, True)}  # number, chosen, hidden, inner, codes
HEADS = {"0.6B": (16, 8, 128), "8B": (32, 8, 128), "gpt-oss": (64, 8, 64)}
ROWS = (1, 4, 16, 64, 256)

# -- what is tried


def product_choices(rows: int, gated: bool) -> Iterator[Tiles]:
    if rows <= 16:
        every = itertools.product((16,), (16, 32, 64), (128, 256, 512), (2, 4), (3, 4, 6))
    elif rows <= 64:
        every = itertools.product((32, 64), (32, 64), (64, 128, 256), (4,), (3, 4))
    else:
        every = itertools.product((64, 128, 256), (64, 128), (64, 128), (4, 8), (3, 4))
    for how in itertools.starmap(Tiles, every):
        held = how.columns * (2 if gated else 1) * (how.rows if rows > 16 else 32) / (32 * how.warps)  # registers of a thread
        if (how.columns * (2 if gated else 1) + how.rows) * how.step * 2 * how.stages <= SHARED_MEMORY and held <= 128:
            yield how


def fused_choices(gated: bool) -> Iterator[Tiles]:
    for how in itertools.starmap(Tiles, itertools.product((16,), (16, 32, 64), (128, 256, 512), (2, 4), (3, 5))):
        if how.columns * (2 if gated else 1) * how.step * 2 * how.stages + 32 * how.step <= SHARED_MEMORY:
            yield how


def decode_choices() -> list[Reading]:
    return [Reading(warps, stages) for warps, stages in itertools.product((2, 4), (2, 3, 4, 5))]


def wide_choices(*queries: int) -> list[Reading]:
    return [Reading(*one) for one in itertools.product((4, 8), (2, 3, 4), queries) if not (one[0] == 4 and one[2] > 64)]


# -- measuring


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(DTYPE)


def microseconds(runs: list[Run]) -> float:
    """Returns the microseconds of one run, the median of replays of a graph of all."""
    for run in runs[:2]:
        run()
    if not ON_GPU:
        return 0.0
    torch.cuda.synchronize()
    repeats, graph = max(1, 20 // len(runs)), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for run in runs:
                run()
    return float(triton.testing.do_bench(graph.replay, warmup=3, rep=15, return_mode="median")) * 1e3 / (repeats * len(runs))


class Report:
    """Prints a line for each case, and counts choices with other bits."""

    def __init__(self, seconds: float, tries: int | None) -> None:
        self.end, self.different, self.tries = time.monotonic() + seconds, 0, tries
        print(f"{'':36}{'used':>9}{'best':>9}{'ordinary':>10}   tiles of the best (tried)", flush=True)

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    def case(self, name: str, used: Any, choices: list[Any], runs: Callable[[Any], list[Run]], ordinary: list[Run]) -> None:
        if self.over:
            return
        exact = runs(used)[0]().clone()
        best, times, failed = used, {used: microseconds(runs(used))}, 0
        for how in choices[: self.tries]:
            if how == used or self.over:
                continue
            try:
                made = runs(how)
                if not torch.equal(made[0](), exact):
                    self.different += 1
                    print(f"DIFFERENT {name} {tuple(how)}", flush=True)
                    continue
                times[how] = microseconds(made)
            except Exception as error:
                failed, last = failed + 1, error
                if failed == len(choices):
                    print(f"{name}: {last}", flush=True)
        best = min(times, key=times.__getitem__)
        other = f"{microseconds(ordinary):10.2f}" if ordinary else f"{'':10}"
        print(f"{name:36}{times[used]:9.2f}{times[best]:9.2f}{other}   {tuple(best)} ({len(times)}, {failed} failed)", flush=True)


# -- products


def product_case(report: Report, one: Product, rows: int) -> None:
    gated, normed = one.kind == "gated", one.kind == "normed" or one.kind == "gated"
    tall = one.wide * 2 if gated else one.wide
    count = max(1, min(24, BEYOND_L2 // (tall * one.size * 2))) if ON_GPU else 1
    weights = [random(tall, one.size, scale=one.size**-0.5) for _ in range(count)]
    x, residual, scales = random(rows, one.size), random(rows, one.size), random(one.size)
    name = f"{one.model} {one.name} {one.kind} {rows}"
    if normed and rows <= FUSED_ROWS:
        used, choices = fused_tiles(DTYPE, gated), list(fused_choices(gated))
    elif gated:
        used, choices = gated_tiles(rows, one.wide, DTYPE), list(product_choices(rows, True))
    else:
        used, choices = tiles_for(rows, one.wide, DTYPE), list(product_choices(rows, False))

    def runs(how: Tiles) -> list[Run]:
        def run(weight: Tensor) -> Tensor:
            if normed and rows <= FUSED_ROWS and gated:
                return fused.invariant_norm_gate_up(x, residual, scales, 1e-6, weight, "swiglu", how)[0]
            if normed and rows <= FUSED_ROWS:
                return fused.invariant_norm_linear(x, residual, scales, 1e-6, weight, None, how)[0]
            out = torch.empty(rows, one.wide, dtype=DTYPE, device=DEVICE)
            return by_tiles(x, weight, None, out, how, "swiglu" if gated else None)

        return [lambda weight=weight: run(weight) for weight in weights]

    def ordinary(weight: Tensor) -> Tensor:
        if rows <= GEMV_ROWS and gated:
            return few.norm_gate_up(x, residual, scales, 1e-6, weight)[0]
        if rows <= GEMV_ROWS:
            return few.norm_linear(x, residual, scales, 1e-6, weight)[0] if normed else few.linear(x, weight)
        product = multiply(x, weight, None)
        return silu_and_mul(product) if gated else product

    report.case(name, used, choices, runs, [lambda weight=weight: ordinary(weight) for weight in weights])


def check_fused(report: Report) -> None:
    """Fused kernels must have the bits of separate ones."""
    for size, wide in ((1024, 3072), (2880, 640), (4096, 1024)) if ON_GPU else ((64, 32),):
        x, residual, scales, weight = random(4, size), random(4, size), random(size), random(2 * wide, size, scale=size**-0.5)
        normed, _ = fused_apart(x, residual, scales)
        pairs = (
            (fused.invariant_norm_linear(x, residual, scales, 1e-6, weight)[0], invariant_linear(normed, weight)),
            (fused.invariant_norm_gate_up(x, residual, scales, 1e-6, weight, "swiglu")[0], invariant_gate_up(normed, weight, "swiglu")),
            (invariant_gate_up(normed, weight, "swiglu"), silu_and_mul(invariant_linear(normed, weight))),
        )
        for number, (one, other) in enumerate(pairs):
            if not torch.equal(one, other):
                report.different += 1
                print(f"DIFFERENT fused {number} of size {size}: {(one != other).sum()} of {one.numel()}", flush=True)
        error = (normed.float() - add_rms_norm(x, residual, scales, 1e-6)[0].float()).abs().max()
        print(f"norm of size {size}: at most {error:.1e} from ordinary mode", flush=True)


def fused_apart(x: Tensor, residual: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    from octavo.kernels.triton.invariant.fused import invariant_add_norm

    return invariant_add_norm(x, residual, scales, 1e-6)


# -- experts


def expert_case(report: Report, model: str, tokens: int) -> None:
    count, chosen, hidden, inner, coded = EXPERTS[model] if ON_GPU else (4, 2, 64, 32, False)
    shapes = (count * 2 * inner, hidden), (count * hidden, inner)
    stacks: list[Any] = [random(*shape, scale=shape[1] ** -0.5) for shape in shapes] if not coded else []
    for shape in shapes if coded else ():
        codes = zero_codes(*shape, 4, 32, DEVICE)
        codes.words.random_(-(2**15), 2**15)
        scales = torch.randn(*codes.scales.shape, 2, device=DEVICE).half().mul_(0.01).view(torch.int32).squeeze(-1)
        stacks.append(replace(codes, scales=scales, table=FP4_TABLE.to(DEVICE), floats=True))
    x = random(tokens, hidden)
    ids = [torch.stack([torch.randperm(count, device=DEVICE)[:chosen] for _ in range(tokens)]) for _ in range(8 if ON_GPU else 1)]
    weights = torch.rand(tokens, chosen, device=DEVICE)
    attribute, default = ("direct_code_tiles", direct_code_tiles(DTYPE)) if coded else ("direct_tiles", direct_tiles(DTYPE, True))
    few_ones = itertools.starmap(Tiles, itertools.product((16,), (16, 32, 64), (64, 128, 256), (2, 4), (3, 4, 6)))
    choices = [Tiles(16, 64, 0, 4, stages) for stages in (2, 3, 4, 5)] if coded else list(few_ones)
    kept = getattr(direct, attribute)

    def runs(how: Tiles) -> list[Run]:
        def run(chosen_ones: Tensor) -> Tensor:
            setattr(direct, attribute, lambda *_: how)
            try:
                return mixture(x, chosen_ones, weights, *stacks, in_order=True)
            finally:
                setattr(direct, attribute, kept)

        return [lambda one=one: run(one) for one in ids]

    ordinary: list[Run] = [lambda one=one: mixture(x, one, weights, *stacks) for one in ids]
    report.case(f"{model} experts {tokens}", default, choices if tokens <= FEW_TOKENS else [], runs, ordinary)


# -- attention


@dataclass
class Context:
    """Rows of one length over a shuffled pool of blocks, of which the first `shared` keys are the same."""

    model: str
    rows: int
    queries: int
    context: int
    shared: int = 0

    def __post_init__(self) -> None:
        heads, kv_heads, dim = HEADS[self.model] if ON_GPU else (4, 2, 16)
        width, same = -(-self.context // BLOCK), self.shared // BLOCK
        self.tables = (torch.randperm(self.rows * width, device=DEVICE, dtype=torch.int32) + 1).view(self.rows, width)
        self.tables[:, :same] = self.tables[0, :same]
        qkv = random(self.rows * self.queries, heads + 2 * kv_heads, dim)
        self.q, *self.fresh = qkv.split([heads, kv_heads, kv_heads], 1)
        self.k, self.v = (random(self.rows * width + 1, BLOCK, kv_heads, dim) for _ in range(2))
        self.starts = torch.arange(self.rows + 1, device=DEVICE, dtype=torch.int32) * self.queries
        self.lengths = torch.full((self.rows,), self.context, device=DEVICE, dtype=torch.int32)
        self.dim, self.group = dim, heads // kv_heads

    def groups(self, piece: int) -> Teams | None:
        if not self.shared:
            return None
        keys = SharedKeys(torch.tensor([[0, self.rows, 0, self.shared]]).int().numpy(), torch.arange(self.rows).int().numpy())
        entries, lines = team_words(keys, self.rows, min(64 // self.group, 64), 50, piece)
        whole = torch.nn.functional.pad(torch.from_numpy(lines), (0, 0, 0, 1 + most_teams(self.rows) - len(lines)))
        return Teams(torch.from_numpy(entries).to(DEVICE), whole.to(DEVICE))

    def invariant(self, alone: bool = False) -> Run:
        out, given = torch.empty(self.q.shape, dtype=DTYPE, device=DEVICE), (self.starts, self.lengths)
        shares = attention.invariant_shares(*given, self.k, None, None if alone else self.groups(attention.PIECE))
        scale = self.dim**-0.5
        return lambda: attention.invariant_attention(self.q, self.k, self.v, self.tables, *given, scale, out, self.queries, shares)

    def ordinary(self) -> Run:
        out, given = torch.empty(self.q.shape, dtype=DTYPE, device=DEVICE), (self.starts, self.lengths)
        shares, fresh = shares_of(*given, self.k, None, teams=self.groups(0)), (self.fresh[0], self.fresh[1])
        scale = self.dim**-0.5
        return lambda: paged_attention(
            self.q, self.k, self.v, self.tables, *given, scale, out, self.queries, shares=shares, fresh=fresh
        )


def attention_case(report: Report, kind: str, context: Context) -> None:
    name = f"{context.model} {kind} {context.rows} x {context.queries} of {context.context}"
    if kind == "decode":
        place, attribute, used, choices = attention, "decode_reading", decode_reading(), decode_choices()
    elif kind == "prefill":
        place, attribute, used, choices = attention, "prefill_reading", prefill_reading(DTYPE, context.dim), wide_choices(64, 128)
        choices += [choice._replace(split=True) for choice in choices]
    else:
        place, attribute, used, choices = teams, "team_reading", team_reading(DTYPE, 64), wide_choices(64)
    kept = getattr(place, attribute)

    def runs(how: Reading) -> list[Run]:
        run = context.invariant()

        def chosen() -> Tensor:
            setattr(place, attribute, lambda *_: how)
            try:
                return run()
            finally:
                setattr(place, attribute, kept)

        return [chosen]

    if context.shared and not torch.equal(context.invariant()().clone(), context.invariant(alone=True)()):
        report.different += 1
        print(f"DIFFERENT {name}: shared and alone", flush=True)
    report.case(name, used, choices, runs, [context.ordinary()])


def contexts(rows: set[int]) -> Iterator[tuple[str, Context]]:
    if not ON_GPU:
        yield "shared", Context("0.6B", 4, 1, 600, 512)
        return
    for count, length in ((1, 500), (1, 4000), (16, 1000), (256, 400)):
        if count in rows:
            yield from (("decode", Context(model, count, 1, length)) for model in ("0.6B", "gpt-oss"))
    if 256 in rows:
        yield from (("shared", Context(model, 256, 1, 2200, 2048)) for model in ("0.6B", "8B"))
        yield "shared", Context("0.6B", 32, 1, 8400, 8192)
        yield from (("prefill", Context(model, 8, 1024, 1024)) for model in ("0.6B", "8B"))
        yield "prefill", Context("0.6B", 1, 4096, 4096)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--only", default="", help="names of products, models, or experts, decode, shared, prefill")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--tries", type=int, help="choices of a case")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    rows, wanted = [int(one) for one in given.rows.split(",")], {one for one in given.only.split(",") if one}
    torch.manual_seed(0)
    report = Report(given.seconds, 1 if given.tiny else given.tries)
    check_fused(report)
    listed = [Product("tiny", "qkv", 32, 64, "normed"), Product("tiny", "gate_up", 32, 64, "gated")] if given.tiny else PRODUCTS
    for count in rows[:1] if given.tiny else rows:
        for one in listed:
            if not report.over and (not wanted or wanted & {one.name, one.model}):
                product_case(report, one, count)
            torch.cuda.empty_cache()
        for model in EXPERTS:
            if not report.over and (not wanted or wanted & {"experts", model}):
                expert_case(report, model, count)
            torch.cuda.empty_cache()
        if count == rows[0]:
            for kind, context in contexts(set(rows)):
                if not report.over and (not wanted or wanted & {kind, context.model}):
                    attention_case(report, kind, context)
    print("the time is up" if report.over else "all cases were run", f"{report.different} with other bits", sep=", ")
    return 1 if report.different else 0


if __name__ == "__main__":
    sys.exit(main())
