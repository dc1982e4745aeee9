"""The twins of the products with packed codes: every weight is made first. Also what the packing is: `pack_words` and back."""

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.device_codes import WORD_BITS, DeviceCodes
from octavo.kernels.reference.activation import silu_and_mul


def packed_linear(x: Tensor, weight: DeviceCodes, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x [rows, in] -> [rows, out], in `out` if that is given"""
    product = F.linear(x, unpack(weight, x.dtype), bias)
    return product if out is None else out.copy_(product)


def packed_gate_up(x: Tensor, weight: DeviceCodes) -> Tensor:
    """silu(gate) * up; weight has rows of gate over rows of up"""
    return silu_and_mul(packed_linear(x, weight))


def unpack(weight: DeviceCodes, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
    """All rows, or those of an index [count], as weights [count, in]; columns in their original order"""
    words, pairs = (weight.words, weight.scales) if rows is None else (weight.words[rows], weight.scales[rows])
    halves = pairs.view(torch.float16).view(*pairs.shape, 2).float().repeat_interleave(weight.group, dim=1)  # [count, columns, 2]
    codes = unpack_words(words, weight.bits, weight.span)
    scale, offset = halves[:, : codes.shape[1]].unbind(-1)
    values = ((scale * codes + offset) * weight.factor).to(dtype)[:, : weight.size]
    return values.contiguous() if weight.order is None else torch.empty_like(values).index_copy_(1, weight.order, values)


def unpack_words(words: Tensor, bits: int, span: int) -> Tensor:
    """int16 [n, blocks * span] -> codes [n, columns] int32"""
    wide = words.int().unflatten(1, (-1, 4, 2, span // 16, 2)).transpose(2, 4).flatten(2)  # [n, blocks, span], by columns
    spans = [wide >> shift & (1 << bits) - 1 for shift in range(0, WORD_BITS, bits)]
    return torch.stack(spans, dim=2).flatten(1)


def pack_words(codes: Tensor, bits: int, span: int) -> Tensor:
    """uint8 [n, columns], whole blocks -> int16 [n, blocks * span]"""
    spans = codes.unflatten(1, (-1, WORD_BITS // bits, span))  # [n, blocks, spans, span]
    words = torch.zeros(len(codes), spans.shape[1], span, dtype=torch.int32, device=codes.device)
    for index in range(WORD_BITS // bits):
        words |= spans[:, :, index].int() << bits * index
    by_thread: Tensor = words.to(torch.int16).unflatten(2, (span // 16, 2, 4, 2)).transpose(2, 4)
    return by_thread.flatten(1)
