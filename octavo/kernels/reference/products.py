"""Matrix products in torch, also of bfloat16 on a CPU that does not support it.

On such a CPU torch multiplies bfloat16 one number at a time: 64 rows by a 1,024 x 1,024 matrix take a second on a Neoverse-N1, but
5 ms in float32. Both round each sum to bfloat16 once, so they differ only by the order of summation.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 1 << 20  # weights converted at a time: a copy of a whole matrix would be memory outside the plan


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Returns x W^T [rows, out features], in `out` if given. x: [rows, in features]; weight: [out features, in features]"""
    if slow_here(weight):
        return _multiply_in_float32(x, weight, bias, torch.empty(len(x), len(weight), dtype=x.dtype) if out is None else out)
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def slow_here(numbers: Tensor) -> bool:
    """Returns whether torch multiplies numbers of this dtype one by one on their device."""
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
