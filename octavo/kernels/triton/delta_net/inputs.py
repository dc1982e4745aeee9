"""Common parts of the kernels of Gated DeltaNet: the convolution over a row's inputs, its gates, and the inputs that a state keeps.

    inputs of a row    conv[slot that it reads]: width - 1 | qkv: its tokens of this step

A tile of channels belongs to one head of q, k or v. Nothing in a slot that a step reads is written in it.
The null slot 0, which empty rows name when steps are warmed up, is never written either.
"""

import triton
import triton.language as tl


@triton.jit
def input_at(
    qkv, conv, token, first, slot, channel, present, STRIDE: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    NEW: tl.constexpr = False,
):  # fmt: skip
    """The inputs of a token, float32; before a row's `first` token, those of the state that it reads. NEW: no token is before it"""
    if NEW:
        return tl.load(qkv + token.to(tl.int64) * STRIDE + channel, mask=present, other=0.0).to(tl.float32)
    new = token >= first
    own = tl.load(qkv + token.to(tl.int64) * STRIDE + channel, mask=present & new, other=0.0).to(tl.float32)
    line = slot * (WIDTH - 1) + token - first + (WIDTH - 1)
    return tl.where(new, own, tl.load(conv + line * CHANNELS + channel, mask=present & (token < first), other=0.0))


@triton.jit
def convolved(
    qkv, conv, weight, token, first, slot, channel, present, STRIDE: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
    NEW: tl.constexpr = False,
):  # fmt: skip
    """silu of the convolution at a token, float32; zeros where channels are not present. NEW: all its inputs are of this step"""
    total = input_at(qkv, conv, token - (WIDTH - 1), first, slot, channel, present, STRIDE, CHANNELS, WIDTH, NEW)
    total *= tl.load(weight + channel * WIDTH, mask=present, other=0.0).to(tl.float32)
    for at in tl.static_range(1, WIDTH):
        numbers = input_at(qkv, conv, token - (WIDTH - 1) + at, first, slot, channel, present, STRIDE, CHANNELS, WIDTH, NEW)
        total += numbers * tl.load(weight + channel * WIDTH + at, mask=present, other=0.0).to(tl.float32)
    return total / (1 + tl.exp(-total))


@triton.jit
def unit(x, EPS: tl.constexpr):
    """x of length 1 along its last dimension."""
    return x * tl.rsqrt(tl.sum(x * x, len(x.shape) - 1, keep_dims=True) + EPS)


@triton.jit
def keep_inputs(
    qkv, conv, end, first, slot, target, channel, present, STRIDE: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Stores the last inputs before token `end` in slot `target`."""
    for line in tl.static_range(WIDTH - 1):
        numbers = input_at(qkv, conv, end - (WIDTH - 1) + line, first, slot, channel, present, STRIDE, CHANNELS, WIDTH)
        tl.store(conv + (target * (WIDTH - 1) + line) * CHANNELS + channel, numbers, mask=present)


@triton.jit
def keep(
    state, qkv, conv, recurrent, end, first, slot, target, tile, head, k, v,
    STRIDE: tl.constexpr, K_HEADS: tl.constexpr, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Stores the state of a row before token `end` in slot `target`: columns v of a head's matrix, and the inputs of its channels.

    Of the v heads that have one k head, the first stores the inputs of q and k.
    """
    GROUP: tl.constexpr = V_HEADS // K_HEADS
    K_SIZE: tl.constexpr = K_HEADS * K_DIM
    CHANNELS: tl.constexpr = 2 * K_SIZE + V_HEADS * V_DIM
    in_k, in_v = k < K_DIM, v < V_DIM
    tl.store(recurrent + place_of_state(target, head, k, v, V_HEADS, K_DIM, V_DIM), state, mask=in_k[:, None] & in_v[None, :])
    keep_inputs(qkv, conv, end, first, slot, target, 2 * K_SIZE + head * V_DIM + v, in_v, STRIDE, CHANNELS, WIDTH)
    if (tile == 0) & (head % GROUP == 0):
        channel = head // GROUP * K_DIM + k
        keep_inputs(qkv, conv, end, first, slot, target, channel, in_k, STRIDE, CHANNELS, WIDTH)
        keep_inputs(qkv, conv, end, first, slot, target, K_SIZE + channel, in_k, STRIDE, CHANNELS, WIDTH)


@triton.jit
def place_of_state(slot, head, k, v, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr):
    """The addresses of rows k and columns v of a head's matrix. `slot`: int64"""
    return ((slot * V_HEADS + head) * K_DIM + k[:, None]) * V_DIM + v[None, :]


@triton.jit
def load_state(recurrent, slot, head, k, v, V_HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr):
    place = place_of_state(slot, head, k, v, V_HEADS, K_DIM, V_DIM)
    return tl.load(recurrent + place, mask=(k < K_DIM)[:, None] & (v < V_DIM)[None, :], other=0.0)


@triton.jit
def load_gates(gates, decay, dt_bias, token, head, inside, V_HEADS: tl.constexpr):
    """(how much of a token is written, the logarithm of what it leaves of the state): float32; 0 and 0 outside"""
    place = gates + token.to(tl.int64) * (2 * V_HEADS) + head
    b = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(place + V_HEADS, mask=inside, other=0.0).to(tl.float32) + tl.load(dt_bias + head)
    softplus = tl.maximum(a, 0.0) + tl.log(1 + tl.exp(-tl.abs(a)))
    return tl.where(inside, 1 / (1 + tl.exp(-b)), 0.0), tl.where(inside, -tl.exp(tl.load(decay + head)) * softplus, 0.0)
