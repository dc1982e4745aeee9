"""Checkpoints whose codes have zeros: AWQ, GPTQ and compressed-tensors. Their tensors' names start with that of a module.

    MODULE.qweight   codes          MODULE.scales   one for each group of input columns and output row
    MODULE.qzeros    zeros          w = scale * (code - zero)

AWQ and GPTQ store codes in 32-bit words, the first one in the lowest bits; compressed-tensors is drawn below. `fold` converts a weight
to the packed form (`packed.py`): codes and scales are unchanged, and the offset is -scale * zero. float16 represents that exactly if
the zero is 0 or a power of two, as in symmetric checkpoints; otherwise its relative error is at most 2^-11.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from octavo.errors import ConfigError, LoadError
from octavo.quant.packed import PackedWeight, pack
from octavo.quant.quant_config import GROUPS, QuantConfig, whole_group

SCALES = "weight_scale"  # of compressed-tensors
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Described(Protocol):
    """A tensor, or its description in a file header, so that sizes can be checked before anything is read."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> Sequence[int]: ...


Known = TypeVar("Known", bound=Described)


@dataclass(frozen=True, slots=True)
class Layout:
    """The common sizes of the tensors of a module."""

    n: int
    k: int
    group_size: int  # as published: columns that share a scale
    group: int  # in the packed form; it divides the published group

    def cut(self, name: str, rows: range | None, columns: range | None) -> "Cut":
        """Returns these rows and columns of the module `name`; None: all. Refuses columns that are not whole groups."""
        rows, columns = rows or range(self.n), columns or range(self.k)
        fitting = (size for size in GROUPS if not (self.group_size % size or columns.start % size or len(columns) % size))
        group = self.group if len(columns) == self.k else next(fitting, None)
        if group is None:
            ranks = self.k // len(columns)
            raise ConfigError(
                f"{name}: {self.k} columns in groups of {self.group_size} cannot be split over tensor_parallel_size {ranks}: "
                f"{len(columns)} columns are not made of groups of {' or '.join(map(str, GROUPS))}"
            )
        return Cut(rows, columns, torch.arange(columns.start, columns.stop, group) // self.group_size)


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Rows and columns of a module. Tensors are views of a file, of which only these are copied."""

    rows: range
    columns: range
    groups: Tensor  # for each group of the packed form: the number of the published one

    def table(self, published: Tensor) -> Tensor:
        """Returns scales or zeros [rows, groups in the packed form] from published ones [groups, n]."""
        return published[:, self.rows.start : self.rows.stop].index_select(0, self.groups).t().contiguous()

    def words(self, per_word: int) -> slice:
        """Returns the words that contain the rows, if a word contains several. The first and the last may contain others, too."""
        return slice(self.rows.start // per_word, -(-self.rows.stop // per_word))

    def columns_in(self, per_word: int) -> slice:
        return slice(self.columns.start // per_word, self.columns.stop // per_word)


@dataclass(frozen=True, slots=True, eq=False)
class ZeroPointWeight:
    """w[row, order[j]] = scale[row, j // group] * (codes[row, j] - zero[row, j // group])"""

    name: str  # of the module
    bits: int
    codes: Tensor  # [n, k] uint8
    scale: Tensor  # [n, k / group] float32
    zero: Tensor  # [n, k / group]
    order: Tensor | None = None  # [k] int32
    scales: str = "scales"  # the name of the tensor of its scales

    def fold(self) -> PackedWeight:
        return pack(f"{self.name}.{self.scales}", self.bits, self.codes, self.scale, -self.scale * self.zero, self.order)

    def dequantize(self) -> Tensor:
        """Returns the weights [n, k] in float32, with columns in their original order.

        This is exact: the difference of code and zero has 9 bits, and a scale has 11.
        """
        if not bool(self.scale.isfinite().all()):
            raise LoadError(f"{self.name}.{self.scales}: a scale is not finite")
        n, k = self.codes.shape
        groups = self.scale.shape[1]
        steps = self.codes.float().view(n, groups, k // groups).sub_(self.zero.unsqueeze(-1))
        weights = steps.mul_(self.scale.unsqueeze(-1)).view(n, k)
        return weights if self.order is None else torch.empty_like(weights).index_copy_(1, self.order.long(), weights)

    def of_columns(self, columns: range) -> "ZeroPointWeight | None":
        """Returns the part of these input columns of a weight that has an order, or None if they are not whole groups."""
        assert self.order is not None
        groups = self.scale.shape[1]
        inside = ((self.order >= columns.start) & (self.order < columns.stop)).view(groups, -1)
        taken = inside.all(dim=1)
        if not torch.equal(taken, inside.any(dim=1)):
            return None
        codes, order, scale, zero = self.codes[:, inside.flatten()], self.order[inside.flatten()], self.scale[:, taken], self.zero[:, taken]
        return replace(self, codes=codes, scale=scale, zero=zero, order=order - columns.start)


def take(tensors: Mapping[str, Known], name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...], why: str) -> Known:
    """Returns the tensor `name`, or raises if its dtype or shape is wrong.

    None in `shape` matches any size except zero. `why`: the origin of the expected shape, for messages.
    """
    tensor = tensors.get(name)
    if tensor is None:
        raise LoadError(f"{name} is missing")
    if tensor.dtype not in dtypes:
        raise LoadError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    sizes = list(tensor.shape)
    fits = len(shape) == len(sizes) and all(size == wanted if wanted is not None else size for size, wanted in zip(sizes, shape))
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise LoadError(f"{name} is {sizes}, expected [{wanted}] ({why})")
    return tensor


def codes_of(words: Tensor, bits: int) -> Tensor:
    """Returns the codes in int32 words [...], as uint8 [..., codes in a word]."""
    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)  # little-endian, as checkpoints are
    if bits == 8:
        return octets
    return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)


# -- AWQ (version GEMM, 4 bits)
#
#     qweight   int32 [k, n / 8]          a word: 8 output rows of one input column, in the order 0 2 4 6 1 3 5 7
#     qzeros    int32 [k / group, n / 8]  the same
#     scales    float16 [k / group, n]


def check_awq(tensors: Mapping[str, Described], name: str, config: QuantConfig) -> Layout:
    """Determines and checks the sizes of the module `name`, from its tensors or their headers."""
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


def unpack_awq(
    tensors: Mapping[str, Tensor], name: str, config: QuantConfig, rows: range | None = None, columns: range | None = None
) -> ZeroPointWeight:
    """Returns the weights of the module `name`, or these rows and columns of them."""
    cut = check_awq(tensors, name, config).cut(name, rows, columns)
    words = cut.words(8)
    codes = _incolumn_order(tensors[f"{name}.qweight"][cut.columns_in(1), words]).t()  # [rows of whole words, columns]
    first = cut.rows.start - 8 * words.start
    scale, zero = cut.table(tensors[f"{name}.scales"]).float(), cut.table(_incolumn_order(tensors[f"{name}.qzeros"]))
    return ZeroPointWeight(name, 4, codes[first : first + len(cut.rows)].contiguous(), scale, zero)


def _incolumn_order(words: Tensor) -> Tensor:
    """Returns codes [rows, n]. The first four in a word have even numbers, the last four odd numbers."""
    halves = codes_of(words, 4).view(*words.shape, 2, 4)
    return halves.transpose(-1, -2).reshape(words.shape[0], -1)


# -- GPTQ (4 and 8 bits)
#
#     qweight   int32 [k / codes, n]           a word: 8 (or 4) input columns of one output row, in their order
#     qzeros    int32 [k / group, n / codes]   a word: 8 (or 4) output rows. The first format stores zeros minus one, v2 unchanged
#     scales    float16 [k / group, n]
#     g_idx     int32 [k]                      the group of each input column; with act-order groups are not contiguous
#
# Columns are sorted by their group, and `order` contains their original positions.

_ONES = {4: 0x11111111, 8: 0x01010101}  # a one in every code of a word


def check_gptq(tensors: Mapping[str, Described], name: str, config: QuantConfig) -> Layout:
    """Determines and checks the sizes of the module `name`, from its tensors or their headers."""
    per_word = 32 // config.bits
    words = take(tensors, f"{name}.qweight", (torch.int32,), (None, None), f"input columns / {per_word}, output rows")
    k, n = words.shape[0] * per_word, words.shape[1]
    group_size = k if config.group_size == -1 else min(config.group_size, k)
    group = whole_group(f"{name}.qweight", group_size, k)
    groups = -(-k // group_size)  # the last one may be shorter
    if n % per_word:
        raise LoadError(f"{name}.qweight has {n} output rows, not a multiple of {per_word}")
    why = f"{k} input columns, {n} output rows, {config.bits} bits, group_size {group_size}"
    take(tensors, f"{name}.qzeros", (torch.int32,), (groups, n // per_word), why)
    take(tensors, f"{name}.scales", SCALE_DTYPES, (groups, n), why)
    if config.desc_act or f"{name}.g_idx" in tensors:
        take(tensors, f"{name}.g_idx", (torch.int32,), (k,), f"{k} input columns")
    return Layout(n, k, group_size, group)


def unpack_gptq(
    tensors: Mapping[str, Tensor], name: str, config: QuantConfig, rows: range | None = None, columns: range | None = None
) -> ZeroPointWeight:
    """Returns the weights of the module `name`, or these rows and columns of them. With act-order it returns all columns."""
    layout = check_gptq(tensors, name, config)
    order = column_order(tensors.get(f"{name}.g_idx"), f"{name}.g_idx", layout)
    cut = layout.cut(name, rows, columns if order is None else None)
    words = tensors[f"{name}.qweight"][cut.columns_in(32 // config.bits), cut.rows.start : cut.rows.stop]
    codes = codes_of(words.t(), config.bits).flatten(1)
    scale, zero = cut.table(tensors[f"{name}.scales"]).float(), cut.table(_gptq_zeros(tensors[f"{name}.qzeros"], config))
    return ZeroPointWeight(name, config.bits, codes if order is None else codes.index_select(1, order), scale, zero, order)


def _gptq_zeros(words: Tensor, config: QuantConfig) -> Tensor:
    """Returns the zeros [groups, n]. The first format subtracted one from whole words, with carries, so one is added to whole words.

    `words`: of the whole module, even for a part of it, so that all ranks detect the same format.
    """
    stored = codes_of(words, config.bits).flatten(1)
        # Some writers store symmetric zeros unchanged, but still declare the first format.
    as_they_are = config.sym and bool((stored == 1 << (config.bits - 1)).all())
    if not config.stored_minus_one or as_they_are:
        return stored
    return codes_of(words + _ONES[config.bits], config.bits).flatten(1)


def column_order(group_of: Tensor | None, name: str, layout: Layout) -> Tensor | None:
    """Returns the columns sorted by group, or None if they are already in that order."""
    in_order = torch.arange(layout.k) // layout.group_size
    if group_of is None or torch.equal(group_of.long(), in_order):
        return None
    groups, order = group_of.long().sort(stable=True)
    if not torch.equal(groups, in_order):
        raise LoadError(f"{name} does not put {layout.group_size} of {layout.k} input columns into each group")
    return order.int()


# -- compressed-tensors: 4-bit or 8-bit integers in 32-bit words (pack-quantized), or 8-bit integers, one per byte (int-quantized)
#
#     MODULE.weight_packed       int32 [n, k / codes]          a word: 8 (or 4) input columns, the first in its lowest bits
#     MODULE.weight              int8 [n, k]                   instead, if each has a byte
#     MODULE.weight_scale        [n, k / group]                [n, 1]: one per row; [1]: one for the matrix
#     MODULE.weight_zero_point   int32 [n / codes, k / group]  a word: 8 (or 4) output rows; or int8 [n, k / group]; absent if symmetric
#     MODULE.weight_g_idx        int32 [k]                     the group of each input column, with act-order
#     MODULE.weight_shape        [2]                           n and k
#
# The integers are signed, w = scale * (number - zero). In words they are shifted by the lowest integer, so codes and zeros are already
# in the packed form; bytes are shifted to match. Scales of activations are not read: activations stay floats.


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
    zero = cut.table(_compressed_zeros(tensors, name, config, layout.n, groups).t())
    return ZeroPointWeight(name, config.bits, codes if order is None else codes.index_select(1, order), scale, zero, order, SCALES)


def _check_shape(shape: Tensor | None, name: str, layout: Layout) -> None:
    if shape is not None and shape.tolist() != [layout.n, layout.k]:
        raise LoadError(f"{name}.weight_shape is {shape.tolist()}, but its codes are [{layout.n}, {layout.k}]")


def _from_lowest(numbers: Tensor, bits: int) -> Tensor:
    """Converts signed 8-bit numbers to unsigned ones, shifted by the lowest number of that many bits."""
    return numbers.contiguous().view(torch.uint8) + (1 << bits - 1)  # 8 bits wrap around


def _in_full(table: Tensor, n: int, groups: int) -> Tensor:
    return table.reshape(1, 1).expand(n, groups) if table.numel() == 1 else table


def _compressed_zeros(tensors: Mapping[str, Tensor], name: str, config: QuantConfig, n: int, groups: int) -> Tensor:
    """Returns the zeros [n, groups]."""
    if config.sym:
        return torch.full((n, groups), 1 << config.bits - 1, dtype=torch.uint8)
    stored = tensors[f"{name}.weight_zero_point"]
    if stored.dtype == torch.int8:
        return _in_full(_from_lowest(stored, config.bits), n, groups)
    return codes_of(stored, config.bits).transpose(1, 2).reshape(-1, groups)[:n]  # a word holds rows
