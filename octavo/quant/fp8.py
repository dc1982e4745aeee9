"""8-bit floats (e4m3) with scales: the formats fp8 and compressed-tensors' float-quantized.

    MODULE.weight             float8 [n, k]
    MODULE.weight_scale       one number, [n] or [n, 1], or [n / rows, k / columns] for blocks, where the last may be smaller
    MODULE.weight_scale_inv   another name for the same; it is multiplied, too

torch gets w = weight * scale as floats. A GPU stores the 8-bit floats (`kernels/fp8_matrix.py`). The native program stores 8-bit
integers, and so does a GPU for experts and for other scales: the largest weight of a group of 32 columns is 127 steps from zero, so a
weight has an error of at most 1/254 of that, plus the rounding of scales to float16. That adds 2 to 4 % to the error of rounding to e4m3.
Scales of activations are not read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.kernels.fp8_matrix import Fp8Matrix
from octavo.kernels.kernel_shapes import FP8_BLOCK
from octavo.quant.packed import CHUNK, PackedWeight, even_line, fitting_factor, nearest_codes
from octavo.quant.quant_config import FP8_GROUP, QuantConfig, whole_group
from octavo.quant.zero_point import SCALE_DTYPES, Described, Layout, take

LARGEST = 448  # of e4m3
NO_NUMBER = 0x7F  # bits of a NaN, without its sign


def check_fp8(tensors: Mapping[str, Described], name: str, config: QuantConfig) -> Layout:
    """Determines and checks the sizes of the module `name`, from its tensors or their headers."""
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
        problem = f"exists twice, as {found[1]}, too" if found else f"or {name}.weight_scale_inv is missing"
        raise LoadError(f"{name}.weight_scale {problem}")
    return found[0]


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """Rows and columns of a module, from `start` on. A row and a column of the module are in block row // rows, column // columns."""

    name: str  # of the module
    values: Tensor  # [rows, columns] float8, a view of the file
    scale: Tensor  # [rows of blocks, columns of blocks] float32, of the whole module
    block: tuple[int, int]  # rows and columns that share a scale
    start: tuple[int, int]
    group: int  # of the integer codes

    def dequantize(self) -> Tensor:
        """Returns the weights in float32."""
        return torch.cat([weights for _, weights in self._chunks()])

    def rows(self, index: Tensor) -> "Fp8Weight":
        """Returns the rows that `index` selects, in its order. Rows that leave their blocks get scales of their own."""
        values = self.values.view(torch.uint8)[index].view(self.values.dtype)
        blocks = self._blocks(0)
        if len(index) == len(blocks) and torch.equal(blocks[index], blocks):
            return replace(self, values=values)
        return replace(self, values=values, scale=self.scale[blocks[index]], block=(1, self.block[1]), start=(0, self.start[1]))

    def fold(self) -> PackedWeight:
        """Returns integer codes. A few rows are converted to floats at a time."""
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
        height, scale = max(1, CHUNK // k), self.scale[:, self._blocks(1)]
        for start in range(0, n, height):
            rows = slice(start, min(start + height, n))
            yield rows, self.values[rows].float().mul_(scale[self._blocks(0)[rows]])

    def _blocks(self, axis: int) -> Tensor:
        """Returns the block of each row (axis 0) or column (axis 1)."""
        return (torch.arange(self.values.shape[axis]) + self.start[axis]) // self.block[axis]

    @property
    def by_rows(self) -> bool:
        """Whether all columns of a row share a scale."""
        return self.start[1] // self.block[1] == (self.start[1] + self.values.shape[1] - 1) // self.block[1]

    @property
    def by_whole_blocks(self) -> bool:
        return self.block == (FP8_BLOCK, FP8_BLOCK) and not any(size % FP8_BLOCK for size in (*self.start, *self.values.shape))

    def device_scale(self) -> Tensor:
        """Returns the scales in the format of the GPU kernels: per row or per whole block."""
        if self.by_rows:
            return self.scale[self._blocks(0), self.start[1] // self.block[1]]
        return self.scale[self._blocks(0)[::FP8_BLOCK]][:, self._blocks(1)[::FP8_BLOCK]]


Quantised = PackedWeight | Fp8Weight


def folded(weight: Quantised) -> PackedWeight:
    return weight.fold() if isinstance(weight, Fp8Weight) else weight


def on_device(parts: Sequence[Fp8Weight], device: torch.device) -> Fp8Matrix | None:
    """Returns one matrix with the rows of all parts, or None if the kernels for 8-bit floats do not support these scales."""
    k = parts[0].values.shape[1]
    if all(part.by_rows for part in parts):
        span = k
    elif all(part.by_whole_blocks for part in parts):
        span = FP8_BLOCK
    else:
        return None
    values = torch.empty(sum(len(part.values) for part in parts), k, dtype=torch.uint8, device=device)
    for part, rows in zip(parts, values.split([len(part.values) for part in parts]), strict=True):
        rows.copy_(part.values.view(torch.uint8))
        if bool((rows & NO_NUMBER == NO_NUMBER).any()):
            raise LoadError(f"{part.name}.weight: a weight is not a number")
    scale = torch.cat([part.device_scale() for part in parts]).to(device)
    return Fp8Matrix(values.view(torch.float8_e4m3fn), scale, span)


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
    block = config.block or (layout.n if scale.numel() == 1 else 1, layout.k)
    scale, start = scale if config.block else scale.reshape(-1, 1), (cut.rows.start, cut.columns.start)
    values = tensors[f"{name}.weight"][of_rows, of_columns]
    return Fp8Weight(name, values, scale, block, start, len(cut.columns) // len(cut.groups))
