"""How the attention kernels divide their work: tile sizes, warps, pipeline stages and work items, by shape and GPU only.

The rules are fixed, not tuned at run time: the first request is as fast as the last, and equal steps give equal bits.
They were found with `bench/gpu_prefill.py` on an H200.
"""

from dataclasses import dataclass
from functools import cache

import torch

from octavo.kernels.triton.target import has_divided_prefill, is_roomy

MIN_DOT = 16  # minimum size of a dimension of tl.dot


@dataclass(frozen=True, slots=True)
class Tiles:
    keys: int  # keys and values in a tile
    warps: int
    stages: int  # of the pipeline. Decode also waits for the table: with 3 one tile is in flight, with 5 two
    queries: int = MIN_DOT  # queries in a tile: tokens * heads of a group
    described: bool = False  # prefill: new keys and values are loaded by tensor descriptors (Hopper's copy engine), not by pointers
    lagging: bool = False  # prefill: values are mixed one tile late, so that the product overlaps with the next softmax
    programs: int = 4  # decode: resident on a multiprocessor. Shared-prefix groups: launched for it; a third one waits for room
    shares: int = 2  # decode: maximum work items for each of these that rows are split into
    grain: int = 16  # decode: tiles of a work item; there is a second one if there are twice as many
    pdl: bool = True  # decode is launched while the previous kernel still runs
    divided: bool = False  # prefill: the Hopper kernel, one group of warps for copies and two for computation


def decode_tiles(dtype: torch.dtype, head_dim: int) -> Tiles:
    if dtype == torch.float32:
        return Tiles(keys=16, warps=4, stages=2)
    if head_dim > 128:
        return Tiles(keys=32, warps=2, stages=3)
    return Tiles(keys=64, warps=4, stages=2)


def team_tiles(dtype: torch.dtype, head_dim: int) -> Tiles:
    """`queries`: of all rows of a shared-prefix group"""
    if dtype == torch.float32:
        return Tiles(keys=16, warps=4, stages=2)
    if head_dim > 128:
        return Tiles(keys=32, warps=4, stages=2, queries=32, programs=3)
    return Tiles(keys=64, warps=4, stages=3, queries=64, programs=3)


def prefill_tiles(dtype: torch.dtype, head_dim: int, arch: int, plain: bool = True) -> Tiles:
    """`plain`: no window, cap, sinks or slopes."""
    if dtype == torch.float32:
        return Tiles(keys=16, warps=8, stages=2, queries=32)
    if not is_roomy(arch):
        return _small_prefill_tiles(head_dim, plain)
    if head_dim > 128:
        return Tiles(keys=32, warps=8, stages=3, queries=128, described=True, lagging=True)
    if plain and has_divided_prefill(arch) and head_dim in (64, 128):
        return Tiles(keys=128, warps=4, stages=2, queries=128, divided=True)
    if plain:  # windows and other features would need registers that these tiles do not leave
        return Tiles(keys=64, warps=4, stages=2, queries=128, described=True)
    return Tiles(keys=64, warps=8, stages=3, queries=128, described=True, lagging=True)


def _small_prefill_tiles(head_dim: int, plain: bool) -> Tiles:
    """For GPUs whose products read operands from registers: the largest tiles without spills, within 99 KiB. Compiled, never timed."""
    if head_dim > 128:
        return Tiles(keys=32, warps=8, stages=2, queries=64)
    if plain:
        return Tiles(keys=32, warps=8, stages=3, queries=128)
    return Tiles(keys=32, warps=4, stages=2, queries=64)


@cache
def multiprocessors(device: torch.device) -> int:
    """Returns 1 if kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
