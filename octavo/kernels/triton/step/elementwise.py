"""Functions of single numbers, one tile per program: the activation of an MLP, a weighted sum, and the scale and cap of logits.

The activations: silu(gate) * up, gelu(gate) * up, the clamped gate of gpt-oss, or gelu(up) without a gate.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gates import ALPHA, CLAMP, GATES, Gate
from octavo.kernels.triton.attention.common import capped
from octavo.kernels.triton.pdl import begin, use_pdl, wait

TILE, LOGITS_TILE = 1024, 2048
PER_WARP = 256  # numbers of a row
SWIGLU, GEGLU, CLAMPED = (tl.constexpr(GATES.index(gate)) for gate in ("swiglu", "geglu", "clamped"))
LIMIT, SLOPE = tl.constexpr(CLAMP), tl.constexpr(ALPHA)
TWICE_ROOT = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)

# -- activations


@triton.jit
def tanh_gelu(x):
    """x * (1 + tanh(z)) / 2, which is x * sigmoid(2 z)."""
    return x / (1 + tl.exp(-TWICE_ROOT * (x + 0.044715 * x * x * x)))


@triton.jit
def gated(gate, up, kind: tl.constexpr, GATE: tl.constexpr):
    """Gates two float32 tiles, rounded to `kind` before and after the product, as torch does; the clamped gate only after it."""
    if GATE == CLAMPED:
        low = tl.minimum(gate, LIMIT)
        result = (tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1) * (low / (1 + tl.exp(-SLOPE * low)))
    elif GATE == GEGLU:
        result = tanh_gelu(gate).to(kind).to(tl.float32) * up
    else:
        tl.static_assert(GATE == SWIGLU)
        result = (gate / (1 + tl.exp(-gate))).to(kind).to(tl.float32) * up
    return result.to(kind)


@triton.jit
def gate_rows(x, out, SIZE: tl.constexpr, TILE: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < SIZE
    wait(PDL)
    gate = tl.load(x + row * 2 * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * SIZE + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, gated(gate, up, x.dtype.element_ty, GATE), mask=inside)


@triton.jit
def gelu_rows(x, out, SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < SIZE
    wait(PDL)
    numbers = tl.load(x + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, tanh_gelu(numbers).to(x.dtype.element_ty), mask=inside)


def gelu(x: Tensor) -> Tensor:
    """x [T, size] -> gelu(x), with the tanh approximation."""
    assert x.is_contiguous()
    rows, size = x.shape
    out = torch.empty_like(x)
    if rows:
        pdl = use_pdl()
        gelu_rows[(rows, triton.cdiv(size, TILE))](x, out, SIZE=size, TILE=TILE, PDL=pdl, num_warps=4, launch_pdl=pdl)
    return out


def gate_and_mul(x: Tensor, gate: Gate) -> Tensor:
    """x [T, 2 * size], gate then up -> [T, size]."""
    assert x.is_contiguous()
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows:
        pdl = use_pdl()
        gate_rows[(rows, triton.cdiv(size, TILE))](
            x, out, SIZE=size, TILE=TILE, GATE=GATES.index(gate), PDL=pdl, num_warps=4, launch_pdl=pdl
        )
    return out


def gelu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2 * size], gate then up -> gelu(gate) * up [T, size], with the tanh approximation of GELU."""
    return gate_and_mul(x, "geglu")


def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2 * size], gate then up -> silu(gate) * up [T, size]."""
    return gate_and_mul(x, "swiglu")


# -- the sum of what chosen experts and a shared one return


@triton.jit
def add_row(out, shared, x, weight, result, SIZE: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside = column < SIZE
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    at = row * SIZE + column
    logit = tl.sum(tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale, 0)
    added = tl.load(shared + at, mask=inside, other=0.0).to(tl.float32) / (1 + tl.exp(-logit))
    total = tl.load(out + at, mask=inside, other=0.0).to(tl.float32) + added
    tl.store(result + at, total.to(result.dtype.element_ty), mask=inside)


def add_weighted(out: Tensor, shared: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """out + sigmoid(x w) * shared, rounded once. x: [T, hidden]; weight: [1, hidden]"""
    assert all(one.is_contiguous() and one.shape == out.shape for one in (out, shared, x)) and weight.shape == (1, out.shape[1])
    result = torch.empty_like(out)
    rows, size = out.shape
    if rows:
        pdl, padded = use_pdl(), int(triton.next_power_of_2(size))
        add_row[(rows,)](
            out, shared, x, weight, result, SIZE=size, PADDED=padded, PDL=pdl, num_warps=min(max(padded // PER_WARP, 1), 16), launch_pdl=pdl
        )
    return result


# -- logits


@triton.jit(do_not_specialize=["count"])
def scale_tile(logits, scale, cap, count, CAPPED: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    wait(PDL)
    wide = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
    result = capped(wide, scale, cap, CAPPED) if CAPPED else wide * scale
    tl.store(logits + at, result.to(logits.dtype.element_ty), mask=inside)


def scale_logits(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    """Scales logits in place, and then caps them: cap * tanh(logits / cap)."""
    assert logits.is_contiguous()
    if logits.numel():
        scale_tile[(triton.cdiv(logits.numel(), LOGITS_TILE),)](
            logits, scale, cap or 0.0, logits.numel(), CAPPED=cap is not None, TILE=LOGITS_TILE, PDL=use_pdl(), num_warps=4,
            launch_pdl=use_pdl(),
        )  # fmt: skip
    return logits
