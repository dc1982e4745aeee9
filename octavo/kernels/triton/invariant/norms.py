"""Residual add and RMS norm whose sum of squares has one order, in a kernel of its own and inside a product (`fused.py`).

A reduction adds in an order that depends on how numbers are laid out over threads. Here neighbours are added pair by pair, in a tree:
a sum of two numbers has one order, and a square and its sum are fused explicitly.
"""

import triton
import triton.language as tl
from torch import Tensor, empty_like

from octavo.kernels.triton.pdl import begin, use_pdl, wait
from octavo.kernels.triton.step.norm import weighted


@triton.jit
def sum_of_squares(wide, LEVELS: tl.constexpr):
    """Of a row of 2 ** LEVELS float32 numbers."""
    even, odd = tl.split(tl.reshape(wide, [wide.shape[0] // 2, 2]))
    total = tl.fma(even, even, odd * odd)
    for _level in tl.static_range(LEVELS - 1):
        total = tl.sum(tl.reshape(total, [total.shape[0] // 2, 2]), 1)
    return tl.sum(total, 0)  # of one number


@triton.jit
def inverse_rms(wide, eps, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    return tl.rsqrt(tl.fma(sum_of_squares(wide, LEVELS), 1.0 / SIZE, eps))


@triton.jit
def added_rows(x, residual):
    """The new stream, rounded as in the reference."""
    return (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)


@triton.jit
def add_norm_in_order(
    x, residual, weight, out, stream, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, LEVELS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    begin(PDL)
    column = tl.arange(0, PADDED)
    inside = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    scales = tl.load(weight + column, mask=inside, other=0.0)
    wait(PDL)
    sums = added_rows(tl.load(x + at, mask=inside, other=0.0), tl.load(residual + at, mask=inside, other=0.0))
    tl.store(stream + at, sums, mask=inside)
    wide = sums.to(tl.float32)
    tl.store(out + at, weighted(wide * inverse_rms(wide, eps, SIZE, LEVELS), scales, sums.dtype), mask=inside)


def invariant_add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the normed sum and the sum, each [T, size]."""
    assert x.is_contiguous() and residual.is_contiguous() and x.shape == residual.shape
    size, out, stream = x.shape[-1], empty_like(x), empty_like(x)
    if x.numel():
        padded = triton.next_power_of_2(size)
        add_norm_in_order[(x.numel() // size,)](
            x, residual, weight, out, stream, eps, SIZE=size, PADDED=padded, LEVELS=padded.bit_length() - 1, PDL=use_pdl(),
            num_warps=min(max(padded // 512, 1), 16), launch_pdl=use_pdl(),
        )  # fmt: skip
    return out, stream
