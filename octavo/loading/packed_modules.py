"""Modules of an AWQ or GPTQ folder. Each has several tensors, which the other code sees as one weight.

    model.layers.0.mlp.up_proj.qweight  .qzeros  .scales  .g_idx      ->  model.layers.0.mlp.up_proj.weight

The names of the tensors say which modules are quantised, and `quantization_config` says how. Sizes are checked from headers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.quant.quant_config import QuantConfig
from octavo.quant.zero_point import ZeroPointWeight, check_awq, check_gptq, unpack_awq, unpack_gptq

CODES = ".qweight"
PARTS = {"awq": (CODES, ".qzeros", ".scales"), "gptq": (CODES, ".qzeros", ".scales", ".g_idx")}
WHOLE_NUMBERS = (CODES, ".qzeros", ".g_idx")  # the parts that are int32


class Header(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackedModule:
    name: str
    config: QuantConfig
    shape: tuple[int, int]
    tensors: tuple[str, ...]  # the first of them are the codes

    def read(self, read: Callable[[str], Tensor]) -> ZeroPointWeight:
        unpack = unpack_awq if self.config.method == "awq" else unpack_gptq
        return unpack({name: read(name) for name in self.tensors}, self.name, self.config)


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
    return PackedModule(name, config, (layout.n, layout.k), tuple(tensors))
