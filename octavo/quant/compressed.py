"""compressed-tensors: 4-bit or 8-bit integers in 32-bit words (pack-quantized), or 8-bit integers, one per byte (int-quantized).

    MODULE.weight_packed       int32 [n, k / codes]          a word: 8 (or 4) input columns, the first in its lowest bits
    MODULE.weight              int8 [n, k]                   instead, if each has a byte
    MODULE.weight_scale        [n, k / group]                [n, 1]: one per row; [1]: one for the matrix
    MODULE.weight_zero_point   int32 [n / codes, k / group]  a word: 8 (or 4) output rows; or int8 [n, k / group]; absent if symmetric
    MODULE.weight_g_idx        int32 [k]                     the group of each input column, with act-order
    MODULE.weight_shape        [2]                           n and k

The integers are signed, w = scale * (number - zero). In words they are shifted by the lowest integer, so codes and zeros are already
in the packed form; bytes are shifted to match. Scales of activations are not read: activations stay floats.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.quant.quant_config import QuantConfig, whole_group
from octavo.quant.zero_point import SCALE_DTYPES, Described, Layout, ZeroPointWeight, codes_of, column_order, take

SCALES = "weight_scale"


def check_compressed(tensors: Mapping[str, Described], name: str, config: QuantConfig) -> Layout:
    """Determines and checks the sizes of the module `name`, from its tensors or their headers."""
    per_word = 32 // config.bits
    if config.layout == "words":
        words = take(tensors, f"{name}.weight_packed", (torch.int32,), (None, None), f"output rows, input columns / {per_word}")
        n, k = words.shape[0], words.shape[1] * per_word
    else:
        n, k = take(tensors, f"{name}.weight", (torch.int8,), (None, None), "output rows, input columns").shape
    group_size = k if config.group_size == -1 else config.group_size
    group = whole_group(f"{name}.{config.codes_part}", group_size, k)
    if k % group_size:
        raise LoadError(f"{name}.{config.codes_part} has {k} input columns, not a multiple of group_size {group_size}")
    why = f"{k} input columns, {n} output rows, {config.bits} bits, group_size {group_size}"
    groups = k // group_size
    if not _is_single(tensors.get(f"{name}.{SCALES}"), config):
        take(tensors, f"{name}.{SCALES}", SCALE_DTYPES, (n, groups), why)
    if not config.sym:
        _check_zeros(tensors, name, config, (n, groups), why)
    if config.desc_act or f"{name}.weight_g_idx" in tensors:
        take(tensors, f"{name}.weight_g_idx", (torch.int32,), (k,), f"{k} input columns")
    if f"{name}.weight_shape" in tensors:
        take(tensors, f"{name}.weight_shape", (torch.int64, torch.int32), (2,), "output rows and input columns")
    return Layout(n, k, group_size, group)


def _is_single(scale: Described | None, config: QuantConfig) -> bool:
    """Whether there is one scale for the whole matrix."""
    return scale is not None and config.group_size == -1 and scale.dtype in SCALE_DTYPES and tuple(scale.shape) in ((), (1,), (1, 1))


def _check_zeros(tensors: Mapping[str, Described], name: str, config: QuantConfig, shape: tuple[int, int], why: str) -> None:
    zeros, per_word = tensors.get(f"{name}.weight_zero_point"), 32 // config.bits
    if zeros is not None and zeros.dtype == torch.int32:
        take(tensors, f"{name}.weight_zero_point", (torch.int32,), (-(-shape[0] // per_word), shape[1]), why)
    elif not _is_single(tensors.get(f"{name}.{SCALES}"), config):
        take(tensors, f"{name}.weight_zero_point", (torch.int32, torch.int8), shape, why)
    elif zeros is None or zeros.dtype != torch.int8 or tuple(zeros.shape) not in ((), (1,), (1, 1)):
        raise LoadError(f"{name}.weight_zero_point must be one int8 number, as {name}.{SCALES} is one")


def unpack_compressed(
    tensors: Mapping[str, Tensor], name: str, config: QuantConfig, rows: range | None = None, columns: range | None = None
) -> ZeroPointWeight:
    """Returns the weights of the module `name`, or these rows and columns of them. With act-order it returns all columns."""
    layout = check_compressed(tensors, name, config)
    _check_shape(tensors.get(f"{name}.weight_shape"), name, layout)
    order = column_order(tensors.get(f"{name}.weight_g_idx"), f"{name}.weight_g_idx", layout)
    cut = layout.cut(name, rows, columns if order is None else None)
    of_rows = slice(cut.rows.start, cut.rows.stop)
    if config.layout == "words":
        codes = codes_of(tensors[f"{name}.weight_packed"][of_rows, cut.columns_in(32 // config.bits)], config.bits).flatten(1)
    else:
        codes = _from_lowest(tensors[f"{name}.weight"][of_rows, cut.columns_in(1)], 8)
    groups = layout.k // layout.group_size
    scale = cut.table(_in_full(tensors[f"{name}.{SCALES}"].float(), layout.n, groups).t())
    zero = cut.table(_zeros(tensors, name, config, layout.n, groups).t())
    return ZeroPointWeight(name, config.bits, codes if order is None else codes.index_select(1, order), scale, zero, order, SCALES)


def _check_shape(shape: Tensor | None, name: str, layout: Layout) -> None:
    if shape is not None and shape.tolist() != [layout.n, layout.k]:
        raise LoadError(f"{name}.weight_shape is {shape.tolist()}, but its codes are [{layout.n}, {layout.k}]")


def _from_lowest(numbers: Tensor, bits: int) -> Tensor:
    """Converts signed 8-bit numbers to unsigned ones, shifted by the lowest number of that many bits."""
    return numbers.contiguous().view(torch.uint8) + (1 << bits - 1)  # 8 bits wrap around


def _in_full(table: Tensor, n: int, groups: int) -> Tensor:
    return table.reshape(1, 1).expand(n, groups) if table.numel() == 1 else table


def _zeros(tensors: Mapping[str, Tensor], name: str, config: QuantConfig, n: int, groups: int) -> Tensor:
    """Returns the zeros [n, groups]."""
    if config.sym:
        return torch.full((n, groups), 1 << config.bits - 1, dtype=torch.uint8)
    stored = tensors[f"{name}.weight_zero_point"]
    if stored.dtype == torch.int8:
        return _in_full(_from_lowest(stored, config.bits), n, groups)
    return codes_of(stored, config.bits).transpose(1, 2).reshape(-1, groups)[:n]  # a word holds rows
