"""How the attention kernels cut their work: tile sizes, warps, pipeline stages and shares, by shape and GPU alone.

Chosen by rule, not tried out at run time: the first request is as quick as the last, and equal steps give equal bits.
`bench/gpu_prefill.py` is how the rules were found, on an H200.
"""

from dataclasses import dataclass
from functools import cache

import torch

from octavo.kernels.triton.target import has_divided_prefill, is_roomy

MIN_DOT = 16  # tl.dot takes no smaller side


@dataclass(frozen=True, slots=True)
class Tiles:
    keys: int  # a tile of keys and values
    warps: int
    stages: int  # of the pipeline. Decode also waits for the table: 3 keep one tile on its way, 5 two
    queries: int = MIN_DOT  # a tile of queries: tokens * heads of a group
    described: bool = False  # prefill: new keys and values come by tensor descriptors (Hopper's copy engine), not by pointers
    lagging: bool = False  # prefill: values are mixed one tile late, so that the product runs under the next tile's softmax
    programs: int = 4  # decode: that a multiprocessor runs at once. Teams: that it is given; a third one waits until there is room
    shares: int = 2  # decode: that rows are cut into for each of these, at most
    grain: int = 16  # decode: tiles of a share; there is a second one where there are twice as many to read
    pdl: bool = True  # decode is launched while the kernel before still runs
    divided: bool = False  # prefill: Hopper's own kernel, one group of warps to copy and two to compute


def decode_tiles(dtype: torch.dtype, head_dim: int) -> Tiles:
    if dtype == torch.float32:
        return Tiles(keys=16, warps=4, stages=2)
    if head_dim > 128:
        return Tiles(keys=32, warps=2, stages=3)
    return Tiles(keys=64, warps=4, stages=2)


def team_tiles(dtype: torch.dtype, head_dim: int) -> Tiles:
    """`queries`: of all rows of a team"""
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
    if plain:  # windows and the rest would take registers that these tiles do not leave
        return Tiles(keys=64, warps=4, stages=2, queries=128, described=True)
    return Tiles(keys=64, warps=8, stages=3, queries=128, described=True, lagging=True)


def _small_prefill_tiles(head_dim: int, plain: bool) -> Tiles:
    """Where products take their operands from registers: the largest that do not spill, within 99 KiB. Compiled, never timed."""
    if head_dim > 128:
        return Tiles(keys=32, warps=8, stages=2, queries=64)
    if plain:
        return Tiles(keys=32, warps=8, stages=3, queries=128)
    return Tiles(keys=32, warps=4, stages=2, queries=64)


@cache
def multiprocessors(device: torch.device) -> int:
    """One, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
