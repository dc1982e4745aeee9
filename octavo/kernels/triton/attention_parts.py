"""What the decode and the prefill kernel share: where a key lies, and one tile of softmax.

Scores are kept in units of log2, scaled once: exp2 is the GPU's own exponential. A hidden score is a large negative number
and not -inf, so that a tile in which a query sees nothing stays finite; the first key it does see wipes out what that left.
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
HIDDEN = tl.constexpr(-1.0e30)


@triton.jit
def slots_of(table, position, mask, region_size, BLOCK_SIZE: tl.constexpr, PAGED: tl.constexpr):
    """The slot of each position of a row. Paged, `table` holds its blocks; else its first entry is the row's own region."""
    if PAGED:
        block = tl.load(table + position // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
        return block * BLOCK_SIZE + position % BLOCK_SIZE
    else:
        return tl.load(table).to(tl.int64) * region_size + position


@triton.jit
def score(q, keys, scale):
    """In units of log2. q [M, DIM], keys [N, DIM] -> [M, N] float32; float32 stays float32, never tf32"""
    return tl.dot(q, tl.trans(keys), input_precision="ieee") * scale


@triton.jit
def soften(scores, values, largest, total, mixed):
    """One step of online softmax over a tile; returns the new (largest, total, mixed)."""
    now = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - now[:, None])
    fade = tl.exp2(largest - now)
    total = total * fade + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * fade[:, None], input_precision="ieee")
    return now, total, mixed


@triton.jit
def finish(largest, total, mixed):
    """(output, log-sum-exp in units of log2); nothing seen gives zeros and -inf."""
    seen = total > 0
    safe = tl.where(seen, total, 1.0)
    return mixed / safe[:, None], tl.where(seen, largest + tl.log2(safe), float("-inf"))
