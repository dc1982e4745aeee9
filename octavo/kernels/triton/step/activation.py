"""The gate of a SwiGLU MLP: silu(gate) * up, a tile of a row a program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.pdl import begin, use_pdl, wait

TILE = 1024


@triton.jit
def gated(gate, up, kind: tl.constexpr):
    """silu(gate) * up of two float32 tiles, rounded to `kind` before and after the product, as torch does."""
    return ((gate / (1 + tl.exp(-gate))).to(kind).to(tl.float32) * up).to(kind)


@triton.jit
def gate_rows(x, out, SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < SIZE
    wait(PDL)
    gate = tl.load(x + row * 2 * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * SIZE + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, gated(gate, up, x.dtype.element_ty), mask=inside)


def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2 * size], gate then up -> silu(gate) * up [T, size]."""
    assert x.is_contiguous()
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows:
        pdl = use_pdl()
        gate_rows[(rows, triton.cdiv(size, TILE))](x, out, SIZE=size, TILE=TILE, PDL=pdl, num_warps=4, launch_pdl=pdl)
    return out
