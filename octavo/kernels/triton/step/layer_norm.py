"""Layer norms with the residual add before them, in one pass: a program holds a whole row. They are rounded once, as in the reference."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.pdl import begin, use_pdl, wait


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
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / SIZE + eps) * scales
    if BIASED:
        normed += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, normed.to(row.dtype), mask=inside)


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
