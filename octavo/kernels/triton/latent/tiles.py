"""Tiles of latent attention, by shape and GPU only, as in `attention/tiles.py`. They were compiled, and never timed on a GPU.

Products of 64 lines read both sides from shared memory on Hopper (`wgmma`); those of fewer lines, and of other GPUs, from registers.
"""

from dataclasses import dataclass

import torch
import triton

from octavo.kernels.triton.attention.tiles import MIN_DOT
from octavo.kernels.triton.target import HOPPER, LEAST, SHARED_MEMORY, is_roomy

MOST_LINES = 64  # of a program: the results of more do not fit in registers
MOST_RANK, MOST_ROTARY = 512, 64  # numbers of a latent and of a rotary key, at most


@dataclass(frozen=True, slots=True)
class LatentTiles:
    lines: int  # of queries: heads of a token, or tokens times heads; a power of two
    keys: int
    warps: int
    stages: int
    programs: int = 1  # decode: resident on a multiprocessor
    shares: int = 2  # decode: maximum work items for each of these that rows are split into
    grain: int = 8  # decode: tiles of a work item; there is a second one if there are twice as many
    merged: int = 8  # decode: heads whose parts are merged at once


def head_groups(heads: int, most: int) -> int:
    """Returns how many groups of equal size the heads are divided into, of at most so many each."""
    return next(groups for groups in range(-(-heads // most), heads + 1) if heads % groups == 0)


def padded(count: int) -> int:
    return max(int(triton.next_power_of_2(count)), MIN_DOT)


def decode_tiles(dtype: torch.dtype, heads: int, arch: int) -> LatentTiles:
    if dtype == torch.float32:
        return LatentTiles(lines=16, keys=16, warps=8, stages=1)
    if arch == HOPPER and heads > MOST_LINES // 2:
        return LatentTiles(lines=64, keys=64, warps=8, stages=3)
    lines = min(padded(heads), MOST_LINES // 2)
    if has_room(arch):  # for two programs on a multiprocessor: one loads while the other computes; with 5 stages each has a tile in flight
        return LatentTiles(lines=lines, keys=32, warps=4, stages=5 if is_roomy(arch) else 3, programs=2)
    return LatentTiles(lines=lines, keys=16, warps=8, stages=3)


def prefill_tiles(dtype: torch.dtype, arch: int) -> LatentTiles:
    if dtype == torch.float32:
        return LatentTiles(lines=16, keys=16, warps=8, stages=1)
    if arch == HOPPER:
        return LatentTiles(lines=64, keys=64, warps=8, stages=3)
    return LatentTiles(lines=32, keys=32 if has_room(arch) else 16, warps=8, stages=3)


def has_room(arch: int) -> bool:
    """Whether tiles of 32 keys fit, twice on a multiprocessor."""
    return SHARED_MEMORY.get(arch, LEAST) > LEAST
