"""The twins of the products of a few rows: what stands in front and the gate behind as steps of their own."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.reference.activation import silu_and_mul
from octavo.kernels.reference.norm import add_rms_norm


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in], weight [out, in] -> [rows, out]"""
    return F.linear(x, weight, bias)


def norm_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual) W^T, the new residual)"""
    normed, stream = add_rms_norm(x, residual, norm_weight, eps)
    return F.linear(normed, weight, bias), stream


def head(x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(logits, the normed rows they were made of)"""
    hidden, _ = add_rms_norm(x, residual, norm_weight, eps)
    return F.linear(hidden, weight), hidden


def gate_up(x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(silu(gate) * up of rms_norm(x + residual), the new residual); weight [2 * size, in], gate over up"""
    product, stream = norm_linear(x, residual, norm_weight, eps, weight)
    return silu_and_mul(product), stream


def merge_linear(
    parts: Tensor,  # [rows, splits, heads, head_dim] float32
    parts_lse: Tensor,  # [rows, splits, heads], in units of log2; -inf: nothing, and the part is not read
    weight: Tensor,  # [out, heads * head_dim]
    bias: Tensor | None = None,
) -> Tensor:
    """The merged parts times W^T, [rows, out]"""
    return F.linear(merge_parts(parts, parts_lse, weight.dtype), weight, bias)


def merge_parts(parts: Tensor, parts_lse: Tensor, dtype: torch.dtype) -> Tensor:
    """The merged parts [rows, splits, heads, head_dim] as [rows, heads * head_dim]"""
    seen = (parts_lse > -torch.inf).unsqueeze(-1)
    weights = torch.softmax(parts_lse.nan_to_num(neginf=-1e30) * math.log(2), 1).unsqueeze(-1)
    mixed = torch.where(seen, parts * weights, 0).sum(1)  # [rows, heads, head_dim]
    return mixed.flatten(1).to(dtype)
