"""Products with weights of 8-bit floats, in plain torch: the twin of the kernels of a GPU."""

import torch
from torch import Tensor

from octavo.kernels.fp8_matrix import FP8_FEW_ROWS, FP8_LARGEST, Fp8Matrix


def fp8_linear(x: Tensor, weight: Fp8Matrix, bias: Tensor | None = None) -> Tensor:
    """Returns x W^T [rows, out]. x: [rows, in]. Of more than a few rows x is rounded to 8 bits first, each row with a scale."""
    wide = x.float()
    if len(x) > FP8_FEW_ROWS:
        values, scale = quantize_rows(x)
        wide = values.float() * scale[:, None]
    product = wide @ dequantize(weight).T
    return (product if bias is None else product + bias.float()).to(x.dtype)


def dequantize(weight: Fp8Matrix) -> Tensor:
    """Returns the weights in float32."""
    (n, k), (rows, columns) = weight.values.shape, weight.block
    scale = weight.scale.repeat_interleave(rows, dim=0)[:n].repeat_interleave(columns, dim=1)[:, :k]
    return weight.values.float() * scale


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns rows as 8-bit floats [rows, in], and their scales [rows] float32. A row of zeros has a scale of one."""
    largest = x.float().abs().amax(-1)
    scale = torch.where(largest > 0, largest / FP8_LARGEST, 1.0)
    return (x.float() / scale[:, None]).to(torch.float8_e4m3fn), scale
