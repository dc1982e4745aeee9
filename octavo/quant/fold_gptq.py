"""GPTQ checkpoints (4 and 8 bits) in the packed form.

    qweight   int32 [k / codes, n]           a word: 8 (or 4) input columns of one output row, in their order
    qzeros    int32 [k / group, n / codes]   a word: 8 (or 4) output rows. The first format stores zeros less one, v2 as they are
    scales    float16 [k / group, n]
    g_idx     int32 [k]                      the group of each input column; with act-order groups are not neighbours

Columns are sorted by their group, and `order` remembers where they came from. As in AWQ, scales and codes stay as they are, and
offsets are exact where zeros are powers of two, which they are in symmetric checkpoints.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.quant.groups import whole_group
from octavo.quant.quant_config import QuantConfig
from octavo.quant.words import SCALE_DTYPES, Described, Layout, ZeroPointWeight, codes_of, take

_ONES = {4: 0x11111111, 8: 0x01010101}  # a one in every code of a word


def check_gptq(tensors: Mapping[str, Described], name: str, config: QuantConfig) -> Layout:
    """Sizes of the module `name`, from its tensors or their headers."""
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


def unpack_gptq(tensors: Mapping[str, Tensor], name: str, config: QuantConfig) -> ZeroPointWeight:
    """The weights of the module `name`."""
    layout = check_gptq(tensors, name, config)
    n, k, finer, groups = layout.n, layout.k, layout.group_size // layout.group, layout.k // layout.group
    order = _order(tensors.get(f"{name}.g_idx"), f"{name}.g_idx", layout)
    codes = codes_of(tensors[f"{name}.qweight"].t(), config.bits).view(n, k)
    scale = tensors[f"{name}.scales"].float().t().repeat_interleave(finer, dim=1)[:, :groups]
    zero = _zeros(tensors[f"{name}.qzeros"], config).t().repeat_interleave(finer, dim=1)[:, :groups]
    return ZeroPointWeight(name, config.bits, codes if order is None else codes.index_select(1, order), scale, zero, order)


def _zeros(words: Tensor, config: QuantConfig) -> Tensor:
    """[groups, n]. In the first format one is added to whole words, carries and all: it was taken off whole words."""
    stored = codes_of(words, config.bits).flatten(1)
    # Some writers store symmetric zeros as they are, and still call it the first format.
    as_they_are = config.sym and bool((stored == 1 << (config.bits - 1)).all())
    if not config.stored_minus_one or as_they_are:
        return stored
    return codes_of(words + _ONES[config.bits], config.bits).flatten(1)


def _order(group_of: Tensor | None, name: str, layout: Layout) -> Tensor | None:
    """Columns sorted by group; None where they are already."""
    in_order = torch.arange(layout.k) // layout.group_size
    if group_of is None or torch.equal(group_of.long(), in_order):
        return None
    groups, order = group_of.long().sort(stable=True)
    if not torch.equal(groups, in_order):
        raise LoadError(f"{name} does not put {layout.group_size} of {layout.k} input columns into each group")
    return order.int()
