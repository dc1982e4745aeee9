"""Products with packed codes behind a residual add and RMS norm, which one kernel does with q, k and v of one row."""

import torch
from torch import Tensor

from octavo.kernels.device_codes import DeviceCodes
from octavo.kernels.triton.norm import add_rms_norm
from octavo.kernels.triton.packed import alone, packed_gate_up, packed_linear
from octavo.kernels.triton.packed_rules import HELD_ROWS, Held, One, rule


def norm_packed_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: DeviceCodes, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual) W^T, the new residual)"""
    how = rule(len(x), weight) if len(x) <= HELD_ROWS else None
    if isinstance(how, (One, Held)) and how.norm:
        out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
        return alone(x, (residual, norm_weight, eps), weight, bias, out, how)
    normed, stream = add_rms_norm(x, residual, norm_weight, eps)
    return packed_linear(normed, weight, bias), stream


def norm_packed_gate_up(x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: DeviceCodes) -> tuple[Tensor, Tensor]:
    """(silu(gate) * up of rms_norm(x + residual), the new residual); weight has rows of gate over rows of up"""
    normed, stream = add_rms_norm(x, residual, norm_weight, eps)  # apart: a wide product waits less for it
    return packed_gate_up(normed, weight), stream
