"""A matrix of 8-bit floats (e4m3) with scales, in the format of the GPU kernels.

    one scale per row    span = columns    scale [n]                         w[row, column] = values[row, column] * scale[row]
    blocks of 128 x 128  span = 128        scale [n / 128, columns / 128]    ... * scale[row // 128, column // 128]

A matrix with blocks consists of whole blocks in both dimensions. A matrix with a single scale has that scale in every row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.kernel_shapes import FP8_BLOCK

FP8_LARGEST = 448.0  # of e4m3
FP8_EXACT_ROWS = 8  # maximum number of rows of an x that is multiplied as it is; a larger x is rounded to 8 bits, too


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Matrix:
    values: Tensor  # [n, columns] float8_e4m3fn
    scale: Tensor  # float32
    span: int  # columns that share a scale

    def __post_init__(self) -> None:
        n, columns = self.values.shape
        shape = (n // FP8_BLOCK, columns // FP8_BLOCK) if self.blocks else (n,)
        assert self.values.dtype == torch.float8_e4m3fn and self.values.is_contiguous()
        assert self.scale.dtype == torch.float32 and self.scale.shape == shape and self.scale.is_contiguous()
        assert self.span == columns or (self.span == FP8_BLOCK and n % FP8_BLOCK == 0 and columns % FP8_BLOCK == 0)

    def __len__(self) -> int:
        """Returns the number of rows, which is the width of a product."""
        return len(self.values)

    @property
    def shape(self) -> tuple[int, int]:
        n, columns = self.values.shape
        return n, columns

    @property
    def blocks(self) -> bool:
        return self.span < self.values.shape[1]


def zero_fp8(n: int, columns: int, span: int, device: torch.device | str) -> Fp8Matrix:
    """Returns a matrix of zeros, to test a kernel on."""
    values = torch.zeros(n, columns, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    shape = (n,) if span == columns else (n // FP8_BLOCK, columns // FP8_BLOCK)
    return Fp8Matrix(values, torch.zeros(shape, device=device), span)


def rounds_x(rows: int, dtype: torch.dtype) -> bool:
    """Whether a product rounds x to 8 bits. Small batches are limited by reading the weights, and float32 is used for accuracy."""
    return rows > FP8_EXACT_ROWS and dtype != torch.float32
