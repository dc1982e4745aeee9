"""Reads `quantization_config` of a config.json: AWQ, GPTQ or MXFP4, in the layouts that were published. No torch here: plans use it.

A number or layout that would be read wrongly is refused by name. Everything else, such as who made it, is ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import LoadError

METHODS = ("awq", "gptq", "mxfp4")
MXFP4_GROUP = 32
GROUPS = (128, 64, 32, 16)  # input columns that can share a scale in the packed form, largest first


@dataclass(frozen=True, slots=True)
class QuantConfig:
    method: str  # one of METHODS
    bits: int
    group_size: int  # input columns that share a scale; -1: all of them
    sym: bool = False  # GPTQ: codes are counted from the middle
    desc_act: bool = False  # GPTQ: g_idx says which group a column is in
    stored_minus_one: bool = False  # GPTQ's first format keeps zeros less one, gptq_v2 as they are
    modules_to_not_convert: tuple[str, ...] = ()

    def converts(self, module: str) -> bool:
        """Whether a linear layer of this name is quantised; a name that contains one of the exceptions is not."""
        return not any(part in module for part in self.modules_to_not_convert)


def read_quant_config(raw: Mapping[str, Any], source: str) -> QuantConfig | None:
    """Reads a whole config.json. Returns None if the model is not quantised."""
    if raw.get("compression_config") is not None:
        raise LoadError(f"{source}: compression_config is not supported; supported: quantization_config of {', '.join(METHODS)}")
    table = raw.get("quantization_config")
    if table is None:
        return None
    if not isinstance(table, dict):
        raise LoadError(f"{source}: quantization_config must be an object, got {repr(table)[:60]}")
    return _Table(table, source).read()


class _Table:
    def __init__(self, table: dict[str, Any], source: str) -> None:
        self.table = table
        self.source = source

    def fail(self, key: str, wanted: str) -> LoadError:
        shown = repr(self.table.get(key, "(missing)"))[:60]
        return LoadError(f"{self.source}: quantization_config.{key} is {shown}, supported: {wanted}")

    def value(self, key: str, default: object) -> object:
        value = self.table.get(key)
        return default if value is None else value

    def choice(self, key: str, values: tuple[str, ...], default: str | None = None) -> str:
        value = self.value(key, default)
        if not isinstance(value, str) or value.lower() not in values:
            raise self.fail(key, ", ".join(values))
        return value.lower()

    def integer(self, key: str, fits: Callable[[int], bool], wanted: str) -> int:
        value = self.table.get(key)
        if type(value) is not int or not fits(value):
            raise self.fail(key, wanted)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, "true, false")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        value = self.table.get(key) or []
        if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
            raise self.fail(key, "a list of names")
        return tuple(value)

    def read(self) -> QuantConfig:
        method = self.choice("quant_method", METHODS)
        if method == "mxfp4":  # experts alone, by the names of their tensors
            return QuantConfig(method, bits=4, group_size=MXFP4_GROUP, modules_to_not_convert=self.names("modules_to_not_convert"))
        return self.awq() if method == "awq" else self.gptq()

    def awq(self) -> QuantConfig:
        self.choice("version", ("gemm",), default="gemm")
        if not self.flag("zero_point", True):
            raise self.fail("zero_point", "true")
        return QuantConfig(
            method="awq",
            bits=self.integer("bits", lambda bits: bits == 4, "4"),
            group_size=self.group_size(),
            modules_to_not_convert=self.names("modules_to_not_convert"),
        )

    def gptq(self) -> QuantConfig:
        if self.table.get("dynamic"):
            raise self.fail("dynamic", "the same bits and groups in all modules")
        return QuantConfig(
            method="gptq",
            bits=self.integer("bits", lambda bits: bits in (4, 8), "4, 8"),
            group_size=self.group_size(),
            sym=self.flag("sym", True),
            desc_act=self.flag("desc_act", False),
            stored_minus_one=self.choice("checkpoint_format", ("gptq", "gptq_v2"), default="gptq") == "gptq",
            modules_to_not_convert=self.names("modules_to_not_convert"),
        )

    def group_size(self) -> int:
        return self.integer("group_size", lambda size: size == -1 or 0 < size < 2**31, "-1 or a number of columns")


def whole_group(name: str, group_size: int, columns: int) -> int:
    """Returns the largest of `GROUPS` that divides both a published group and a row of that many columns."""
    for group in GROUPS:
        if group_size % group == 0 and columns % group == 0:
            return group
    raise LoadError(f"{name}: groups of {group_size} in rows of {columns} are not made of groups of {' or '.join(map(str, GROUPS))}")
