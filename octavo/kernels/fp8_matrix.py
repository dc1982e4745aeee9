"""A matrix of 8-bit floats (e4m3) with scales, in the form that kernels of a GPU read:

    w[row, column] = values[row, column] * scale[row // block[0], column // block[1]]

    one scale       block [n, k]          of each row     block [1, k]          of blocks    block [128, 128]
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_FEW_ROWS = 4  # up to which x is multiplied as it is; more rows are rounded to 8 bits, too, each with a scale of its own
FP8_LARGEST = 448.0  # of e4m3


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Matrix:
    values: Tensor  # [n, k] float8_e4m3fn
    scale: Tensor  # [n / block[0], k / block[1]] float32, rounded up
    block: tuple[int, int]

    def __post_init__(self) -> None:
        (n, k), (rows, columns) = self.values.shape, self.block
        assert self.values.dtype == torch.float8_e4m3fn and self.values.is_contiguous() and self.scale.is_contiguous()
        assert self.scale.shape == (-(-n // rows), -(-k // columns)) and self.scale.dtype == torch.float32

    def __len__(self) -> int:
        """Returns the number of rows, which is the width of a product."""
        return len(self.values)
