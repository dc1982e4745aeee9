"""Gated DeltaNet token by token: rows of few tokens, and with `deterministic` all rows.

A program has some columns of one head's matrix in registers, and all of its rows: it computes their part of the results alone. It
reads them once and writes them once, and computes the convolution of its own channels and of the head's q and k beside that. With the
state S that is read, both products with it are independent of each other:

    change = beta * (v - decay * S^T k)      result = decay * S^T q + (k q) change      S = decay * S + k change^T
"""

import triton
import triton.language as tl

from octavo.kernels.triton.delta_net.inputs import convolved, keep, load_gates, load_state, unit
from octavo.kernels.triton.pdl import begin, wait


@triton.jit
def advance(
    state, qkv, gates, conv_weight, decay, dt_bias, conv, token, first, slot, head, k, v,
    STRIDE: tl.constexpr, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    EPS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """(the state after a token, its result)"""
    K_SIZE: tl.constexpr = K_HEADS * K_DIM
    CHANNELS: tl.constexpr = 2 * K_SIZE + V_HEADS * V_DIM
    in_k, in_v = k < K_DIM, v < V_DIM
    channel = head // (V_HEADS // K_HEADS) * K_DIM + k
    query = convolved(qkv, conv, conv_weight, token, first, slot, channel, in_k, STRIDE, CHANNELS, WIDTH)
    key = convolved(qkv, conv, conv_weight, token, first, slot, K_SIZE + channel, in_k, STRIDE, CHANNELS, WIDTH)
    value = convolved(qkv, conv, conv_weight, token, first, slot, 2 * K_SIZE + head * V_DIM + v, in_v, STRIDE, CHANNELS, WIDTH)
    query, key = unit(query, EPS) * SCALE, unit(key, EPS)
    beta, fading = load_gates(gates, decay, dt_bias, token, head, token >= first, V_HEADS)
    left = tl.exp(fading)
    known, read = tl.sum(state * key[:, None], 0), tl.sum(state * query[:, None], 0)
    change = beta * (value - left * known)
    return left * state + key[:, None] * change[None, :], left * read + tl.sum(key * query, 0) * change


@triton.jit
def recur(
    qkv,
    gates,
    conv_weight,
    decay,
    dt_bias,
    conv,
    recurrent,
    query_start,
    reads,
    writes,
    first_checkpoint,
    checkpoints,
    out,
    STRIDE: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    K_TILE: tl.constexpr,
    V_TILE: tl.constexpr,
    SINGLE: tl.constexpr,
    MOST: tl.constexpr,
    PDL: tl.constexpr,
):
    """SINGLE: every row has one token, and there are no checkpoints. MOST: rows with more tokens are left out, if it is not 0."""
    begin(PDL)
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    k, v = tl.arange(0, K_TILE), tile * V_TILE + tl.arange(0, V_TILE)
    in_v = v < V_DIM
    wait(PDL)
    first = tl.load(query_start + row).to(tl.int32)
    slot, target = tl.load(reads + row).to(tl.int64), tl.load(writes + row).to(tl.int64)
    if SINGLE:
        state = load_state(recurrent, slot, head, k, v, V_HEADS, K_DIM, V_DIM)
        state, result = advance(
            state, qkv, gates, conv_weight, decay, dt_bias, conv, first, first, slot, head, k, v,
            STRIDE, K_HEADS, V_HEADS, K_DIM, V_DIM, WIDTH, EPS, SCALE,
        )  # fmt: skip
        tl.store(out + (first.to(tl.int64) * V_HEADS + head) * V_DIM + v, result, mask=in_v)
        if target > 0:
            keep(
                state, qkv, conv, recurrent, first + 1, first, slot, target, tile, head, k, v,
                STRIDE, K_HEADS, V_HEADS, K_DIM, V_DIM, WIDTH,
            )  # fmt: skip
    else:
        end = tl.load(query_start + row + 1).to(tl.int32)
        if (first == end) | ((MOST > 0) & (end - first > MOST)):
            return
        state = load_state(recurrent, slot, head, k, v, V_HEADS, K_DIM, V_DIM)
        start, last = first, tl.load(first_checkpoint + row + 1)
        for stop in range(tl.load(first_checkpoint + row), last + 1):  # each ends with a state that is kept
            until = tl.load(checkpoints + 2 * stop, mask=stop < last, other=end)
            for ahead in range(until - start):
                token = start + ahead
                state, result = advance(
                    state, qkv, gates, conv_weight, decay, dt_bias, conv, token, first, slot, head, k, v,
                    STRIDE, K_HEADS, V_HEADS, K_DIM, V_DIM, WIDTH, EPS, SCALE,
                )  # fmt: skip
                tl.store(out + (token.to(tl.int64) * V_HEADS + head) * V_DIM + v, result, mask=in_v)
            kept = tl.load(checkpoints + 2 * stop + 1, mask=stop < last, other=target.to(tl.int32)).to(tl.int64)
            if kept > 0:
                keep(
                    state, qkv, conv, recurrent, until, first, slot, kept, tile, head, k, v,
                    STRIDE, K_HEADS, V_HEADS, K_DIM, V_DIM, WIDTH,
                )  # fmt: skip
            start = until
