"""How the products with 8-bit floats divide their work: by shape and GPU alone, never tried out at run time."""

from typing import NamedTuple

import triton

from octavo.kernels.triton.target import HOPPER, capability, is_roomy

MOST_ROWS = 128  # of a tile
PROGRAMS = 264  # two for each multiprocessor
LEAST_BLOCKS = 8  # of 128 columns for a program, where several share them


class Tiles(NamedTuple):
    """How `fp8_tiles` divides its work."""

    rows: int
    columns: int = 64
    shares: int = 1
    warps: int = 4
    stages: int = 4


def tiles(rows: int, wide: int, size: int) -> Tiles:
    """A tile is as tall as there are rows, up to a limit. Where tiles are few, programs share the inner dimension."""
    tall = min(max(triton.next_power_of_2(rows), 16), MOST_ROWS)
    columns = 128 if tall == MOST_ROWS else 64
    programs = triton.cdiv(rows, tall) * triton.cdiv(wide, columns)
    shares = 1
    while shares * 2 * programs <= PROGRAMS and triton.cdiv(size, 128) >= 2 * shares * LEAST_BLOCKS:
        shares *= 2
    return Tiles(tall, columns, shares, 8 if tall == MOST_ROWS else 4, 4 if is_roomy(capability()) else 3)


def torch_rows(blocks: bool) -> int | None:
    """From how many rows on torch's products are faster than ours; None: they do not multiply such matrices on this GPU."""
    arch = capability()
    if arch < HOPPER or (blocks and arch != HOPPER):
        return None
    return 64
