"""Residual add and RMS norm in one pass: a program holds a whole row. Roundings are those of the twin."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.pdl import begin, use_pdl, wait


@triton.jit
def normed(wide, weight, eps, SIZE: tl.constexpr, kind: tl.constexpr):
    """A row [PADDED] float32, zero past SIZE, normalised and weighted, as `kind`."""
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    return ((wide * scale).to(kind).to(tl.float32) * weight.to(tl.float32)).to(kind)


@triton.jit
def add_norm(x, residual, weight, out, stream, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    column = tl.arange(0, PADDED)
    inside = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    kind = x.dtype.element_ty
    scales = tl.load(weight + column, mask=inside, other=0.0)
    wait(PDL)
    added = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    rounded = added.to(kind)
    tl.store(stream + at, rounded, mask=inside)
    tl.store(out + at, normed(rounded.to(tl.float32), scales, eps, SIZE, kind), mask=inside)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds x to the residual stream and normalises the sum: (normed, new residual), each [T, size]."""
    assert x.is_contiguous() and residual.is_contiguous() and x.shape == residual.shape
    size = x.shape[-1]
    out, stream = torch.empty_like(x), torch.empty_like(x)
    if x.numel():
        padded = triton.next_power_of_2(size)
        add_norm[(x.numel() // size,)](
            x, residual, weight, out, stream, eps, SIZE=size, PADDED=padded, PDL=use_pdl(),
            num_warps=min(max(padded // 512, 1), 16), launch_pdl=use_pdl(),
        )  # fmt: skip
    return out, stream
