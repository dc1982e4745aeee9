"""The norm of each v head of the results, times silu of a gate, in one pass: a program has some heads of a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.pdl import begin, use_pdl, wait

TILE = 1024  # numbers of a program, if a head has fewer


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
    heads_tile = min(max(TILE // dim_tile, 1), triton.next_power_of_2(heads))
    if tokens:
        norm_and_gate[(tokens, triton.cdiv(heads, heads_tile))](
            x, gate, weight, out, eps, GATE_STRIDE=gate.stride(0), HEADS=heads, DIM=dim, HEADS_TILE=heads_tile, DIM_TILE=dim_tile,
            PDL=use_pdl(), num_warps=4, launch_pdl=use_pdl(),
        )  # fmt: skip
    return out
