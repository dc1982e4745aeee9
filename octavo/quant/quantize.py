"""Float weights into the packed form: for models that come without quantised weights.

    8 bits   counted from the middle: the largest of a group is 127 steps away from it; zero stays zero
    4 bits   from the lowest to the highest of a group in 15 steps, then twice: the line through (code, weight) with the least
             squared error gives a better scale and offset, and those give better codes

Neither half of such a round can make the error larger. Two of them take 8 to 12 % off it, more than a search over ranges
that leave out the outermost weights, and at a smaller cost.
"""

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.quant.groups import GROUPS
from octavo.quant.packed import BITS, PackedWeight, fitting_factor

ROUNDS = 2
CHUNK = 1 << 18  # weights at a time: what fits into a core's cache
GPU_CHUNKS = 16  # as many at once keep a GPU busy


def quantize(weight: Tensor, bits: int, group: int = 32, name: str = "weight") -> PackedWeight:
    """[n, k] of any float dtype; `name` is the tensor's, for complaints."""
    if bits not in BITS or group not in GROUPS:
        raise LoadError(f"{name}: {bits} bits in groups of {group} are not supported, only bits {BITS} and groups {GROUPS}")
    if weight.dim() != 2 or weight.shape[1] % group or not weight.numel():
        raise LoadError(f"{name} is {list(weight.shape)}, expected a matrix with rows of whole groups of {group}")
    n, k = weight.shape
    rows = max(1, CHUNK * (GPU_CHUNKS if weight.is_cuda else 1) // k)
    chunks = weight.reshape(n, k // group, group).split(rows)
    lines = [_line_4(chunk.float()) if bits == 4 else _line_8(chunk.float()) for chunk in chunks]
    scale = torch.cat([scale for scale, _ in lines])  # [n, groups, 1]
    offset = torch.cat([offset for _, offset in lines])
    factor = fitting_factor(name, scale, offset)
    scale, offset = (scale / factor).half(), (offset / factor).half()
    codes = torch.empty(n, k // group, group, dtype=torch.uint8, device=weight.device)
    kept = (scale.float() * factor, offset.float() * factor)  # codes are for what float16 kept
    for chunk, scales, offsets, out in zip(chunks, *(table.split(rows) for table in kept), codes.split(rows)):
        out.copy_(_codes(chunk.float(), scales, offsets, bits))
    return PackedWeight(bits, group, codes.view(n, k), scale.squeeze(-1), offset.squeeze(-1), factor)


def _codes(weights: Tensor, scale: Tensor, offset: Tensor, bits: int) -> Tensor:
    """The nearest ones, as floats. A group whose scale is zero holds one number only, its offset."""
    steps = (weights - offset).div_(torch.where(scale == 0, 1, scale))
    return steps.round_().clamp_(0, 2**bits - 1)


def _line_8(weights: Tensor) -> tuple[Tensor, Tensor]:
    scale = weights.abs().amax(-1, keepdim=True) / 127
    return scale, scale * -128


def _line_4(weights: Tensor) -> tuple[Tensor, Tensor]:
    lowest = weights.amin(-1, keepdim=True)
    scale, offset = (weights.amax(-1, keepdim=True) - lowest) / 15, lowest
    for _ in range(ROUNDS):
        scale, offset = _fit(_codes(weights, scale, offset, 4), weights)
    return scale, offset


def _fit(codes: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The line with the least squared error."""
    middle, mean = codes.mean(-1, keepdim=True), weights.mean(-1, keepdim=True)
    away = codes - middle
    spread = away.square().sum(-1, keepdim=True)
    scale = (away * weights).sum(-1, keepdim=True) / torch.where(spread == 0, 1, spread)
    return scale, mean - scale * middle
