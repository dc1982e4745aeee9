"""Products of torch, also of bfloat16 on a CPU that cannot multiply it.

There torch multiplies bfloat16 one number at a time: 64 rows by a matrix of 1,024 x 1,024 take a second of a Neoverse-N1. In float32
they take 5 ms. Both ways round a sum to bfloat16 once, so they differ by the order of the sum alone.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 1 << 20  # weights converted at a time: a copy of a whole matrix would be memory that no plan knows of


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Returns x W^T [rows, out features], in `out` if that is given. x: [rows, in features]; weight: [out features, in features]"""
    if slow_here(weight):
        return _multiply_in_float32(x, weight, bias, torch.empty(len(x), len(weight), dtype=x.dtype) if out is None else out)
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def slow_here(numbers: Tensor) -> bool:
    """Says whether torch multiplies numbers of this dtype one by one on the device where they are."""
    return numbers.dtype == torch.bfloat16 and numbers.is_cpu and not _cpu_multiplies_bfloat16()


@cache
def _cpu_multiplies_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _multiply_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    wide, at_once = x.float(), max(CHUNK // x.shape[1], 1)
    for first in range(0, len(weight), at_once):
        some = slice(first, first + at_once)
        out[:, some] = F.linear(wide, weight[some].float(), None if bias is None else bias[some].float())
    return out
