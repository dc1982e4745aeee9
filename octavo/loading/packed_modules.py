"""AWQ and GPTQ: the tensors of a quantised module, which the other code sees as one weight.

    MODULE.qweight  .qzeros  .scales  .g_idx      ->  MODULE.weight

The names of the tensors say which modules are quantised, and `quantization_config` says how. Sizes are checked from headers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.policy.split import Part
from octavo.quant.packed import PackedWeight
from octavo.quant.quant_config import QuantConfig
from octavo.quant.zero_point import Layout, ZeroPointWeight, check_awq, check_gptq, unpack_awq, unpack_gptq

CODES = ".qweight"
PARTS = {"awq": (CODES, ".qzeros", ".scales"), "gptq": (CODES, ".qzeros", ".scales", ".g_idx")}
WHOLE_NUMBERS = (CODES, ".qzeros", ".g_idx")  # the parts that are int32


class Header(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]


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
    tensors: tuple[str, ...]  # the first of them are the codes

    def check(self, part: Part) -> None:
        if not self.config.desc_act:  # else a part that is no whole groups becomes floats
            self.layout.cut(self.name, part.rows, part.columns)

    def floats(self, read: Callable[[str], Tensor], part: Part) -> Tensor:
        weight = self._unpacked(read, part)
        return weight.dequantize() if weight.order is None else cut(weight.dequantize(), Part(columns=part.columns))

    def codes(self, read: Callable[[str], Tensor], part: Part) -> PackedWeight | None:
        """With act-order the columns of a rank come from any group. It keeps codes only where they are whole groups."""
        weight: ZeroPointWeight | None = self._unpacked(read, part)
        if weight is not None and weight.order is not None and part.columns is not None:
            weight = weight.of_columns(part.columns)
        return None if weight is None else weight.fold()

    def _unpacked(self, read: Callable[[str], Tensor], part: Part) -> ZeroPointWeight:
        """Returns these rows and columns, but with act-order all columns: which of them a rank has is known when they are read."""
        unpack = unpack_awq if self.config.method == "awq" else unpack_gptq
        return unpack({name: read(name) for name in self.tensors}, self.name, self.config, part.rows, part.columns)


def find_packed(headers: Mapping[str, Header], config: QuantConfig) -> list[PackedModule]:
    """Returns all quantised modules. Each has been checked to be complete, with tensors of matching sizes."""
    names = [name.removesuffix(CODES) for name in headers if name.endswith(CODES)]
    if not names:
        raise LoadError(f"quantization_config says {config.method}, but there is no weight named *{CODES}")
    return [_module(headers, name, config) for name in names]


def _module(headers: Mapping[str, Header], name: str, config: QuantConfig) -> PackedModule:
    if f"{name}.weight" in headers:
        raise LoadError(f"{name} is there twice, as weight and as {CODES[1:]}")
    check = check_awq if config.method == "awq" else check_gptq
    layout = check(headers, name, config)
    tensors = [name + part for part in PARTS[config.method] if name + part in headers]
    return PackedModule(name, config, layout, tuple(tensors))
