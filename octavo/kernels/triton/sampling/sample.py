"""Samples one id per row: argmax of logits, or of logits / temperature plus Gumbel noise, in two passes over [S, V].

    blocks   (row, TILE tokens) -> the block's largest logit, its best score relative to that, and its id
    rows     the blocks of a row, each lowered by the distance of its largest logit from the row's

Scores are relative to the largest logit, so that no temperature can overflow the best one. Noise comes from the counters of
`kernels/reference/philox.py`, bit for bit: one counter serves four neighbouring tokens. Equal scores go to the lower id; a row
that is not finite still yields a valid one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
LANES = 4
MULTIPLIER_0, MULTIPLIER_1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
KEY_STEP_0, KEY_STEP_1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
ROUNDS = tl.constexpr(10)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """The four words of each counter; all are uint32."""
    for _ in tl.static_range(ROUNDS):
        left, right = c0.to(tl.uint64) * MULTIPLIER_0, c2.to(tl.uint64) * MULTIPLIER_1  # one instruction for both halves
        c0, c1 = (right >> 32).to(tl.uint32) ^ c1 ^ k0, right.to(tl.uint32)
        c2, c3 = (left >> 32).to(tl.uint32) ^ c3 ^ k1, left.to(tl.uint32)
        k0, k1 = k0 + KEY_STEP_0, k1 + KEY_STEP_1
    return c0, c1, c2, c3


@triton.jit
def noise_words(noise, position, quad):
    """The four words of each quad's counter. noise: key, key, stream, high; position: uint32; quad: uint32"""
    key_0, key_1 = tl.load(noise).to(tl.uint32), tl.load(noise + 1).to(tl.uint32)
    zero = quad * 0  # gives the other counter words the shape of the first
    stream, high = tl.load(noise + 2).to(tl.uint32) + zero, tl.load(noise + 3).to(tl.uint32) + zero
    return philox4x32(quad, position + zero, stream, high, key_0, key_1)


@triton.jit
def open_unit(words):
    return ((words >> 9).to(tl.float32) + 0.5) * (1.0 / (1 << 23))


@triton.jit
def tile_words(noise, position, tile, TILE: tl.constexpr):
    """The words of all tokens of a tile, in order: [TILE / 4, 4] uint32"""
    quad = (tile * (TILE // 4) + tl.arange(0, TILE // 4)).to(tl.uint32)
    w0, w1, w2, w3 = noise_words(noise, position, quad)
    return tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(TILE // 4, 4)  # lane = 2 * middle + last


@triton.jit
def uniform(noise, position, tile, TILE: tl.constexpr):
    """Numbers strictly inside (0, 1) for the tokens of a tile: [TILE] float32"""
    return open_unit(tile_words(noise, position, tile, TILE).reshape(TILE))


@triton.jit
def uniform_at(noise, position, token):
    """The same numbers for any tokens."""
    w0, w1, w2, w3 = noise_words(noise, position, (token // 4).to(tl.uint32))
    lane = token % 4
    return open_unit(tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3)))


@triton.jit
def gumbel(unit):
    return -tl.log(-tl.log(unit))


@triton.jit
def best_of_blocks(logits, temperature, noise, positions, tops, scores, ids, VOCAB: tl.constexpr, STRIDE: tl.constexpr, TILE: tl.constexpr):
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = block * TILE + tl.arange(0, TILE)
    logit = tl.load(logits + row * STRIDE + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    top = tl.max(logit, 0)
    warmth = tl.load(temperature + row)
    score = logit - top
    if warmth > 0:
        position = tl.load(positions + row).to(tl.uint32)
        score = gumbel(uniform(noise + row * 4, position, block, TILE)) + score / tl.maximum(warmth, 1.1754943508222875e-38)
    score = tl.where(token < VOCAB, score, float("-inf"))
    best, index = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(tops + row * blocks + block, top)
    tl.store(scores + row * blocks + block, best)
    tl.store(ids + row * blocks + block, tl.minimum(block * TILE + index, VOCAB - 1))


@triton.jit
def best_of_rows(tops, scores, ids, temperature, out, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    inside = block < BLOCKS
    top = tl.load(tops + row * BLOCKS + block, mask=inside, other=float("-inf"))
    best = tl.load(scores + row * BLOCKS + block, mask=inside, other=float("-inf"))
    warmth = tl.load(temperature + row)
    score = best + (top - tl.max(top, 0)) / tl.where(warmth > 0, tl.maximum(warmth, 1.1754943508222875e-38), 1.0)
    score = tl.where(inside, score, float("-inf"))
    winner = tl.minimum(tl.argmax(score, 0, tie_break_left=True), BLOCKS - 1)
    tl.store(out + row, tl.load(ids + row * BLOCKS + winner).to(tl.int64))


def sample(logits: Tensor, temperature: Tensor, noise: Tensor, positions: Tensor) -> Tensor:
    """Returns one id per row, [S] int64. logits: [S, V]; temperature: [S] float32, 0 is argmax; noise: [S, 4]; positions: [S]"""
    assert logits.stride(1) == 1 and noise.is_contiguous()
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, TILE)
    tops, scores = (torch.empty(rows, blocks, device=logits.device) for _ in range(2))  # separate tensors, so that each is aligned
    ids = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        best_of_blocks[(rows, blocks)](
            logits, temperature, noise, positions, tops, scores, ids, VOCAB=vocab, STRIDE=logits.stride(0), TILE=TILE, num_warps=4
        )
        padded = triton.next_power_of_2(blocks)
        best_of_rows[(rows,)](tops, scores, ids, temperature, out, BLOCKS=blocks, PADDED=padded, num_warps=4)
    return out
