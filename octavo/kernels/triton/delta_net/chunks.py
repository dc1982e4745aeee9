"""Gated DeltaNet in chunks: rows of many tokens, as products of matrices (the WY form of the delta rule).

    positions of a sequence   0 ......... 64 ........ 128 .. 150 ..... 192       cells of 64, wherever the tokens of a step begin
    tokens of a row                  |=== | ========= | ==== | ======= |===      chunks end at the edges of cells, and where a
                                                             checkpoint          checkpoint is wanted

    convolve     q, k and v of all tokens                 any tokens
    within       u in place of v, w, q k^T, G             a cell and a head: all cells at once
    across       results and states                       some columns of a head's matrix: one chunk after another

Grids depend on the number of tokens and rows alone. A row's cells begin at query_start // 64 + 2 * row, so a program finds its row by
bisection.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.delta_net.inputs import convolved, keep, load_gates, load_state, unit
from octavo.kernels.triton.pdl import begin, wait

CELL = tl.constexpr(64)  # positions
HALF = tl.constexpr(32)  # positions: a triangle is inverted in blocks of as many
LEVELS = tl.constexpr(5)  # HALF is 2 ** LEVELS

# -- the convolution


@triton.jit
def rows_of(query_start, token, num_rows):
    """The row of each token: the last one that starts at or before it."""
    low = tl.zeros_like(token)
    high = low + num_rows
    left = num_rows
    while left > 0:
        middle = (low + high) // 2
        is_before = (low < high) & (tl.load(query_start + middle, mask=low < high, other=0).to(tl.int32) <= token)
        high = tl.where(is_before | (low >= high), high, middle)
        low = tl.where(is_before, middle + 1, low)
        left = left // 2
    return low - 1


@triton.jit
def head_inputs(
    qkv, conv, weight, token, first, slot, channel, present, STRIDE: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The convolution of a tile. Where no token is among the first of its row, nothing is loaded from the states."""
    if tl.min(token - first, 0) >= WIDTH - 1:
        out = convolved(
            qkv, conv, weight, token[:, None], first[:, None], slot[:, None], channel[None, :], present, STRIDE, CHANNELS, WIDTH, True
        )
    else:
        out = convolved(
            qkv, conv, weight, token[:, None], first[:, None], slot[:, None], channel[None, :], present, STRIDE, CHANNELS, WIDTH
        )
    return out


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def convolve(
    qkv,
    conv_weight,
    conv,
    query_start,
    reads,
    q,
    k,
    v,
    out,
    num_tokens,
    num_rows,
    STRIDE: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM_TILE: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of q, k or v of some tokens. Tokens after the last row, which are padding, get zeros as their result."""
    begin(PDL)
    token, part = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    dim = tl.arange(0, DIM_TILE)
    K_SIZE: tl.constexpr = K_HEADS * K_DIM
    CHANNELS: tl.constexpr = 2 * K_SIZE + V_HEADS * V_DIM
    wait(PDL)
    row = rows_of(query_start, token, num_rows)
    first, end = tl.load(query_start + row).to(tl.int32), tl.load(query_start + row + 1).to(tl.int32)
    slot = tl.load(reads + row).to(tl.int64)
    present = (token < end) & (end - first > MOST)
    if part < 2 * K_HEADS:
        inside = present[:, None] & (dim < K_DIM)[None, :]
        numbers = head_inputs(qkv, conv, conv_weight, token, first, slot, part * K_DIM + dim, inside, STRIDE, CHANNELS, WIDTH)
        numbers = unit(numbers, EPS) * tl.where(part < K_HEADS, SCALE, 1.0)
        place = (token.to(tl.int64)[:, None] * K_HEADS + part % K_HEADS) * K_DIM + dim[None, :]
        tl.store((q if part < K_HEADS else k) + place, numbers.to(q.dtype.element_ty), mask=inside)
    else:
        head = part - 2 * K_HEADS
        inside = present[:, None] & (dim < V_DIM)[None, :]
        channel = 2 * K_SIZE + head * V_DIM + dim
        numbers = head_inputs(qkv, conv, conv_weight, token, first, slot, channel, inside, STRIDE, CHANNELS, WIDTH)
        place = (token.to(tl.int64)[:, None] * V_HEADS + head) * V_DIM + dim[None, :]
        tl.store(v + place, numbers.to(v.dtype.element_ty), mask=inside)
        nobodys = (token >= end) & (token < num_tokens)
        tl.store(out + place, tl.zeros_like(numbers), mask=nobodys[:, None] & (dim < V_DIM)[None, :])


# -- within a chunk
#
# Within a chunk, G is the sum of the logarithms of the decays up to a token, S the state before the chunk. With each row times beta,
#
#     A = strictly lower part of (k k^T * exp(G_i - G_j))      u = (1 + A)^-1 beta v      w = (1 + A)^-1 beta exp(G) k
#
# the changes of the tokens are u - w S, their results exp(G) q S + (lower part of (q k^T * exp(G_i - G_j))) (u - w S), and the next
# state is exp(G_end) S + (exp(G_end - G) k)^T (u - w S). Triangles are three blocks: upper, left, lower.


@triton.jit
def load_lines(x, token, head, column, inside, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Columns of a head of some tokens, from x [T, HEADS, DIM]; zeros outside."""
    place = (token.to(tl.int64)[:, None] * HEADS + head) * DIM + column[None, :]
    return tl.load(x + place, mask=inside[:, None] & (column < DIM)[None, :], other=0.0)


@triton.jit
def store_lines(x, token, head, column, inside, numbers, HEADS: tl.constexpr, DIM: tl.constexpr):
    place = (token.to(tl.int64)[:, None] * HEADS + head) * DIM + column[None, :]
    tl.store(x + place, numbers.to(x.dtype.element_ty), mask=inside[:, None] & (column < DIM)[None, :])


@triton.jit
def multiply(x, y, total=None):
    """x y, added to `total` if it is given, float32. The rounding errors of float32 factors are those of float32."""
    return tl.dot(x, y, total, input_precision="tf32x3")


@triton.jit
def joined(x, y, z, PRECISION: tl.constexpr):
    """x y z"""
    return tl.dot(tl.dot(x, y, input_precision=PRECISION), z, input_precision=PRECISION)


@triton.jit
def inverse(upper, left, lower, PRECISION: tl.constexpr):
    """(1 + A)^-1 of a strictly lower triangle, which is given and returned as its three blocks [HALF, HALF] float32.

    The inverses of blocks are joined to those of twice the size. Like forward substitution, and unlike powers of the triangle, this
    does not grow errors if all keys are alike.
    """
    row, column = tl.arange(0, HALF)[:, None], tl.arange(0, HALF)[None, :]
    apart = row ^ column  # its highest bit is the size of the blocks in which both differ
    one = tl.where(apart == 0, 1.0, 0.0)
    first, second = one - tl.where(apart == 1, upper, 0.0), one - tl.where(apart == 1, lower, 0.0)
    for level in tl.range(1, LEVELS, num_stages=1):
        between = (apart >> level) == 1
        first -= joined(first, tl.where(between, upper, 0.0), first, PRECISION)
        second -= joined(second, tl.where(between, lower, 0.0), second, PRECISION)
    return first, -joined(second, left, first, PRECISION), second


@triton.jit
def checkpoints_before(checkpoints, low, high, token):
    """The first of checkpoints low .. high, which are in order, that covers `token` tokens or more."""
    while low < high:
        middle = (low + high) // 2
        if tl.load(checkpoints + 2 * middle) < token:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def row_of_cell(query_start, cell, num_rows):
    """The last row whose cells start at or before this one."""
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle).to(tl.int32) // CELL + 2 * middle <= cell:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def decays(late, early):
    """exp(G_i - G_j) of tokens i and j: what is left of the change of j; 1 where j is after i"""
    return tl.exp(tl.minimum(late[:, None] - early[None, :], 0.0))


@triton.jit
def products(x, k, first, second, end, head, HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The blocks of x k^T for the halves of a chunk, float32: first with first, second with first, second with second."""
    upper, left, lower = tl.zeros([HALF, HALF], tl.float32), tl.zeros([HALF, HALF], tl.float32), tl.zeros([HALF, HALF], tl.float32)
    for block in range(0, TILE, BLOCK):
        column = block + tl.arange(0, BLOCK)
        first_keys = tl.trans(load_lines(k, first, head, column, first < end, HEADS, DIM))
        second_keys = tl.trans(load_lines(k, second, head, column, second < end, HEADS, DIM))
        upper = multiply(load_lines(x, first, head, column, first < end, HEADS, DIM), first_keys, upper)
        lines = load_lines(x, second, head, column, second < end, HEADS, DIM)
        left, lower = multiply(lines, first_keys, left), multiply(lines, second_keys, lower)
    return upper, left, lower


@triton.jit
def mix_lines(
    x, out, first, second, end, x_head, out_head, upper, left, lower,
    X_HEADS: tl.constexpr, OUT_HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiplies a triangle by the lines of the tokens of a chunk. `out` may be x: columns are read as a whole before they are written."""
    for block in range(0, TILE, BLOCK):
        column = block + tl.arange(0, BLOCK)
        lines = load_lines(x, first, x_head, column, first < end, X_HEADS, DIM)
        above, below = multiply(upper, lines), multiply(left, lines)
        below = multiply(lower, load_lines(x, second, x_head, column, second < end, X_HEADS, DIM), below)
        tl.debug_barrier()
        store_lines(out, first, out_head, column, first < end, above, OUT_HEADS, DIM)
        store_lines(out, second, out_head, column, second < end, below, OUT_HEADS, DIM)


@triton.jit
def load_halves(gates, decay, dt_bias, first, second, end, head, V_HEADS: tl.constexpr):
    """(beta, G) of the tokens of each half"""
    beta, fading = load_gates(gates, decay, dt_bias, first, head, first < end, V_HEADS)
    later_beta, later = load_gates(gates, decay, dt_bias, second, head, second < end, V_HEADS)
    return beta, tl.cumsum(fading, 0), later_beta, tl.cumsum(later, 0) + tl.sum(fading, 0)


@triton.jit
def prepare_chunk(
    q, k, v, w, scores, faded, gates, decay, dt_bias, start, end, head,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_TILE: tl.constexpr, V_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What `across` needs of the tokens of a chunk."""
    kind: tl.constexpr = v.dtype.element_ty
    column = tl.arange(0, HALF)
    first, second = start + column, start + column + HALF
    k_head, is_lower = head // (V_HEADS // K_HEADS), column[:, None] > column[None, :]
    beta, early, later_beta, late = load_halves(gates, decay, dt_bias, first, second, end, head, V_HEADS)
    tl.store(faded + first.to(tl.int64) * V_HEADS + head, early, mask=first < end)
    tl.store(faded + second.to(tl.int64) * V_HEADS + head, late, mask=second < end)
    upper, left, lower = products(q, k, first, second, end, k_head, K_HEADS, K_DIM, K_TILE, BLOCK)
    store_lines(scores, first, head, column, first < end, upper * decays(early, early), V_HEADS, CELL)
    store_lines(scores, second, head, column, second < end, left * decays(late, early), V_HEADS, CELL)
    store_lines(scores, second, head, column + HALF, second < end, lower * decays(late, late), V_HEADS, CELL)
    upper, left, lower = products(k, k, first, second, end, k_head, K_HEADS, K_DIM, K_TILE, BLOCK)
    top, side, bottom = inverse(
        tl.where(is_lower, upper * decays(early, early) * beta[:, None], 0.0),
        left * decays(late, early) * later_beta[:, None],
        tl.where(is_lower, lower * decays(late, late) * later_beta[:, None], 0.0),
        "tf32x3" if kind == tl.float32 else "tf32",  # which is more precise than what the result is rounded to
    )
    top, side, bottom = top * beta[None, :], side * beta[None, :], bottom * later_beta[None, :]
    mix_lines(
        v, v, first, second, end, head, head, top.to(kind), side.to(kind), bottom.to(kind), V_HEADS, V_HEADS, V_DIM, V_TILE, BLOCK
    )
    left_early, left_late = tl.exp(early)[None, :], tl.exp(late)[None, :]
    top, side, bottom = (top * left_early).to(kind), (side * left_early).to(kind), (bottom * left_late).to(kind)
    mix_lines(k, w, first, second, end, k_head, head, top, side, bottom, K_HEADS, V_HEADS, K_DIM, K_TILE, BLOCK)


@triton.jit(do_not_specialize=["num_rows"])
def within(
    q,
    k,
    v,
    w,
    scores,
    faded,
    gates,
    decay,
    dt_bias,
    query_start,
    starts,
    first_checkpoint,
    checkpoints,
    num_rows,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_TILE: tl.constexpr,
    V_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
):
    """The chunks of a cell: one, and one more for each checkpoint between its edges."""
    begin(PDL)
    cell, head = tl.program_id(0), tl.program_id(1)
    wait(PDL)
    row = row_of_cell(query_start, cell, num_rows)
    first, end = tl.load(query_start + row).to(tl.int32), tl.load(query_start + row + 1).to(tl.int32)
    position = tl.load(starts + row).to(tl.int32)
    edge = first - position % CELL + (cell - first // CELL - 2 * row) * CELL  # a token index; that of the first cell may be before `first`
    start, until = tl.maximum(first, edge), tl.minimum(end, edge + CELL)
    if (end - first <= MOST) | (start >= until):
        return
    low, high = tl.load(first_checkpoint + row), tl.load(first_checkpoint + row + 1)
    low = checkpoints_before(checkpoints, low, high, start + 1)
    high = checkpoints_before(checkpoints, low, high, until)
    for stop in range(low, high + 1):
        cut = tl.load(checkpoints + 2 * stop, mask=stop < high, other=until)
        prepare_chunk(
            q, k, v, w, scores, faded, gates, decay, dt_bias, start, cut, head,
            K_HEADS, V_HEADS, K_DIM, V_DIM, K_TILE, V_TILE, BLOCK,
        )  # fmt: skip
        start = cut


# -- from chunk to chunk


@triton.jit
def pass_chunk(
    state, q, k, u, w, scores, faded, out, start, end, head, column, v,
    K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
):  # fmt: skip
    """Stores the results of a chunk's tokens, and returns the state after it."""
    kind: tl.constexpr = u.dtype.element_ty
    token = start + tl.arange(0, CELL)
    inside = token < end
    k_head = head // (V_HEADS // K_HEADS)
    fading = tl.load(faded + token.to(tl.int64) * V_HEADS + head, mask=inside, other=0.0)
    known = state.to(kind)
    change = load_lines(u, token, head, v, inside, V_HEADS, V_DIM).to(tl.float32)
    change -= multiply(load_lines(w, token, head, column, inside, V_HEADS, K_DIM), known)
    result = multiply(load_lines(q, token, k_head, column, inside, K_HEADS, K_DIM), known)
    at, other = tl.arange(0, CELL)[:, None], tl.arange(0, CELL)[None, :]
    place = (token.to(tl.int64)[:, None] * V_HEADS + head) * CELL + other
    asked = tl.load(scores + place, mask=inside[:, None] & (other <= at), other=0.0)
    result = multiply(asked, change.to(kind), result * tl.exp(fading)[:, None])
    store_lines(out, token, head, v, inside, result, V_HEADS, V_DIM)
    total = tl.min(fading, 0)  # of the last token, because no decay is above 1
    change *= tl.where(inside, tl.exp(total - fading), 0.0)[:, None]
    keys = load_lines(k, token, k_head, column, inside, K_HEADS, K_DIM)
    return multiply(tl.trans(keys), change.to(kind), state * tl.exp(total))


@triton.jit
def across(
    q,
    k,
    u,
    w,
    scores,
    faded,
    qkv,
    conv,
    recurrent,
    query_start,
    reads,
    writes,
    starts,
    first_checkpoint,
    checkpoints,
    out,
    STRIDE: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    K_TILE: tl.constexpr,
    V_TILE: tl.constexpr,
    MOST: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column, v = tl.arange(0, K_TILE), tile * V_TILE + tl.arange(0, V_TILE)
    wait(PDL)
    first, end = tl.load(query_start + row).to(tl.int32), tl.load(query_start + row + 1).to(tl.int32)
    if end - first <= MOST:
        return
    slot, target = tl.load(reads + row).to(tl.int64), tl.load(writes + row)
    origin = first - tl.load(starts + row).to(tl.int32) % CELL  # an edge of a cell
    state = load_state(recurrent, slot, head, column, v, V_HEADS, K_DIM, V_DIM)
    start, last = first, tl.load(first_checkpoint + row + 1)
    for stop in range(tl.load(first_checkpoint + row), last + 1):  # each ends with a state that is kept
        until = tl.load(checkpoints + 2 * stop, mask=stop < last, other=end)
        for edge in tl.range(origin + (start - origin) // CELL * CELL, until, CELL, num_stages=STAGES):
            state = pass_chunk(
                state, q, k, u, w, scores, faded, out, tl.maximum(start, edge), tl.minimum(until, edge + CELL), head, column, v,
                K_HEADS, V_HEADS, K_DIM, V_DIM,
            )  # fmt: skip
        kept = tl.load(checkpoints + 2 * stop + 1, mask=stop < last, other=target).to(tl.int64)
        if kept > 0:
            keep(
                state, qkv, conv, recurrent, until, first, slot, kept, tile, head, column, v,
                STRIDE, K_HEADS, V_HEADS, K_DIM, V_DIM, WIDTH,
            )  # fmt: skip
        start = until
