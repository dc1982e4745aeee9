"""Floats of 8 bits (e4m3) with scales: the formats fp8 and compressed-tensors' float-quantized.

    MODULE.weight             float8 [n, k]
    MODULE.weight_scale       one number, [n] or [n, 1], or [n / rows, k / columns] of blocks, where the last may be smaller
    MODULE.weight_scale_inv   the same thing by another name; it is multiplied, too

torch gets w = weight * scale as floats. The native program and a GPU keep codes of 8 bits: the largest weight of a group of 32
columns is 127 steps from zero, so that a weight is off by at most 1/254 of it, and by what float16 does to a scale. That adds
2 to 4 % to the error that rounding to e4m3 made. Scales of activations are not read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.quant.packed import CHUNK, PackedWeight, even_line, fitting_factor, nearest_codes
from octavo.quant.quant_config import FP8_GROUP, QuantConfig, whole_group
from octavo.quant.zero_point import SCALE_DTYPES, Described, Layout, take

LARGEST = 448  # of e4m3


def check_fp8(tensors: Mapping[str, Described], name: str, config: QuantConfig) -> Layout:
    """Returns the sizes of the module `name`, and checks them, from its tensors or their headers."""
    n, k = take(tensors, f"{name}.weight", (torch.float8_e4m3fn,), (None, None), "output rows, input columns").shape
    group = whole_group(f"{name}.weight", FP8_GROUP, k)
    scale_name = _scale_name(tensors, name)
    if config.block is not None:
        rows, columns = config.block
        why = f"{n} output rows and {k} input columns in blocks of {rows} x {columns}"
        take(tensors, scale_name, SCALE_DTYPES, (-(-n // rows), -(-k // columns)), why)
    elif tuple(tensors[scale_name].shape) not in ((), (1,), (1, 1), (n,)):
        take(tensors, scale_name, SCALE_DTYPES, (n, 1), f"{n} output rows")
    elif tensors[scale_name].dtype not in SCALE_DTYPES:
        raise LoadError(f"{scale_name} is {tensors[scale_name].dtype}, expected {' or '.join(map(str, SCALE_DTYPES))}")
    return Layout(n, k, FP8_GROUP, group)


def _scale_name(tensors: Mapping[str, Described], name: str) -> str:
    found = [scale for scale in (f"{name}.weight_scale", f"{name}.weight_scale_inv") if scale in tensors]
    if len(found) != 1:
        problem = f"is there twice, as {found[1]} too" if found else f"or {name}.weight_scale_inv is missing"
        raise LoadError(f"{name}.weight_scale {problem}")
    return found[0]


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """w[row, column] = values[row, column] * scale[scale_of[row], column]"""

    name: str  # of the module
    values: Tensor  # [rows, columns] float8, a view of the file
    scale: Tensor  # [rows of blocks, columns or 1] float32
    scale_of: Tensor  # [rows]: the row of blocks that each row is in
    group: int

    def dequantize(self) -> Tensor:
        """Returns the weights in float32."""
        return torch.cat([weights for _, weights in self._chunks()])

    def fold(self) -> PackedWeight:
        """Returns codes. A few rows are floats at a time."""
        n, k = self.values.shape
        widest = self.scale.abs().amax() * (LARGEST / 127)
        factor = fitting_factor(f"{self.name}.weight_scale", widest, widest * 128)
        codes = torch.empty(n, k // self.group, self.group, dtype=torch.uint8)
        scale, offset = (torch.empty(n, k // self.group, 1, dtype=torch.float16) for _ in range(2))
        for rows, chunk in self._chunks():
            weights = chunk.view(-1, k // self.group, self.group)
            kept = [(table / factor).half() for table in even_line(weights)]
            if not bool(kept[0].isfinite().all()):
                raise LoadError(f"{self.name}.weight: a weight is not a number")
            scale[rows], offset[rows] = kept
            step, lowest = (table.float() * factor for table in kept)
            codes[rows] = nearest_codes(weights, step, lowest, 8)
        return PackedWeight(8, self.group, codes.view(n, k), scale.squeeze(-1), offset.squeeze(-1), factor)

    def _chunks(self) -> Iterator[tuple[slice, Tensor]]:
        n, k = self.values.shape
        height = max(1, CHUNK // k)
        for start in range(0, n, height):
            rows = slice(start, min(start + height, n))
            yield rows, self.values[rows].float().mul_(self.scale[self.scale_of[rows]])


def unpack_fp8(
    tensors: Mapping[str, Tensor], name: str, config: QuantConfig, rows: range | None = None, columns: range | None = None
) -> Fp8Weight:
    """Returns the weights of the module `name`, or these rows and columns of them."""
    layout = check_fp8(tensors, name, config)
    cut = layout.cut(name, rows, columns)
    of_rows, of_columns = slice(cut.rows.start, cut.rows.stop), slice(cut.columns.start, cut.columns.stop)
    scale_name = _scale_name(tensors, name)
    scale = tensors[scale_name].float()
    if not bool(scale.isfinite().all()):
        raise LoadError(f"{scale_name}: a scale is not finite")
    if config.block is None:
        scale, rows_of_block = scale.reshape(-1, 1), layout.n if scale.numel() == 1 else 1
    else:
        rows_of_block, columns_of_block = config.block
        scale = scale[:, torch.arange(cut.columns.start, cut.columns.stop) // columns_of_block]
    scale_of = torch.arange(cut.rows.start, cut.rows.stop) // rows_of_block
    return Fp8Weight(name, tensors[f"{name}.weight"][of_rows, of_columns], scale, scale_of, len(cut.columns) // len(cut.groups))
