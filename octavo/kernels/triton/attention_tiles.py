"""How the attention kernels cut their work: tile sizes, warps, pipeline stages and splits, by shape alone.

Chosen by rule, not tried out at run time: the first request is as quick as the last, and equal shapes give equal bits.
`bench/gpu_prefill.py` is how the rules were found, on an H200.
"""

from dataclasses import dataclass

import torch

PROGRAMS = 1024  # rows * KV heads * splits that fill a GPU of 132 multiprocessors a few times over
MAX_SPLITS = 64
TOKENS_PER_SPLIT = 256  # a split shorter than this costs more in the merge than it gains
MIN_DOT = 16  # tl.dot takes no smaller side


@dataclass(frozen=True, slots=True)
class Tiles:
    keys: int  # a tile of keys and values
    warps: int
    stages: int  # tiles on their way from memory at once
    queries: int = MIN_DOT  # a tile of queries: tokens * heads of a group
    described: bool = False  # prefill: new keys and values come by tensor descriptors (Hopper's copy engine), not by pointers
    lagging: bool = False  # prefill: values are mixed one tile late, so that the product runs under the next tile's softmax
    joined: bool = False  # prefill: the diagonal is masked in the same loop as all before it
    divided: bool = False  # prefill: Hopper's own kernel, one group of warps to copy and two to compute
    turns: bool = False  # of divided: the two that compute take turns at the tensor cores


def decode_tiles(dtype: torch.dtype, head_dim: int) -> Tiles:
    if dtype == torch.float32:
        return Tiles(keys=16, warps=4, stages=2)
    if head_dim > 128:
        return Tiles(keys=32, warps=2, stages=3)
    return Tiles(keys=64, warps=2, stages=3)


def prefill_tiles(dtype: torch.dtype, head_dim: int, plain: bool = True) -> Tiles:
    if dtype == torch.float32:
        return Tiles(keys=16, warps=8, stages=2, queries=32)
    if head_dim > 128:
        return Tiles(keys=32, warps=8, stages=3, queries=128, described=True, lagging=True)
    if plain:  # no window, cap, sinks or slopes: they would take registers that these tiles do not leave
        return Tiles(keys=64, warps=4, stages=2, queries=128, described=True)
    return Tiles(keys=64, warps=8, stages=3, queries=128, described=True, lagging=True)


def decode_splits(rows: int, kv_heads: int, max_context: int) -> int:
    """Into how many parts a row's context is cut at most, a power of two: more where rows are too few to fill the GPU."""
    splits = 1
    while splits < MAX_SPLITS and rows * kv_heads * splits * 2 <= PROGRAMS and max_context >= TOKENS_PER_SPLIT * splits * 2:
        splits *= 2
    return splits
