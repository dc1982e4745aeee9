"""AWQ, GPTQ, FP8 and compressed-tensors: presents the tensors of a quantised module as one weight.

    MODULE.qweight  .qzeros  .scales  .g_idx                        ->  MODULE.weight
    MODULE.weight_packed  .weight_scale  .weight_zero_point  ...    ->  MODULE.weight
    MODULE.weight in 8 bits  .weight_scale  ...                     ->  MODULE.weight

The names and dtypes of the tensors tell which modules are quantised, and `quantization_config` tells how. Sizes are checked from headers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.models.split import Part
from octavo.quant.fp8 import Fp8Weight, Quantised, check_fp8, unpack_fp8
from octavo.quant.quant_config import PARTS, STACKED_CODES, WHOLE_NUMBERS, QuantConfig
from octavo.quant.zero_point import (
    Layout,
    ZeroPointWeight,
    check_awq,
    check_compressed,
    check_gptq,
    unpack_awq,
    unpack_compressed,
    unpack_gptq,
)

CHECKS = {"awq": check_awq, "gptq": check_gptq, "words": check_compressed, "bytes": check_compressed, "fp8": check_fp8}
DTYPES = {"I32": torch.int32, "I64": torch.int64, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}


class Header(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]


def part_dtype(name: str, stored: str, config: QuantConfig) -> torch.dtype | None:
    """Returns the dtype of a tensor that is not a usual float, if a quantised module may have such a part; otherwise None."""
    if config.layout == "mxfp4":
        return torch.uint8 if stored == "U8" and name.endswith(STACKED_CODES) else None
    allowed = WHOLE_NUMBERS[config.layout].get(stored, ())
    return DTYPES[stored] if name.rpartition(".")[2] in allowed else None


def cut(values: Tensor, part: Part) -> Tensor:
    """Returns a view of the part."""
    if part.rows is not None:
        values = values[part.rows.start : part.rows.stop]
    return values if part.columns is None else values[:, part.columns.start : part.columns.stop]


@dataclass(frozen=True, slots=True)
class PackedModule:
    name: str
    config: QuantConfig
    layout: Layout
    tensors: tuple[str, ...]  # codes first

    def check(self, part: Part) -> None:
        if not self.config.desc_act:  # otherwise a part that is not whole groups becomes floats
            self.layout.cut(self.name, part.rows, part.columns)

    def floats(self, read: Callable[[str], Tensor], part: Part) -> Tensor:
        weight = self._unpacked(read, part)
        if isinstance(weight, Fp8Weight) or weight.order is None:
            return weight.dequantize()
        return cut(weight.dequantize(), Part(columns=part.columns))

    def codes(self, read: Callable[[str], Tensor], part: Part) -> Quantised | None:
        """With act-order the columns of a rank come from any group. It stays quantised only if they are whole groups."""
        weight = self._unpacked(read, part)
        if isinstance(weight, Fp8Weight):
            return weight
        in_groups = weight if weight.order is None or part.columns is None else weight.of_columns(part.columns)
        return None if in_groups is None else in_groups.fold()

    def _unpacked(self, read: Callable[[str], Tensor], part: Part) -> Fp8Weight | ZeroPointWeight:
        """Returns these rows and columns, but with act-order all columns: those of a rank are only known when the order is read."""
        tensors = {name: read(name) for name in self.tensors}
        if self.config.layout == "fp8":
            return unpack_fp8(tensors, self.name, self.config, part.rows, part.columns)
        unpack = {"awq": unpack_awq, "gptq": unpack_gptq}.get(self.config.layout, unpack_compressed)
        return unpack(tensors, self.name, self.config, part.rows, part.columns)


def find_packed(headers: Mapping[str, Header], config: QuantConfig) -> list[PackedModule]:
    """Returns all quantised modules. Each has been checked for completeness and matching tensor sizes."""
    stored = {dtype: name for name, dtype in DTYPES.items()}
    codes = f".{config.codes_part}"
    found = [name for name, header in headers.items() if config.is_codes(stored.get(header.dtype, ""), name.rpartition(".")[2])]
    if not found:
        kinds = "" if codes != ".weight" else f" in {' or '.join(WHOLE_NUMBERS[config.layout])}"
        raise LoadError(f"quantization_config says {config.method}, but there is no weight named *{codes}{kinds}")
    return [_module(headers, name.removesuffix(codes), config) for name in found]


def _module(headers: Mapping[str, Header], name: str, config: QuantConfig) -> PackedModule:
    if config.codes_part != "weight" and f"{name}.weight" in headers:
        raise LoadError(f"{name} exists twice, as weight and as {config.codes_part}")
    layout = CHECKS[config.layout](headers, name, config)
    tensors = [f"{name}.{part}" for part in PARTS[config.layout] if f"{name}.{part}" in headers]
    return PackedModule(name, config, layout, tuple(tensors))
