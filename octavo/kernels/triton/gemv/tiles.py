"""How the kernels for at most GEMV_ROWS rows divide their work: by shape only, never tuned at run time.

`bench/gpu_few.py` tries alternatives in whole decode steps and prints the best, to check these rules.
"""

from dataclasses import dataclass

import torch

GEMV_ROWS = 4
FP8_GEMV_ROWS = 1  # with 8-bit floats, for which tensor cores are faster from two rows on
FUSED_ROWS = 4  # with `--deterministic`: rows that a product norms itself
MAX_HELD = 32768  # the longest row of W that a program holds in registers
HELD_TILE = 16384  # elements of W that a program holds
MERGED_TILE = 65536  # the same, if it merges attention first
PER_THREAD = 64  # elements in one thread's registers
PROGRAMS = 1056  # eight for each multiprocessor: with more, each program processes several tiles, and prepares x once for them
MAX_COLUMNS = 8
LEAST_PROGRAMS = 128  # one for each multiprocessor, if there are so many rows of W: a router has few
MAX_SPLITS = 16


@dataclass(frozen=True, slots=True)
class ProductTiles:
    columns: int  # rows of W in a tile
    warps: int
    turns: int = 1  # tiles that a program processes in sequence


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    keys: int  # keys and values in a tile
    warps: int
    splits: int  # maximum number of splits of a context, a power of two
    few_splits: int  # the number of splits while they are ...
    least_share: int  # ... at least this long
    long_share: int  # ... and at most this: longer contexts have more splits, up to the maximum, and then longer ones


# On an H200: (elements of a row of W, padded to a power of two; rows of W, of the gate only if gated; gated)
MEASURED = {
    (1024, 4096, False): ProductTiles(columns=4, warps=4, turns=2),
    (1024, 3072, True): ProductTiles(columns=4, warps=8),
    (4096, 1024, False): ProductTiles(columns=4, warps=8),
    (4096, 6144, False): ProductTiles(columns=4, warps=8),
    (2048, 5120, False): ProductTiles(columns=4, warps=4, turns=2),
    (4096, 5120, False): ProductTiles(columns=4, warps=4, turns=2),  # rows of 2,880
    (4096, 4096, False): ProductTiles(columns=2, warps=4, turns=4),  # rows of 2,560, like the next two
    (4096, 10240, True): ProductTiles(columns=2, warps=4, turns=8),
    (16384, 2560, False): ProductTiles(columns=2, warps=16),
    (4096, 12288, True): ProductTiles(columns=1, warps=4, turns=4),
    (16384, 4096, False): ProductTiles(columns=1, warps=16, turns=8),
}
FP8_HELD_TILE = 32768  # 8-bit floats of W that a program holds


def product_tiles(size: int, out: int, gated: bool) -> ProductTiles:
    """size: of a row of W, padded to a power of two; out: rows of W, of the gate only if gated."""
    if (size, out, gated) in MEASURED:
        return MEASURED[size, out, gated]
    matrices = 2 if gated else 1
    columns = max(min(HELD_TILE // matrices // size, MAX_COLUMNS, power_below(out // LEAST_PROGRAMS)), 1)
    warps = min(max(columns * size * matrices // (32 * PER_THREAD), 4), 16)
    return ProductTiles(columns, warps, turns=max(out // (columns * PROGRAMS), 1))


def power_below(number: int) -> int:
    """Returns the largest power of two up to a number; 0 for 0."""
    return (1 << number.bit_length()) >> 1


def fp8_row_tiles(size: int, out: int, gated: bool) -> ProductTiles:
    """Like `product_tiles`, for 8-bit floats and one row: the fastest, or nearly so, on an H200 for the four products of Qwen3-8B."""
    matrices = 2 if gated else 1
    columns = max(min(FP8_HELD_TILE // matrices // size, MAX_COLUMNS), 1)
    return ProductTiles(columns, warps=min(max(columns * size * matrices // (32 * 2 * PER_THREAD), 4), 16))


def merge_tiles(size: int, rows: int = 1) -> ProductTiles:
    """Few programs, each with many rows of W: each program reads all parts of attention, from the L2 cache, before it can merge them.

    Several rows of x leave no registers for that.
    """
    if rows > 1:
        return ProductTiles(columns=max(min(HELD_TILE // size, 4), 1), warps=4 if size <= 2048 else 8)
    return ProductTiles(columns=8, warps=4) if size <= 2048 else ProductTiles(columns=max(min(MERGED_TILE // size, 16), 1), warps=8)


def decode_tiles(
    dtype: torch.dtype, rows: int, max_context: int, head_dim: int = 128, heads: int = 16, kv_heads: int = 8
) -> DecodeTiles:
    """Many splits make attention fast and the next kernel slow, which merges them in every program: use few if queries are long."""
    if rows > 2:
        few, least, long = 4, 64, 512
    elif heads * head_dim >= 4096 and kv_heads >= 8:
        few, least, long = 4, 64, 256
    else:
        few, least, long = 16, 32, 512
    splits = few
    while splits < MAX_SPLITS and splits * long < max_context:
        splits *= 2
    keys, warps = (16, 4) if dtype == torch.float32 else (32, 8) if head_dim > 128 else (64, 8)
    return DecodeTiles(keys, warps, splits=splits, few_splits=few, least_share=least, long_share=long)
