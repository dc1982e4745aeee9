"""Tiles of the attention kernels on a GPU, checked and swept: `python bench/gpu_prefill.py [--decode | --features] [--only NAME]`.

First every choice of tiles is compared with the twin over a ragged mix of rows, and paged with contiguous and new tokens' own k and
v bit for bit: each in a process of its own, all at once, so that they also compile at once, and one that crashes or hangs is only
left out. Then what was right is timed, the best first: TFLOP/s of causal prefill beside torch's cuDNN attention, or with --decode
TB/s of keys and values; a step makes its shares once, so they are timed by themselves. `--features` compares every
feature, head size, dtype and block size with the tiles of the table, and times nothing; `--tiny` does the same with two of them and
small sizes, for the interpreter.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from bench.gpu_kernels import DEVICE, ON_GPU, distance, microseconds
from octavo.kernels.reference import attention as plain
from octavo.kernels.triton.attention.paged_attention import paged_attention, shares_of
from octavo.kernels.triton.attention.tiles import Tiles, decode_tiles, prefill_tiles
from octavo.kernels.triton.target import capability

SECONDS = 80  # no measurement begins later
AT_ONCE = 14  # processes that check
AGAIN = 30 if ON_GPU else 1  # times that everything gives the same bits
GROUPS = [(32, 8), (16, 8)]  # heads, KV heads

Mix = list[tuple[int, int]]  # a row's queries and its context
RAGGED: Mix = [(300, 300), (77, 500), (1, 700), (0, 40), (513, 513), (1, 1), (2, 900), (1, 0), (130, 1000)]

PREFILL = [
    Tiles(128, 4, 2, 128, divided=True),
    Tiles(64, 4, 4, 128, divided=True),
    Tiles(64, 4, 3, 128, divided=True),
    Tiles(64, 4, 2, 128, described=True),
    Tiles(128, 8, 3, 128, described=True),
    Tiles(128, 8, 2, 128, described=True, lagging=True),
    Tiles(64, 8, 3, 128, described=True, lagging=True),
]
# Keys, warps and stages, of which 2 and 3 keep one tile on its way, 5 two, 7 three: they also wait for the table. With each, as many
# programs of a multiprocessor as its registers and shared memory have room for.
DECODE = {
    (32, 2, 3): 4, (32, 2, 5): 4, (32, 4, 5): 4, (64, 2, 2): 4, (64, 2, 3): 4, (64, 2, 5): 3, (64, 4, 2): 4, (64, 4, 3): 4, (64, 4, 5): 3,
    (128, 4, 2): 2, (128, 4, 3): 2,
}  # fmt: skip
WAYS = [{"shares": shares, "grain": grain} for shares, grain in ((1, 1), (2, 16), (4, 8), (4, 16), (8, 8))]
BEST = 2  # shapes that are tried in all ways
BRIEF = 25  # ms of measuring one of many tiles


@dataclass
class Case:
    """Rows over a shuffled pool of blocks, their new tokens in a qkv; block 0 is the null block."""

    mix: Mix
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block: int = 16
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)  # window, soft_cap, sinks, slopes

    def __post_init__(self) -> None:
        queries, contexts = zip(*self.mix)
        self.max_query, self.max_context = max(queries), max(contexts)
        width = -(-self.max_context // self.block)
        rows = len(self.mix)
        self.tables = (torch.randperm(rows * width, device=DEVICE, dtype=torch.int32) + 1).view(rows, width)
        qkv = self.random(sum(queries), self.heads + 2 * self.kv_heads, self.dim)
        self.q, *fresh = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        self.fresh = fresh[0], fresh[1]
        self.caches = [self.random(rows * width + 1, self.block, self.kv_heads, self.dim) for _ in "kv"]
        self.query_start = torch.tensor([0, *queries], device=DEVICE).cumsum(0).to(torch.int32)
        self.context_len = torch.tensor(contexts, device=DEVICE, dtype=torch.int32)
        new = [torch.arange(context - count, context, device=DEVICE) for count, context in self.mix]
        slots = torch.cat([self.tables[row].long()[at // self.block] * self.block + at % self.block for row, at in enumerate(new)])
        for cache, fresh_one in zip(self.caches, self.fresh):
            cache.view(-1, self.kv_heads, self.dim)[slots] = fresh_one
        self.out = torch.empty(self.q.shape, device=DEVICE, dtype=self.dtype)
        self._shares: dict[Tiles | None, Tensor] = {}

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, dtype=torch.float32 if not ON_GPU else self.dtype).to(self.dtype)

    def shares(self, tiles: Tiles | None) -> Tensor:
        """Returns the shares, which are made once, as in a step."""
        of_decode = tiles if self.max_query == 1 else None
        if of_decode not in self._shares:
            self._shares[of_decode] = self.divide(of_decode)
        return self._shares[of_decode]

    def divide(self, tiles: Tiles | None = None) -> Tensor:
        return shares_of(self.query_start, self.context_len, self.caches[0], self.options.get("window"), tiles)

    def attend(self, tiles: Tiles | None = None, with_fresh: bool = True) -> Tensor:
        return paged_attention(
            self.q, *self.caches, self.tables, self.query_start, self.context_len, self.dim**-0.5, self.out, self.max_query,
            tiles=tiles, shares=self.shares(tiles), fresh=self.fresh if with_fresh else None, **self.options,
        )  # fmt: skip

    def contiguous(self, tiles: Tiles | None) -> Tensor:
        regions = torch.arange(len(self.mix), device=DEVICE, dtype=torch.int32)[:, None]
        caches = [cache[self.tables.long()].flatten(1, 2).contiguous() for cache in self.caches]
        return paged_attention(
            self.q, *caches, regions, self.query_start, self.context_len, self.dim**-0.5, torch.empty_like(self.out), self.max_query,
            tiles=tiles, paged=False, **self.options,
        )  # fmt: skip

    def error(self, tiles: Tiles | None = None) -> float:
        """Returns the relative error against the twin, or infinity if the three ways to the same keys, or two runs, differ in a bit."""
        self.out.fill_(torch.nan)
        fresh = self.attend(tiles).clone()
        self.out.fill_(torch.nan)
        paged = self.attend(tiles, with_fresh=False).clone()
        if not (torch.equal(fresh, paged) and torch.equal(paged, self.contiguous(tiles))):
            return float("inf")
        if not all(torch.equal(paged, self.attend(tiles)) for _ in range(AGAIN)):
            return float("inf")
        rows = self.tables, self.query_start, self.context_len
        exact = plain.paged_attention(self.q, *self.caches, *rows, self.dim**-0.5, torch.empty_like(paged), **self.options)
        return distance(paged, exact)

    @property
    def bytes(self) -> float:
        return 2 * sum(context for _, context in self.mix) * self.kv_heads * self.dim * self.dtype.itemsize

    @property
    def flops(self) -> float:
        return 4 * self.heads * self.dim * sum(count * (context - count) + count * (count + 1) / 2 for count, context in self.mix)

    def by_torch(self) -> Callable[[], object]:
        """Returns a run of cuDNN's attention over the new tokens in qkv: rows of equal length together, others one by one."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        lengths = [count for count, _ in self.mix]
        if len(set(lengths)) == 1:
            parts = [[one.unflatten(0, (-1, lengths[0])).transpose(1, 2) for one in (self.q, *self.fresh)]]
        else:
            cut = zip(*(one.split(lengths) for one in (self.q, *self.fresh)))
            parts = [[one[None].transpose(1, 2) for one in row] for row in cut]

        def run() -> None:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                for q, k, v in parts:
                    F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return run


def checks(tiny: bool) -> dict[str, Callable[[], Case]]:
    """Returns a check of each feature, head size, dtype and block size, with the tiles of the table."""
    if tiny:
        mix: Mix = [(20, 20), (3, 25), (1, 30), (1, 0)]
        return {
            "sinks": lambda: Case(mix, 4, 2, 16, options={"sinks": torch.ones(4, device=DEVICE)}),
            "heads of 48": lambda: Case(mix, 4, 2, 48),
        }
    ones = torch.linspace(0.01, 1.5, 32, device=DEVICE)
    found: dict[str, Callable[[], Case]] = {
        "window": lambda: Case(RAGGED, options={"window": 100}),
        "soft cap": lambda: Case(RAGGED, options={"soft_cap": 5.0}),
        "sinks": lambda: Case(RAGGED, options={"sinks": ones}),
        "ALiBi": lambda: Case(RAGGED, options={"slopes": ones}),
        "all four": lambda: Case(RAGGED, options={"window": 200, "soft_cap": 20.0, "sinks": ones, "slopes": ones / 50}),
    }
    for dim in (64, 80, 96, 256):
        found[f"heads of {dim}"] = lambda d=dim: Case(RAGGED, dim=d)
    for block in (1, 2, 8, 256):
        found[f"blocks of {block}"] = lambda b=block: Case(RAGGED, block=b)
    for dtype in (torch.float16, torch.float32):
        found[str(dtype)] = lambda d=dtype: Case(RAGGED, dtype=d)
    for heads, kv_heads in ((28, 4), (40, 8), (8, 8)):
        found[f"{heads} over {kv_heads} heads"] = lambda h=heads, k=kv_heads: Case(RAGGED, heads=h, kv_heads=k)
    return found


def named(tiles: Tiles) -> str:
    kinds = {"d": tiles.described, "l": tiles.lagging, "divided": tiles.divided}
    marks = "".join(mark for mark, on in kinds.items() if on)
    return f"{tiles.queries}x{tiles.keys} w{tiles.warps} s{tiles.stages} {marks}".strip()


def named_shares(tiles: Tiles) -> str:
    plainly = "" if tiles.pdl else ", plainly"
    return f"{tiles.keys} w{tiles.warps} s{tiles.stages} p{tiles.programs}, {tiles.shares} of {tiles.grain}{plainly}"


def jobs(tiny: bool, decode: bool, features: bool) -> dict[str, Callable[[], float]]:
    """Returns all checks by name."""
    if tiny or features:
        return {name: lambda m=make: m().error() for name, make in checks(tiny).items()}
    decoding: Mix = [(1, context) for context in (1, 0, 257, 513, 900, 100, 2000, 4096, 20000)]
    found: dict[str, Callable[[], float]] = {}
    for (heads, kv_heads), shape in product(GROUPS, DECODE if decode else ()):
        cut = [Tiles(*shape, programs=programs, **way) for programs, way in ((1, WAYS[0]), (4, WAYS[1]), (4, WAYS[2]))]
        found[f"{heads}/{kv_heads} {shape}"] = lambda h=heads, k=kv_heads, c=cut: max(map(Case(decoding, h, k).error, c))
    for (heads, kv_heads), tiles in product(GROUPS, () if decode else PREFILL):
        found[f"{heads}/{kv_heads} {named(tiles)}"] = lambda h=heads, k=kv_heads, t=tiles: Case(RAGGED, h, k).error(t)
    return found


def check_all(names: list[str], mode: list[str], deadline: float) -> dict[str, str]:
    """Runs each check in a process of its own. Returns the last line of each."""
    waiting, running, said = list(names), {}, {}
    while (waiting or running) and time.monotonic() < deadline:
        while waiting and len(running) < AT_ONCE:
            name = waiting.pop(0)
            command = [sys.executable, __file__, "--job", name, *mode]
            running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name, process in list(running.items()):
            if process.poll() is not None:
                lines = (process.stdout.read() if process.stdout else "").strip().splitlines()
                said[name] = lines[-1][:150] if lines else f"exit {process.returncode}"
                del running[name]
        time.sleep(0.05)
    for name, process in running.items():
        process.kill()
        said[name] = "did not end"
    return said | dict.fromkeys(waiting, "not begun")


def prefill_cases() -> Iterator[tuple[str, Mix, int, int]]:
    lengths = torch.randint(200, 4096, (16,), generator=torch.Generator().manual_seed(0)).tolist()
    for heads, kv_heads in GROUPS:
        for rows, tokens in ((4, 4096), (4, 2048), (16, 1024), (1, 16384)):
            yield f"{rows} x {tokens}, {heads}/{kv_heads}", [(tokens, tokens)] * rows, heads, kv_heads
    yield "16 ragged rows, 32/8", [(one, one) for one in lengths], 32, 8
    yield "4 x 2048 after 2048, 32/8", [(2048, 4096)] * 4, 32, 8


def sweep_prefill(right: set[str], deadline: float) -> None:
    best: dict[tuple[int, int], list[str]] = {}  # tiles of a group, by its first shape
    for name, mix, heads, kv_heads in prefill_cases():
        case = Case(mix, heads, kv_heads)
        table = prefill_tiles(case.dtype, case.dim, capability())
        tried = best.get((heads, kv_heads), [named(tiles) for tiles in PREFILL])
        ways: dict[str, Callable[[], object]] = {
            named(tiles): lambda c=case, t=tiles: c.attend(t)
            for tiles in PREFILL
            if named(tiles) in tried and f"{heads}/{kv_heads} {named(tiles)}" in right
        }
        ways["table"] = lambda c=case: c.attend()
        ways["table, without qkv"] = lambda c=case: c.attend(with_fresh=False)
        if all(count == context for count, context in mix):
            ways["cuDNN"] = case.by_torch()
        found = sorted((timed(run), way) for way, run in ways.items() if time.monotonic() < deadline)
        best.setdefault((heads, kv_heads), [way for _, way in found if way in tried][:BEST])
        print(f"prefill {name}: " + "; ".join(f"{way}: {case.flops / spent / 1e6:.0f}" for spent, way in found) + " TFLOP/s", flush=True)
        del case, ways
    print(f"table: {named(table)}")


def decode_cases() -> Iterator[tuple[str, Mix]]:
    """Yields the cases, ragged ones first. The tiles that are best for the first case are tried with the others."""
    for rows, most in ((256, 2000), (128, 2000), (64, 2000), (32, 2000), (512, 1100)):
        lengths = torch.randint(100, most, (rows,), generator=torch.Generator().manual_seed(0)).tolist()
        yield f"{rows} of 100 to {most}", [(1, one) for one in lengths]
    for rows, context in ((256, 600), (256, 1024), (64, 4096), (1, 32768), (16, 1024), (1, 1024)):
        yield f"{rows} x {context}", [(1, context)] * rows


def sweep_decode(right: set[str], deadline: float) -> None:
    for (name, mix), (heads, kv_heads) in product(decode_cases(), GROUPS):
        if (heads, kv_heads) != GROUPS[0] and len(mix) not in (64, 256):
            continue
        case = Case(mix, heads, kv_heads)
        table = decode_tiles(case.dtype, case.dim)
        shapes = [Tiles(*shape, programs=programs) for shape, programs in DECODE.items() if f"{heads}/{kv_heads} {shape}" in right]
        first = sweep(case, shapes, deadline)
        ways = [replace(tiles, **way) for _, tiles in first[:BEST] for way in WAYS]
        found = sweep(case, [table, replace(table, pdl=not table.pdl), *ways], deadline)
        text = [f"{named_shares(way)}: {spent:.1f} us" for spent, way in found[:4]]
        text += [f"table: {spent:.1f} us" for spent, way in found if way == table]
        text.append(f"its shares: {timed(case.divide, BRIEF):.1f} us")
        rate = case.bytes / found[0][0] / 1e6 if found else 0
        print(f"decode {name}, {heads}/{kv_heads}: {rate:.2f} TB/s; " + "; ".join(text), flush=True)
        print("    shapes: " + "; ".join(f"{way.keys} w{way.warps} s{way.stages}: {spent:.1f}" for spent, way in first), flush=True)
        del case


def sweep(case: Case, ways: list[Tiles], deadline: float) -> list[tuple[float, Tiles]]:
    """Times the choices. Returns them with their times, the fastest first."""
    found = []
    for tiles in dict.fromkeys(ways):
        if time.monotonic() < deadline:
            found.append((timed(lambda t=tiles: case.attend(t), BRIEF), tiles))
    return sorted(found, key=lambda one: one[0])


def timed(run: Callable[[], object], spent: int = 150) -> float:
    try:
        return microseconds([run], spent)
    except Exception as error:
        print(f"{type(error).__name__}: {str(error).splitlines()[0][:100]}", flush=True)
        return float("inf")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decode", action="store_true", help="the decode kernel instead of the prefill kernel")
    parser.add_argument("--features", action="store_true", help="check features, head sizes, dtypes and block sizes, and time nothing")
    parser.add_argument("--only", help="check and time only what has this in its name")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="small sizes and no times, for the interpreter")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    todo = jobs(options.tiny, options.decode, options.features)
    with torch.inference_mode():
        if options.job:
            print(f"{todo[options.job]():.1e}")
            return 0
        begun = time.monotonic()
        names = [name for name in todo if (options.only or "") in name]
        if options.tiny:
            said = {name: f"{todo[name]():.1e}" for name in names}
        else:
            mode = [f"--{name}" for name in ("decode", "features") if getattr(options, name)]
            said = check_all(names, mode, begun + (SECONDS if options.features else SECONDS / 2))
        right = {name for name, text in said.items() if text[:1].isdigit() and float(text) < 1e-2}
        for name in names:
            if name not in right:
                print(f"{name}: WRONG {said[name]}")
        print(f"{len(right)} of {len(names)} right, {time.monotonic() - begun:.0f} s", flush=True)
        if ON_GPU and not options.features:
            name = torch.cuda.get_device_name()
            print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, cores {os.cpu_count()}")
            (sweep_decode if options.decode else sweep_prefill)(right, begun + SECONDS)
    return 0 if len(right) == len(names) else 1


if __name__ == "__main__":
    raise SystemExit(main())
