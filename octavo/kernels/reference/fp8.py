"""Products with 8-bit float weights in plain torch: the references of the GPU kernels."""

import torch
from torch import Tensor

from octavo.kernels.fp8_matrix import FP8_LARGEST, Fp8Matrix, rounds_x
from octavo.kernels.kernel_shapes import FP8_BLOCK


def fp8_linear(x: Tensor, weight: Fp8Matrix, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Returns x W^T [rows, out], in `out` if given. x: [rows, in]; if it has many rows, they are rounded to 8 bits."""
    wide = _rounded(x, weight.span) if rounds_x(len(x), x.dtype) else x.float()
    product = wide @ widen(weight).T
    product = (product if bias is None else product + bias.float()).to(x.dtype)
    return product if out is None else out.copy_(product)


def widen(weight: Fp8Matrix, rows: Tensor | None = None) -> Tensor:
    """Returns all rows, or those of an index [count], in float32."""
    values = weight.values if rows is None else weight.values.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
    if not weight.blocks:
        return values.float() * (weight.scale if rows is None else weight.scale[rows])[:, None]
    index = torch.arange(len(weight), device=values.device) if rows is None else rows
    return values.float() * weight.scale[index // FP8_BLOCK].repeat_interleave(FP8_BLOCK, dim=1)


def round_rows(x: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """Returns 8-bit floats [rows, in], and their scales [rows, in / span] float32. If all numbers are zero the scale is one."""
    wide = x.float().unflatten(1, (-1, span))
    largest = wide.abs().amax(-1, keepdim=True)
    most = torch.full_like(largest, FP8_LARGEST)  # a tensor: for a number, torch multiplies by its inverse, which rounds twice
    largest = torch.where(largest > 0, largest, most)
    values = (wide * (most / largest)).clamp(-FP8_LARGEST, FP8_LARGEST).flatten(1).to(torch.float8_e4m3fn)
    return values, (largest / most).squeeze(-1)


def _rounded(x: Tensor, span: int) -> Tensor:
    values, scale = round_rows(x, span)
    return values.float() * scale.repeat_interleave(span, dim=1)
