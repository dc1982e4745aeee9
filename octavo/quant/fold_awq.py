"""AWQ checkpoints (version GEMM, 4 bits) in the packed form.

    qweight   int32 [k, n / 8]          a word: 8 output rows of one input column, in the order 0 2 4 6 1 3 5 7
    qzeros    int32 [k / group, n / 8]  the same
    scales    float16 [k / group, n]

Scales and codes stay as they are. The offset is -scale * zero, which float16 holds exactly where the zero is a power of two
(or nought); elsewhere it is off by at most 2^-11 of itself.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.quant.groups import whole_group
from octavo.quant.quant_config import QuantConfig
from octavo.quant.words import SCALE_DTYPES, Described, Layout, ZeroPointWeight, codes_of, take


def check_awq(tensors: Mapping[str, Described], name: str, config: QuantConfig) -> Layout:
    """Sizes of the module `name`, from its tensors or their headers."""
    words = take(tensors, f"{name}.qweight", (torch.int32,), (None, None), "input columns, output rows / 8")
    k, n = words.shape[0], words.shape[1] * 8
    group_size = k if config.group_size == -1 else config.group_size
    group = whole_group(f"{name}.qweight", group_size, k)
    if k % group_size:
        raise LoadError(f"{name}.qweight has {k} input columns, not a multiple of group_size {group_size}")
    why = f"{k} input columns, {n} output rows, group_size {group_size}"
    take(tensors, f"{name}.qzeros", (torch.int32,), (k // group_size, n // 8), why)
    take(tensors, f"{name}.scales", SCALE_DTYPES, (k // group_size, n), why)
    return Layout(n, k, group_size, group)


def unpack_awq(tensors: Mapping[str, Tensor], name: str, config: QuantConfig) -> ZeroPointWeight:
    """The weights of the module `name`."""
    layout = check_awq(tensors, name, config)
    finer = layout.group_size // layout.group
    scale = tensors[f"{name}.scales"].float().t().repeat_interleave(finer, dim=1)  # [n, k / group]
    zero = _in_order(tensors[f"{name}.qzeros"]).t().repeat_interleave(finer, dim=1)
    return ZeroPointWeight(name, 4, _in_order(tensors[f"{name}.qweight"]).t().contiguous(), scale, zero)


def _in_order(words: Tensor) -> Tensor:
    """Codes [rows, n]: the first four of a word are the even ones of its eight, the last four the odd ones."""
    halves = codes_of(words, 4).view(*words.shape, 2, 4)
    return halves.transpose(-1, -2).reshape(words.shape[0], -1)
