"""Products with packed codes on a GPU, checked against their twins and timed beside torch's of floats: `python bench/gpu_packed.py`.

A line of the table is a matrix; each cell has microseconds, TB/s of packed bytes, and how many times as fast as bfloat16 that is.
Times are medians of CUDA graphs replayed, each over enough matrices that none waits in the L2. Kernels are compiled first, by
as many processes as there are cores. `--sweep` tries other divisions of the work, instead of the table, checks each against the
twin, and prints the best as lines for `MEASURED` of kernels/triton/packed/products.py; `--tiles` does so for 256 and 512 rows alone, in
groups of 128 and 32, slabs of weights among them. A case that fails says why, and the next
one runs. `--tiny` is for the interpreter.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from octavo.kernels.device_codes import DeviceCodes, block_size, zero_codes
from octavo.kernels.reference import layer as twin
from octavo.kernels.reference.layer import silu_and_mul
from octavo.kernels.triton.packed import products as packed
from octavo.kernels.triton.packed.products import GEMM_ROWS, PROGRAMS, SMALL_GEMM_ROWS, Gemm, Gemv, SmallGemm, power_of_rows, rule

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16
SHAPES = [(4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096), (1024, 6144), (3072, 1024)]  # in, out
KINDS = [(4, 128), (4, 32), (8, 128), (8, 32)]  # bits, group
ROWS = [1, 2, 4, 8, 16, 64, 256, 2048]
SWEPT = [(4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096), (1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024)]
GATED = {(4096, 24576), (1024, 6144)}  # as they stand in models: gate over up
SWEPT_ROWS = [1, 256, 2, 4, 8, 16, 32, 64, 128, 512]  # what matters most comes first
BEYOND_L2 = 150_000_000  # bytes of weights in one graph
SECONDS = 70  # after all is compiled, nothing begins later
REPLAYS = 9
LIMIT = 8e-3  # of a product's error: roundings

How = Gemv | SmallGemm | Gemm | int  # an int: weights in a slab


@dataclass(frozen=True)
class Cell:
    """One product: a shape and a kind of codes, a number of rows, and how."""

    size: int
    wide: int
    bits: int
    group: int
    rows: int
    how: How

    @property
    def gated(self) -> bool:
        """Whether the gate is in the same kernel."""
        return isinstance(self.how, (Gemv, SmallGemm)) and (self.size, self.wide) in GATED

    def run(self, x: Tensor, weight: DeviceCodes) -> Tensor:
        if self.gated:
            out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
            if isinstance(self.how, Gemv):
                return packed.gemv(x, weight, None, out, self.how, "swiglu")
            return packed.small_gemm(x, weight, None, out, self.how, "swiglu")
        out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
        if isinstance(self.how, int):
            return packed.by_slabs(x, weight, None, out, self.how)
        return packed.divided(x, weight, None, out, self.how)

    @property
    def variant(self) -> tuple:
        """Returns what a compiled kernel depends on."""
        if isinstance(self.how, int):
            return self.bits, self.group, "slab"
        if isinstance(self.how, Gemv):
            return self.bits, self.group, power_of_rows(self.rows), self.gated, self.size, *self.how
        rows = power_of_rows(self.rows) if isinstance(self.how, SmallGemm) else 0
        return self.bits, self.group, rows, self.gated, *self.how._replace(shares=min(self.how.shares, 2))

    @property
    def bytes(self) -> int:
        weight = zero_codes(self.wide, self.size, self.bits, self.group, "meta")
        return weight.words.nbytes + weight.scales.nbytes


def random_codes(size: int, wide: int, bits: int, group: int, order: bool = False) -> DeviceCodes:
    block = block_size(bits, group)
    columns = -(-size // block) * block
    words = torch.empty(wide, columns * bits // 16, dtype=torch.int16, device=DEVICE).random_(-(2**15), 2**15 - 1)
    scale = (torch.rand(wide, -(-columns // group), device=DEVICE) + 0.5).half()
    pairs = torch.stack([scale, -scale * 2 ** (bits - 1) + torch.rand_like(scale)], -1).half()
    permutation = torch.randperm(size, device=DEVICE) if order else None
    return DeviceCodes(bits, group, size, words, pairs.view(torch.int32).squeeze(-1), 2.0 ** -(bits + 2), permutation)


def chosen(size: int, wide: int, bits: int, group: int, rows: int) -> Cell:
    """Returns the cell that the engine would choose."""
    weight = zero_codes(wide, size, bits, group, "meta")
    how = rule(rows, weight, (size, wide) in GATED) if rows <= GEMM_ROWS else packed.SLAB
    return Cell(size, wide, bits, group, rows, how)


def small_gemm_choices(rows: int, blocks: int, gated: bool) -> Iterator[SmallGemm]:
    most = max(8 // rows, 1)
    divisions = [(64, 2, 4, True, 1), (64, 2, 4, False, 1), (128, 2, 4, True, 1), (64, 2, 6, True, 1)] if rows == SMALL_GEMM_ROWS else [
        (64, 4, 4, True, most), (64, 4, 4, False, most), (128, 4, 4, True, most), (128, 4, 4, False, most), (128, 4, 6, True, most),
        (128, 8, 4, True, most), (64, 2, 4, True, most), (64, 4, 4, True, most // 2), (128, 4, 4, True, most // 2),
    ]  # fmt: skip
    for (lines, warps, stages, ahead, splits), shares in product(divisions, (1,) if gated else (1, 2, 4, 8)):
        if splits and blocks % (splits * shares) == 0:
            yield SmallGemm(lines, splits, shares, warps, stages, ahead)


def gemm_choices(rows: int, blocks: int) -> Iterator[Gemm]:
    tall = max(rows, 16)
    tiles = [(tall, 64, 4, 4), (tall, 128, 4, 3), (tall, 128, 8, 3)] if rows <= 64 else [
        (128, 64, 4, 3), (128, 128, 8, 3), (128, 128, 8, 4), (64, 128, 8, 3), (256, 128, 8, 2), (256, 128, 8, 3), (256, 64, 4, 2)
    ]  # fmt: skip
    for (tall, columns, warps, stages), shares in product(tiles, (1, 2, 3, 4, 8)):
        if tall <= max(rows, 16) and blocks >= 4 * shares:
            yield Gemm(tall, columns, shares, warps, stages)


def choices(size: int, wide: int, rows: int) -> Iterator[SmallGemm | Gemm]:
    blocks = size // block_size(4, 128)
    if rows <= SMALL_GEMM_ROWS:
        yield from small_gemm_choices(rows, blocks, (size, wide) in GATED)
    if rows >= 8:
        yield from gemm_choices(rows, blocks)


def tiled_cells() -> list[Cell]:
    """Returns ways to divide the product of a batch of hundreds. An int is a slab of so many weights."""
    tiles = [(256, 128, 8, 3), (256, 128, 8, 2), (128, 128, 8, 4), (128, 128, 8, 3), (256, 64, 8, 3), (256, 64, 8, 2), (128, 64, 4, 4)]
    found = []
    for group, rows, (size, wide) in product((128, 32), (256, 512), SWEPT[:4]):
        divided = [Gemm(*tile[:2], shares, *tile[2:]) for tile in tiles for shares in shares_worth(rows, wide, tile)]
        found += [Cell(size, wide, 4, group, rows, how) for how in (*divided, packed.SLAB, 4 * packed.SLAB)]
    return found


def shares_worth(rows: int, wide: int, tile: tuple[int, int, int, int]) -> list[int]:
    """Returns the shares to try: up to two programs for each multiprocessor."""
    programs = -(-rows // tile[0]) * -(-wide // tile[1])
    return [shares for shares in (1, 2, 4) if programs * shares <= PROGRAMS] or [1]


def swept() -> list[Cell]:
    return [
        Cell(size, wide, 4, 128, rows, how)
        for group, rows in product((SWEPT[:4], SWEPT[4:]), SWEPT_ROWS)
        for size, wide in group
        for how in choices(size, wide, rows)
    ]


def table_cells() -> list[Cell]:
    return [chosen(*shape, *kind, rows) for shape, kind, rows in product(SHAPES, KINDS, ROWS)]


def microseconds(runs: list[Callable[[], object]]) -> float:
    """Returns the microseconds of one run."""
    if not ON_GPU:
        start = time.perf_counter()
        runs[0]()
        return (time.perf_counter() - start) * 1e6
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    repeats = max(1, 12 // len(runs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for run in runs:
                run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 3)]
    for mark in marks:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    spent = sorted(before.elapsed_time(after) for before, after in pairwise(marks[2:]))  # type: ignore[no-untyped-call]
    return spent[len(spent) // 2] * 1e3 / (repeats * len(runs))


def copies(nbytes: int) -> int:
    return min(max(1, -(-BEYOND_L2 // nbytes)), 128) if ON_GPU else 1


def inputs(rows: int, size: int) -> Tensor:
    return torch.randn(rows, size, device=DEVICE).to(DTYPE)


@dataclass(frozen=True)
class Check:
    """A function that both modules have, and its arguments. Errors up to `limit` are roundings."""

    label: str
    name: str
    given: tuple
    limit: float

    def run(self) -> Tensor:
        result: Tensor = getattr(packed, self.name)(*self.given)
        return result

    def error(self) -> float:
        return distance(self.run(), getattr(twin, self.name)(*self.given))


def checks(tiny: bool) -> Iterator[Check]:
    """Yields checks of every path: bits, groups, sizes that no tile divides, orders, biases."""
    kinds = [(4, 32)] if tiny else product((4, 8), (16, 32, 64, 128))
    for (bits, group), order in product(kinds, (False, True)):
        size, wide = (group, 40) if tiny else (11 * group, 200) if group < 128 else (1536, 72)
        weight = random_codes(size, wide, bits, group, order=order)
        label = f"{bits} bits, groups of {group}, {size} -> {wide}{', in order' if order else ''}"
        bias, index = torch.randn(wide, device=DEVICE).to(DTYPE), torch.tensor([5, 0, wide - 1, 5], device=DEVICE)
        yield Check(f"unpack, {label}", "unpack", (weight, DTYPE), 0.0)
        yield Check(f"rows, {label}", "unpack", (weight, DTYPE, index), 0.0)
        for rows in () if order and tiny else (3,) if order else (1, 17) if tiny else (1, 3, 8, 16, 17, 70, 300, 600):
            yield Check(f"linear of {rows}, {label}", "packed_linear", (inputs(rows, size), weight, bias), LIMIT)
        if not order:
            yield Check(f"gate of 2, {label}", "packed_gate_up", (inputs(2, size), weight), 1.5e-2)


def check(tiny: bool) -> int:
    """Returns how many checks differ."""
    wrong = 0
    for case in checks(tiny):
        try:
            error = case.error()
            text = "" if error <= case.limit else f"WRONG {case.label}: {error:.1e}"
        except Exception as failure:
            text = f"FAILED {case.label}: {type(failure).__name__} {str(failure).strip().splitlines()[:1]}"
        if text:
            wrong += 1
            print(text, flush=True)
    print(f"{wrong} wrong" if wrong else "all agree with their twins", flush=True)
    return wrong


def timed(cell: Cell, weights: list[DeviceCodes]) -> float | str:
    x = inputs(cell.rows, cell.size)
    try:
        return microseconds([lambda w=w: cell.run(x, w) for w in weights])
    except Exception as failure:
        return type(failure).__name__


def floats_time(size: int, wide: int, rows: int) -> float:
    x = inputs(rows, size)
    weights = [inputs(wide, size) for _ in range(copies(size * wide * 2))]
    return microseconds([lambda w=w: F.linear(x, w) for w in weights])


def table(deadline: float, tiny: bool) -> None:
    kinds, numbers = (KINDS[:1], [1, 17]) if tiny else (KINDS, ROWS)
    print("us, TB/s of packed bytes, times as fast as bfloat16\n" + " " * 22 + "".join(f"{rows:>22}" for rows in numbers))
    for size, wide in [(128, 48)] if tiny else SHAPES:
        floats = {rows: floats_time(size, wide, rows) for rows in numbers}
        print(f"{size:>5} -> {wide:<5} bfloat16" + "".join(f"{floats[rows]:>12.1f}{'':10}" for rows in numbers), flush=True)
        for bits, group in kinds:
            if time.monotonic() > deadline:
                print("time is up, the rest is left out")
                return
            weights = [random_codes(size, wide, bits, group) for _ in range(copies(chosen(size, wide, bits, group, 1).bytes))]
            cells = []
            for rows in numbers:
                cell = chosen(size, wide, bits, group, rows)
                spent = timed(cell, weights)
                rates = spent if isinstance(spent, str) else f"{spent:.1f}{cell.bytes / spent / 1e6:5.2f}{floats[rows] / spent:5.2f}"
                cells.append(f"{rates:>22}")
            print(f"{size:>5} -> {wide:<5} {bits}b of {group:<3}" + "".join(cells), flush=True)


def sweep(swept: list[Cell], deadline: float) -> None:
    """Prints the best choices for each matrix, group and number of rows, then all of them as Python."""
    best: dict[tuple[int, int, int], dict[int, How]] = {}
    for cells in grouped(swept):
        size, wide, rows, group = cells[0].size, cells[0].wide, cells[0].rows, cells[0].group
        if time.monotonic() > deadline:
            print("time is up, the rest is left out")
            break
        weights = kept_codes(size, wide, group)
        x = inputs(rows, size)
        exact = F.linear(x, dense_codes(size, wide, group))
        floats, times = floats_time(size, wide, rows), []
        for cell in cells:
            try:
                error = distance(cell.run(x, weights[0]), silu_and_mul(exact) if cell.gated else exact)
                if not error <= LIMIT:
                    print(f"WRONG {rows} rows, {size} -> {wide}, {_short(cell.how)}: {error:.1e}")
                    continue
            except Exception as failure:
                print(f"FAILED {_short(cell.how)}: {type(failure).__name__} {str(failure).strip().splitlines()[:1]}")
                continue
            times.append((timed(cell, weights), cell.how))
        times = sorted((one for one in times if isinstance(one[0], float)), key=lambda one: one[0])
        if times:
            best.setdefault((size, wide, group), {})[rows] = times[0][1]
            shown = "  ".join(f"{spent:.1f} {_short(how)}" for spent, how in times[:4])
            rates = f"{cells[0].bytes / times[0][0] / 1e6:.2f} TB/s {floats / times[0][0]:.2f}x of {floats:.1f}"
            print(f"{rows:>4} {size:>5} -> {wide:<5} of {group:<3} {rates}  {shown}  worst {times[-1][0]:.1f}", flush=True)
    for shape, chosen_of in best.items():
        print(f"    {shape[:2]}: (" + ", ".join(_short(chosen_of[rows]) for rows in sorted(chosen_of)) + "),")


def distance(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def grouped(cells: list[Cell]) -> list[list[Cell]]:
    found: dict[tuple[int, ...], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.size, cell.wide, cell.rows, cell.group), []).append(cell)
    return list(found.values())


@cache
def kept_codes(size: int, wide: int, group: int) -> list[DeviceCodes]:
    return [random_codes(size, wide, 4, group) for _ in range(copies(size * wide // 2))]


@cache
def dense_codes(size: int, wide: int, group: int) -> Tensor:
    return twin.unpack(kept_codes(size, wide, group)[0], DTYPE)


def _short(how: How) -> str:
    return f"slab {how >> 20}M" if isinstance(how, int) else f"{type(how).__name__}{tuple(how)}"


def compile_all(cells: list[Cell], processes: int) -> None:
    """Compiles all kernels in other processes, which leave them in Triton's cache."""
    start = time.monotonic()
    command = [sys.executable, *sys.argv, "--compile"]
    workers = [subprocess.Popen([*command, f"{part}/{processes}"], stdout=subprocess.DEVNULL) for part in range(processes)]
    for worker in workers:
        worker.wait()
    print(f"{len({cell.variant for cell in cells})} kernels, and those of checks, compiled in {time.monotonic() - start:.0f} s", flush=True)


def compile_some(cells: list[Cell], part: int, of: int) -> None:
    variants = {cell.variant: cell for cell in cells}
    runs = [lambda c=cell: c.run(inputs(c.rows, c.size), random_codes(c.size, 512, c.bits, c.group)) for cell in variants.values()]
    runs += [case.run for case in checks(tiny=False)]
    for run in runs[part::of]:
        try:
            run()
        except Exception as failure:
            print(f"{type(failure).__name__}: {str(failure).strip().splitlines()[:1]}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="no table: try other divisions of the work")
    parser.add_argument("--tiles", action="store_true", help="no table: try other tiles of 256 and 512 rows")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the interpreter")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.manual_seed(0)
    cells = tiled_cells() if options.tiles else swept() if options.sweep else table_cells()
    with torch.inference_mode():
        if options.compile:
            part, _, of = options.compile.partition("/")
            compile_some(cells, int(part), int(of))
            return 0
        name = torch.cuda.get_device_name() if ON_GPU else "no GPU"
        print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, {DTYPE}", flush=True)
        if ON_GPU:
            compile_all(cells, processes=max(1, (os.cpu_count() or 1) - 2))
        deadline = time.monotonic() + SECONDS
        wrong = check(options.tiny)
        if options.sweep or options.tiles:
            sweep(cells, deadline)
        else:
            table(deadline, options.tiny)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
