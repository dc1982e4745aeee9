"""How the products with packed codes divide their work: by shape and GPU only, never tuned at run time.

`bench/gpu_packed.py --sweep` tries alternatives on a GPU and prints the best as lines for MEASURED.
"""

from typing import NamedTuple

import triton

from octavo.kernels.device_codes import DeviceCodes
from octavo.kernels.triton.target import capability, is_roomy

GEMV_STEPS = 12  # all steps are unrolled in the code
VOCABULARY = 100_000  # columns: such a wide matrix has enough programs that each may load two steps ahead
SMALL_GEMM_ROWS = 16
GEMM_ROWS = 512
PROGRAMS = 264  # two for each multiprocessor


class SmallGemm(NamedTuple):
    """How `packed_small_gemm` divides its work."""

    lines: int = 64  # of a dot: columns times splits
    splits: int = 1
    shares: int = 1
    warps: int = 4
    stages: int = 4
    ahead: bool = True  # a program prefetches all its words into the L2 cache before it waits for the previous kernel


class Gemm(NamedTuple):
    """How `packed_gemm` divides its work."""

    rows: int
    columns: int = 128
    shares: int = 1
    warps: int = 8
    stages: int = 3


class Gemv(NamedTuple):
    """How `packed_gemv` divides its work: steps of 8 blocks for each warp."""

    columns: int  # processed at once
    turns: int = 1  # if a step is a whole row of W
    ahead: int = 2  # steps or turns whose words a program loads before it waits
    warps: int = 4


How = Gemv | SmallGemm | Gemm

SMALL_TILE = Gemm(rows=128, columns=64, warps=8)  # the largest for GPUs with little shared memory: compiled, never timed

# On an H200, 4 bits in groups of 128: (in, out) -> up to 1, 2, 4, ... 512 rows
MEASURED: dict[tuple[int, int], tuple[How, ...]] = {
    (4096, 6144): (
        SmallGemm(64, 8, 1, 2, 4, True), SmallGemm(128, 4, 2, 4, 4, False), SmallGemm(128, 2, 4, 4, 4, False),
        SmallGemm(64, 1, 4, 4, 4, False), SmallGemm(64, 1, 4, 2, 4, False), Gemm(32, 64, 4, 4, 4), Gemm(64, 64, 4, 4, 4),
        Gemm(128, 64, 4, 4, 3), Gemm(256, 128, 2, 8, 3), Gemm(256, 128, 1, 8, 3),
    ),
    (4096, 4096): (
        SmallGemm(128, 8, 2, 4, 4, False), SmallGemm(128, 4, 2, 4, 4, False), SmallGemm(128, 2, 4, 4, 4, False),
        SmallGemm(64, 1, 4, 4, 4, False), SmallGemm(64, 1, 4, 2, 4, False), Gemm(32, 64, 4, 4, 4), Gemm(64, 64, 4, 4, 4),
        Gemm(128, 64, 4, 4, 3), Gemm(128, 64, 2, 4, 3), Gemm(256, 128, 2, 8, 3),
    ),
    (4096, 24576): (
        SmallGemm(128, 8, 1, 4, 4, False), SmallGemm(128, 4, 1, 4, 4, False), SmallGemm(64, 2, 1, 4, 4, False),
        SmallGemm(64, 1, 1, 4, 4, True), Gemm(16, 64, 1, 4, 4), Gemm(32, 64, 1, 4, 4), Gemm(64, 64, 1, 4, 4), Gemm(128, 64, 1, 4, 3),
        Gemm(256, 128, 1, 8, 3), Gemm(256, 128, 1, 8, 3),
    ),
    (12288, 4096): (
        SmallGemm(128, 8, 2, 4, 4, False), SmallGemm(128, 4, 2, 4, 4, False), SmallGemm(128, 2, 4, 4, 4, False),
        SmallGemm(64, 1, 8, 4, 4, False), SmallGemm(64, 1, 8, 2, 4, False), Gemm(32, 128, 8, 4, 3), Gemm(64, 64, 4, 4, 4),
        Gemm(128, 64, 4, 4, 3), Gemm(256, 128, 4, 8, 3), Gemm(256, 128, 2, 8, 3),
    ),
    (1024, 4096): (
        SmallGemm(128, 4, 1, 4, 4, True), SmallGemm(128, 2, 1, 4, 4, True), SmallGemm(64, 2, 1, 2, 4, True),
        SmallGemm(64, 1, 4, 4, 4, False), SmallGemm(64, 1, 4, 2, 4, False), Gemm(32, 64, 1, 4, 4), Gemm(64, 64, 1, 4, 4),
        Gemm(128, 64, 1, 4, 3), Gemm(128, 64, 1, 4, 3), Gemm(128, 64, 1, 4, 3),
    ),
    (2048, 1024): (
        SmallGemm(128, 4, 1, 4, 4, True), SmallGemm(64, 4, 1, 2, 4, True), SmallGemm(64, 2, 4, 4, 4, False),
        SmallGemm(64, 1, 8, 4, 4, False), SmallGemm(64, 1, 8, 2, 4, False), Gemm(32, 64, 4, 4, 4), Gemm(64, 64, 4, 4, 4),
        Gemm(128, 64, 4, 4, 3), Gemm(128, 64, 4, 4, 3), Gemm(128, 64, 4, 4, 3),
    ),
    (1024, 6144): (
        SmallGemm(128, 4, 1, 4, 4, True), SmallGemm(128, 4, 1, 4, 4, False), SmallGemm(64, 1, 1, 4, 4, True),
        SmallGemm(64, 1, 1, 4, 4, False), Gemm(16, 64, 1, 4, 4), Gemm(32, 64, 1, 4, 4), Gemm(64, 64, 1, 4, 4), Gemm(128, 64, 1, 4, 3),
        Gemm(128, 64, 1, 4, 3), Gemm(256, 128, 1, 8, 3),
    ),
    (3072, 1024): (
        SmallGemm(64, 8, 1, 2, 4, True), SmallGemm(64, 4, 1, 2, 4, True), SmallGemm(64, 2, 4, 4, 4, False),
        SmallGemm(64, 1, 8, 4, 4, False), SmallGemm(64, 1, 8, 2, 4, False), Gemm(32, 64, 4, 4, 4), Gemm(64, 64, 4, 4, 4),
        Gemm(128, 64, 4, 4, 3), Gemm(128, 64, 4, 4, 3), Gemm(128, 64, 4, 4, 3),
    ),
}  # fmt: skip


def rule(rows: int, weight: DeviceCodes, gated: bool = False) -> How:
    """For 1 to 512 rows. A gated `packed_small_gemm` does not split the inner dimension, and codes with a table do not use it."""
    alone = gemv_rule(weight) if rows <= 1 else None
    if alone is not None:
        return alone
    measured = MEASURED.get((weight.size, len(weight)))
    if weight.table is not None:
        how: How = gemm_rule(rows, weight)
    elif measured is not None:
        how = measured[power_of_rows(rows).bit_length() - 1]
    else:
        how = small_gemm_rule(rows, weight) if rows <= SMALL_GEMM_ROWS else gemm_rule(rows, weight)
    if isinstance(how, Gemm):
        return how if is_roomy(capability()) else small(how)
    return how._replace(shares=1) if gated and isinstance(how, SmallGemm) else how


def power_of_rows(rows: int) -> int:
    held: int = triton.next_power_of_2(max(rows, 1))
    return held


def gemv_rule(weight: DeviceCodes) -> Gemv | None:
    """None if a row of W is too long."""
    needed = min(power_of_rows(-(-weight.blocks // 8)), 4)
    warps = next((warps for warps in (4, 2, 1) if weight.blocks % (8 * warps) == 0), needed)
    steps = gemv_steps(weight, warps)
    columns, ahead = 8 if len(weight) >= 4096 else 4, 2 if len(weight) >= VOCABULARY else 1
    return Gemv(columns, 1, min(steps, ahead), warps) if steps <= GEMV_STEPS else None


def gemv_steps(weight: DeviceCodes, warps: int) -> int:
    return -(-weight.blocks // (8 * warps))


def small_gemm_rule(rows: int, weight: DeviceCodes) -> SmallGemm:
    """Splits until the dot is full, then divides the inner dimension until there are enough programs.

    Dots of 16 columns use two warps: with four, Triton would select the asynchronous tensor core instructions, and wait for each of them.
    """
    held = power_of_rows(rows)
    how = SmallGemm(warps=4 if held <= 8 else 2)
    while how.splits * held < 8 and weight.blocks >= 4 * how.splits:
        how = how._replace(splits=2 * how.splits)
    while _programs(how, weight) < PROGRAMS and weight.blocks >= 4 * how.splits * how.shares:
        how = how._replace(shares=2 * how.shares)
    return how


def _programs(how: SmallGemm, weight: DeviceCodes) -> int:
    return len(weight) * how.splits // how.lines * how.shares


def gemm_rule(rows: int, weight: DeviceCodes) -> Gemm:
    """All rows in one tile up to 256, so that weights are converted once; splits the inner dimension if there are few tiles."""
    tall = min(max(power_of_rows(rows), 32), 256)
    tile = Gemm(tall) if tall > 64 else Gemm(tall, columns=64, warps=4)
    tiles, shares = triton.cdiv(rows, tall) * triton.cdiv(len(weight), tile.columns), 1
    while tiles * shares < PROGRAMS // 3 and weight.blocks >= 8 * shares:
        shares *= 2
    return tile._replace(shares=shares)


def small(tile: Gemm) -> Gemm:
    """The largest tile that fits into 99 KiB, and into registers on GPUs that read operands from there, for as many programs as before."""
    larger = tile.rows * tile.columns // (SMALL_TILE.rows * SMALL_TILE.columns)
    return tile if larger <= 1 else SMALL_TILE._replace(shares=max(tile.shares // larger, 1))
