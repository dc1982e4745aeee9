"""Residual add and norms in one pass: a program holds a whole row. Rounding matches the references.

    x ---> [norm after] ---> * scale ---> + residual ---> stream ---> [norm before the next sub-layer] ---> out
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.pdl import begin, use_pdl, wait

# -- RMS norms


@triton.jit
def weighted(wide, weight, kind: tl.constexpr):
    """Float32 values times a norm's weight, as `kind`. They are rounded to the weight's dtype first."""
    return (wide.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(kind)


@triton.jit
def normed(wide, weight, eps, SIZE: tl.constexpr, kind: tl.constexpr):
    """A row [PADDED] float32, zero after SIZE, normalised and weighted, as `kind`."""
    return weighted(wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps), weight, kind)


@triton.jit
def added(x, residual, after, eps, scale, SIZE: tl.constexpr, AFTER: tl.constexpr, SCALED: tl.constexpr):
    """A row of the new residual stream, from a row of a sub-layer's output and of the stream."""
    kind = x.dtype
    if AFTER:
        x = normed(x.to(tl.float32), after, eps, SIZE, kind)
    if SCALED:
        x = (x.to(tl.float32) * scale).to(kind)
    return (x.to(tl.float32) + residual.to(tl.float32)).to(kind)


@triton.jit
def add_norm(
    x,
    residual,
    after,
    weight,
    out,
    stream,
    eps,
    scale,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ADDED: tl.constexpr,
    AFTER: tl.constexpr,
    SCALED: tl.constexpr,
    BEFORE: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    column = tl.arange(0, PADDED)
    inside = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    scales = tl.load(weight + column, mask=inside, other=0.0) if BEFORE else column
    of_after = tl.load(after + column, mask=inside, other=0.0) if AFTER else column
    wait(PDL)
    sums = tl.load(x + tl.program_id(0).to(tl.int64) * STRIDE + column, mask=inside, other=0.0)
    if ADDED:
        sums = added(sums, tl.load(residual + at, mask=inside, other=0.0), of_after, eps, scale, SIZE, AFTER, SCALED)
        tl.store(stream + at, sums, mask=inside)
    if BEFORE:
        tl.store(out + at, normed(sums.to(tl.float32), scales, eps, SIZE, sums.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x [T, size] normalised. Rows may be strided, as where others are projected beside them."""
    return _add_norm(x, None, None, weight, eps, 1.0)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Adds x, scaled, to the residual stream and normalises the sum: (normed, new residual), each [T, size]."""
    return _add_norm(x, residual, None, weight, eps, scale)


def norm_add(x: Tensor, residual: Tensor, after: Tensor, eps: float, scale: float = 1.0) -> Tensor:
    """The new residual stream: x is normed, scaled and added."""
    return _add_norm(x, residual, after, None, eps, scale)[1]


def norm_add_norm(
    x: Tensor, residual: Tensor, after: Tensor, weight: Tensor, eps: float, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(the normed sum for the next sub-layer, the new residual); `after` norms x before it is added."""
    return _add_norm(x, residual, after, weight, eps, scale)


def _add_norm(
    x: Tensor, residual: Tensor | None, after: Tensor | None, weight: Tensor | None, eps: float, scale: float
) -> tuple[Tensor, Tensor]:
    if residual is None:
        assert x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1)
    else:
        assert x.is_contiguous() and residual.is_contiguous() and x.shape == residual.shape
    size, stream = x.shape[-1], x if residual is None else torch.empty_like(x)
    out = stream if weight is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        padded = triton.next_power_of_2(size)
        add_norm[(x.numel() // size,)](
            x, x if residual is None else residual, x if after is None else after, x if weight is None else weight, out, stream,
            eps, scale, STRIDE=size if x.is_contiguous() else x.stride(0), SIZE=size, PADDED=padded, ADDED=residual is not None,
            AFTER=after is not None, SCALED=scale != 1.0, BEFORE=weight is not None, PDL=use_pdl(),
            num_warps=min(max(padded // 512, 1), 16), launch_pdl=use_pdl(),
        )  # fmt: skip
    return out, stream


# -- layer norms, which are rounded once


@triton.jit
def add_and_centre(
    x,
    residual,
    weight,
    bias,
    out,
    stream,
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ADDED: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    column = tl.arange(0, PADDED)
    inside = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    scales = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    row = tl.load(x + at, mask=inside, other=0.0)
    if ADDED:
        row = (row.to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(row.dtype)
        tl.store(stream + at, row, mask=inside)
    wide = row.to(tl.float32)
    centred = tl.where(inside, wide - tl.sum(wide, 0) / SIZE, 0.0)
    result = centred * tl.rsqrt(tl.sum(centred * centred, 0) / SIZE + eps) * scales
    if BIASED:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(row.dtype), mask=inside)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Returns x [T, size], centred and normalised."""
    return _add_and_centre(x, None, weight, bias, eps)[0]


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Adds x to the residual stream, centres and normalises the sum: (normed, new residual), each [T, size]."""
    return _add_and_centre(x, residual, weight, bias, eps)


def _add_and_centre(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    assert x.is_contiguous() and (residual is None or (residual.is_contiguous() and x.shape == residual.shape))
    size, out = x.shape[-1], torch.empty_like(x)
    stream = x if residual is None else torch.empty_like(x)
    if x.numel():
        padded = triton.next_power_of_2(size)
        add_and_centre[(x.numel() // size,)](
            x, residual, weight, bias, out, stream, eps, SIZE=size, PADDED=padded, ADDED=residual is not None, BIASED=bias is not None,
            PDL=use_pdl(), num_warps=min(max(padded // 512, 1), 16), launch_pdl=use_pdl(),
        )  # fmt: skip
    return out, stream


# -- the norm of each v head of recurrent layers, times silu of a gate: a program has some heads of a token

GATED_TILE = 1024  # numbers of a program, if a head has fewer


@triton.jit
def norm_and_gate(
    x,
    gate,
    weight,
    out,
    eps,
    GATE_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE)[:, None], tl.arange(0, DIM_TILE)[None, :]
    inside = (head < HEADS) & (dim < DIM)
    scale = tl.load(weight + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    wait(PDL)
    numbers = tl.load(x + (token * HEADS + head) * DIM + dim, mask=inside, other=0.0)
    z = tl.load(gate + token * GATE_STRIDE + head * DIM + dim, mask=inside, other=0.0).to(tl.float32)
    normed = numbers * tl.rsqrt(tl.sum(numbers * numbers, 1, keep_dims=True) / DIM + eps)
    result = normed * scale * (z / (1 + tl.exp(-z)))
    tl.store(out + (token * HEADS + head) * DIM + dim, result.to(out.dtype.element_ty), mask=inside)


def gated_norm(
    x: Tensor,  # [T, v_heads, v_dim] float32
    gate: Tensor,  # the same shape in the dtype of the run; tokens may be strided, as z is beside q, k and v
    weight: Tensor,  # [v_dim]
    eps: float,
) -> Tensor:
    """Returns rms_norm(x) * weight * silu(gate), over the last dimension, in the dtype of gate."""
    tokens, heads, dim = x.shape
    assert x.is_contiguous() and gate.shape == x.shape and gate.stride()[1:] == (dim, 1)
    out = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    dim_tile = triton.next_power_of_2(dim)
    heads_tile = min(max(GATED_TILE // dim_tile, 1), triton.next_power_of_2(heads))
    if tokens:
        norm_and_gate[(tokens, triton.cdiv(heads, heads_tile))](
            x, gate, weight, out, eps, GATE_STRIDE=gate.stride(0), HEADS=heads, DIM=dim, HEADS_TILE=heads_tile, DIM_TILE=dim_tile,
            PDL=use_pdl(), num_warps=4, launch_pdl=use_pdl(),
        )  # fmt: skip
    return out
