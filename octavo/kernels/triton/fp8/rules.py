"""How the products with 8-bit floats divide their work: by shape and GPU only, never tuned at run time."""

from typing import NamedTuple

import triton

from octavo.kernels.triton.target import HOPPER, capability, is_roomy

FEW_ROWS = 64
MANY_ROWS = 128  # above this, on Hopper, torch's products are the fastest for every shape
PROGRAMS, FEW_PROGRAMS = 264, 384  # two for each multiprocessor of an H200, and three
LEAST_BLOCKS = 4  # of 128 columns per program, if several share them


class Tiles(NamedTuple):
    """How `fp8_tiles` divides its work."""

    rows: int
    columns: int = 64
    shares: int = 1
    warps: int = 4
    stages: int = 4


def exact_tiles(rows: int, wide: int, size: int) -> Tiles:
    """For x that is not rounded. W is converted in registers, so a tile of it has more warps."""
    tall = min(max(triton.next_power_of_2(rows), 16), 64 if is_roomy(capability()) else 32)
    return Tiles(tall, 128, _shares(triton.cdiv(rows, tall) * triton.cdiv(wide, 128), size, FEW_PROGRAMS), 8, 3)


def rounded_tiles(rows: int, wide: int, size: int) -> Tiles:
    """For rounded x. A tile has as many rows as x, up to a limit."""
    tall = min(max(triton.next_power_of_2(rows), 16), MANY_ROWS)
    shares = _shares(triton.cdiv(rows, tall) * triton.cdiv(wide, 64), size, PROGRAMS)
    roomy = is_roomy(capability())
    stages = 3 if not roomy or (tall >= FEW_ROWS and shares == 1) else 4 if tall > FEW_ROWS else 5
    return Tiles(tall, 64, shares, 4, stages)


def _shares(programs: int, size: int, most: int) -> int:
    """Returns how many programs share the inner dimension if there are few tiles."""
    shares = 1
    while shares * 2 * programs <= most and triton.cdiv(size, 128) >= 2 * shares * LEAST_BLOCKS:
        shares *= 2
    return shares


def is_for_torch(rows: int, wide: int, size: int, blocks: bool) -> bool:
    """Whether torch multiplies rounded rows faster than `fp8_tiles`. It does not split the inner dimension, so narrow matrices need
    more rows.

    It supports blocks only on Hopper.
    """
    known = capability() == HOPPER or (capability() > HOPPER and not blocks)
    return known and rows > (FEW_ROWS if wide > size else MANY_ROWS)
