"""How the kernels of `--deterministic` divide their work. Nothing here changes a bit, except `keys`, so it may depend on rows and GPU.

`bench/gpu_invariant.py` tries alternatives, and shows that their bits are equal.
"""

from typing import NamedTuple

import torch

from octavo.kernels.triton.target import capability, is_roomy

MIN_ROWS = 16  # of a tile
NARROW = 4096  # rows of W: smaller tiles make enough programs
GATED_ROWS = 256  # whose gate is fused into a product


class Tiles(NamedTuple):
    """Of a product."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int


class Reading(NamedTuple):
    """Of attention."""

    warps: int
    stages: int  # of the pipeline, which also waits for the table
    queries: int = MIN_ROWS  # in a tile; each head of a group counts as one
    split: bool = False  # prefill: pieces that every query sees are read without masks, which needs registers


def tiles_for(rows: int, wide: int, dtype: torch.dtype) -> Tiles:
    if dtype == torch.float32:
        return Tiles(16 if rows <= 16 else 32, 32, 32, 4, 2)
    if not is_roomy(capability()):
        return Tiles(16 if rows <= MIN_ROWS else 32 if rows <= 32 else 64, 64, 64, 4, 3)
    if rows <= MIN_ROWS:  # 1,024 rows of W: 4.6 us on an H200, and 5.3 in tiles of 16
        return Tiles(MIN_ROWS, 64, 256, 4, 4)
    if rows <= 128:
        return Tiles(64, 64, 128, 4, 4)
    return Tiles(128, 64, 64, 4, 5) if wide <= NARROW else Tiles(128, 128, 64, 8, 4)


def gated_tiles(rows: int, wide: int, dtype: torch.dtype) -> Tiles:
    """For at most `GATED_ROWS` rows. A program has two tiles of W, of gate and of up. `wide`: numbers of a result"""
    if dtype == torch.float32:
        return Tiles(16 if rows <= 16 else 32, 16, 32, 4, 2)
    if not is_roomy(capability()):
        return Tiles(16 if rows <= MIN_ROWS else 32 if rows <= 32 else 64, 32, 64, 4, 3)
    if rows <= MIN_ROWS:
        return Tiles(MIN_ROWS, 32, 256, 4, 3)
    return Tiles(64, 64, 64, 4, 4) if rows <= 64 else Tiles(128, 64, 64, 8, 4)


def fused_tiles(dtype: torch.dtype, gated: bool) -> Tiles:
    """For at most `FUSED_ROWS` rows (`gemv/tiles.py`)."""
    if dtype == torch.float32:
        return Tiles(MIN_ROWS, 32, 32, 4, 2)
    if not is_roomy(capability()):
        return Tiles(MIN_ROWS, 32, 64, 4, 3)
    return Tiles(MIN_ROWS, 32, 256, 4, 3) if gated else Tiles(MIN_ROWS, 64, 256, 4, 3)


def direct_tiles(dtype: torch.dtype, gated: bool) -> Tiles:
    """Of experts of few tokens, as floats."""
    if dtype == torch.float32:
        return Tiles(MIN_ROWS, 32, 32, 4, 2)
    if not is_roomy(capability()):
        return Tiles(MIN_ROWS, 32, 64, 4, 3)
    return Tiles(MIN_ROWS, 32, 128, 4, 4 if gated else 5)


def direct_code_tiles(dtype: torch.dtype) -> Tiles:
    """Of experts of few tokens, as codes; a step is a block. Fewer columns would have another order of products on Hopper."""
    if dtype == torch.float32:
        return Tiles(MIN_ROWS, 32, 0, 4, 2)
    return Tiles(MIN_ROWS, 64, 0, 4, 3) if is_roomy(capability()) else Tiles(MIN_ROWS, 64, 0, 8, 2)


def keys_of(dtype: torch.dtype, head_dim: int) -> int:
    """Returns the keys of a tile, which change the result: they do not depend on the GPU."""
    return 16 if dtype == torch.float32 else 32 if head_dim > 128 else 64


def decode_reading() -> Reading:
    return Reading(warps=4 if is_roomy(capability()) else 8, stages=2)


def team_reading(dtype: torch.dtype, queries: int) -> Reading:
    """`queries`: as `team_sizes` says"""
    small = dtype == torch.float32 or is_roomy(capability())
    return Reading(warps=4 if small else 8, stages=2, queries=queries)


def prefill_reading(dtype: torch.dtype, head_dim: int) -> Reading:
    """As many queries as fit into the registers."""
    if dtype == torch.float32 or not is_roomy(capability()):
        return Reading(warps=8, stages=2, queries=32)
    return Reading(warps=8, stages=2, queries=128 if head_dim <= 128 else 64)
