"""What AWQ and GPTQ checkpoints have in common: codes in 32-bit words, and tensors that belong to a module by their name.

    MODULE.qweight   codes          MODULE.scales   one for each group of input columns and output row
    MODULE.qzeros    zeros          w = scale * (code - zero)

The first code of a word is in its lowest bits.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.errors import LoadError

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def take(tensors: Mapping[str, Tensor], name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...], why: str) -> Tensor:
    """The tensor `name`, checked; None in `shape` is any size but zero, `why` says where the expectation comes from."""
    tensor = tensors.get(name)
    if tensor is None:
        raise LoadError(f"{name} is missing")
    if tensor.dtype not in dtypes:
        raise LoadError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    fits = len(shape) == tensor.dim() and all(size == wanted if wanted is not None else size for size, wanted in zip(tensor.shape, shape))
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise LoadError(f"{name} is {list(tensor.shape)}, expected [{wanted}] ({why})")
    return tensor


def codes_of(words: Tensor, bits: int) -> Tensor:
    """int32 [..., words] to uint8 [..., words, codes in a word]."""
    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)  # little-endian, as checkpoints are
    if bits == 8:
        return octets
    return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)
