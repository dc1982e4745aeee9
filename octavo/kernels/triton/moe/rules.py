"""How MoE products are divided, by shape and GPU only, never tuned at run time.

    few tokens    each token reads its own experts' matrices, once for each choice
    more          each expert's matrix is read once per tile of rows, which should be as tall as the expert has rows

With 256 tokens, 8 of 128 experts each, an expert has 16 rows: reading matrices is the bottleneck, so a tile should hold all of them.
"""

from typing import NamedTuple

import torch
import triton

from octavo.kernels.device_codes import DeviceCodes
from octavo.kernels.triton.target import capability, is_roomy

FEW_TOKENS = 4
HELD = 16384  # matrix elements that a program holds for a small batch
MAX_HELD = 2 * HELD
PER_THREAD = 64  # elements in one thread's registers
MAX_COLUMNS = 8
THREADS = 32  # in a warp
BLOCKS = 8  # of a row of codes that a warp has at once


class Row(NamedTuple):
    columns: int  # rows of W in a tile
    warps: int


# On an H200: (elements of a row of W, padded to a power of two; rows held for each column)
MEASURED = {(2048, 2): Row(columns=1, warps=2), (1024, 8): Row(columns=2, warps=4)}


class PackedRow(NamedTuple):
    columns: int
    warps: int
    steps: int  # per row of W
    ahead: int  # steps whose codes are in flight


class Grouped(NamedTuple):
    rows: int
    columns: int
    step: int
    warps: int
    stages: int


def row_tiles(size: int, matrices: int) -> Row | None:
    """For floats: `matrices` rows of `size` elements are held for each column. None if these are too many."""
    padded = triton.next_power_of_2(size)
    if padded * matrices > MAX_HELD:
        return None
    if (padded, matrices) in MEASURED:
        return MEASURED[padded, matrices]
    columns = max(min(HELD // (padded * matrices), MAX_COLUMNS), 1)
    return Row(columns, min(max(columns * padded * matrices // (THREADS * PER_THREAD), 1), 16))


def packed_row_tiles(weight: DeviceCodes, matrices: int) -> PackedRow:
    """For codes: `matrices` rows form a column, one after the other.

    Uses the number of warps that leaves the fewest threads idle at the end of a row, with few steps: steps need registers.
    """
    steps = {warps: -(-weight.blocks // (BLOCKS * warps)) for warps in (4, 2, 1)}
    warps = min(steps, key=lambda warps: steps[warps] * warps)  # the largest in a tie
    if matrices == 1:
        return PackedRow(8 if steps[warps] == 1 else 4, warps, steps[warps], ahead=min(steps[warps], 2))
    return PackedRow(2, warps, steps[warps], ahead=min(steps[warps] * matrices, 8 if steps[warps] == 1 else 2))


def few_tokens(tokens: int) -> bool:
    return tokens <= FEW_TOKENS


def grouped_tiles(choices: int, count: int, dtype: torch.dtype, gated: bool) -> Grouped:
    """For floats. A tile has as many rows as fit and as an expert has on average, with some spare."""
    rows = grouped_rows(choices, count)
    if dtype == torch.float32:
        return Grouped(min(rows, 32), 32, 32, 4, 2)
    if not is_roomy(capability()):
        return Grouped(min(rows, 64), 64, 32, 4, 3)
    if rows <= 64:
        return Grouped(rows, 64 if gated else 128, 64, 4, 4)
    return Grouped(rows, 128, 64, 8, 3 if gated else 4)


def packed_grouped_tiles(choices: int, count: int, dtype: torch.dtype) -> Grouped:
    """For codes; a step is a block."""
    rows = grouped_rows(choices, count)
    if dtype == torch.float32:
        return Grouped(min(rows, 32), 32, 0, 4, 2)
    if not is_roomy(capability()):
        return Grouped(min(rows, 64), 64, 0, 8, 2)
    return Grouped(rows, 64, 0, 4, 3) if rows <= 64 else Grouped(rows, 128, 0, 8, 3)


def grouped_rows(choices: int, count: int) -> int:
    """The rows of a tile, a power of two: it depends on the shape of a step, not on its choices."""
    rows: int = triton.next_power_of_2(-(-3 * choices // (2 * count)))
    return min(max(rows, 16), 128)
