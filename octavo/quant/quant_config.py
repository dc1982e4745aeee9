"""Reads `quantization_config` of a config.json: AWQ, GPTQ, FP8, MXFP4 and compressed-tensors, in their published layouts.

A number or layout that would be misread is refused by name. Everything else, such as its author or the rounding of activations,
is ignored. It uses no torch, because plans use it.
"""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import LoadError
from octavo.kernels.kernel_shapes import FP8_BLOCK

METHODS = ("awq", "gptq", "fp8", "mxfp4", "compressed-tensors")
MXFP4_GROUP = 32
STACKED_CODES = ("_blocks", "_scales")  # suffixes of tensors with the MXFP4 codes of all experts
GROUPS = (128, 64, 32, 16)  # input columns that can share a scale in the packed form, largest first
FP8_GROUP = 32  # maximum columns that share a scale when 8-bit floats are converted to integers

# The tensors of a module in each layout. The first one contains the codes.
PARTS = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "words": ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "input_scale", "input_zero_point"),
    "bytes": ("weight", "weight_scale", "weight_zero_point", "input_scale", "input_zero_point"),
    "fp8": ("weight", "weight_scale", "weight_scale_inv", "input_scale"),
    "mxfp4": STACKED_CODES,
}
# Layout -> dtype in a file -> parts of a module with that dtype, if it is not a usual float
WHOLE_NUMBERS: dict[str, dict[str, tuple[str, ...]]] = {
    "awq": {"I32": ("qweight", "qzeros")},
    "gptq": {"I32": ("qweight", "qzeros", "g_idx")},
    "words": {
        "I32": ("weight_packed", "weight_zero_point", "weight_g_idx", "weight_shape"),
        "I8": ("weight_zero_point", "input_zero_point"),
        "I64": ("weight_shape",),
    },
    "bytes": {"I8": ("weight", "weight_zero_point", "input_zero_point")},
    "fp8": {"F8_E4M3": ("weight",)},
    "mxfp4": {},
}
OF_CACHE = (".k_scale", ".v_scale")  # of a KV cache in FP8, which is not supported


@dataclass(frozen=True, slots=True)
class QuantConfig:
    method: str  # one of METHODS
    bits: int
    group_size: int  # input columns that share a scale; -1: all of them
    sym: bool = False  # codes are relative to the middle
    desc_act: bool = False  # g_idx contains the group of each column
    stored_minus_one: bool = False  # GPTQ's first format stores zeros minus one, gptq_v2 stores them unchanged
    block: tuple[int, int] | None = None  # FP8: rows and columns that share a scale; None: a row, or the whole matrix
    modules_to_not_convert: tuple[str, ...] = ()
    form: str = ""  # compressed-tensors: its layout: words, bytes or fp8

    @property
    def layout(self) -> str:
        """The layout of its tensors: one of PARTS."""
        return self.form or self.method

    def converts(self, module: str) -> bool:
        """Whether a linear layer of this name is quantised; a name that contains one of the exceptions is not."""
        return not any(_found(part, module) for part in self.modules_to_not_convert)

    def fp8_span(self, columns: int) -> int:
        """Returns how many columns of a row share a scale, if these are 8-bit floats with scales that GPU kernels support; otherwise 0."""
        if self.layout != "fp8":
            return 0
        if self.block is None or self.block[1] >= columns:
            return columns
        return FP8_BLOCK if self.block == (FP8_BLOCK, FP8_BLOCK) else 0

    @property
    def codes_part(self) -> str:
        return PARTS[self.layout][0]

    @property
    def shown(self) -> str:
        """The short name of such weights: AWQ, GPTQ, FP8, INT8, W4A16."""
        if self.layout == "words":
            return f"W{self.bits}A16"
        return "INT8" if self.layout == "bytes" else self.layout.upper()

    def is_codes(self, stored: str, part: str) -> bool:
        """Whether a tensor that is `part` of a module, stored as this dtype, contains codes. Further checks follow later."""
        return part == self.codes_part and (part != "weight" or stored in WHOLE_NUMBERS[self.layout])


def _found(exception: str, module: str) -> bool:
    """Whether a module is an exception. In a pattern (`re:.*gate$`) only .* and $ are supported: no regular expression of a file is run."""
    if not exception.startswith("re:"):
        return exception in module
    place = 0
    pieces = exception.removeprefix("re:").replace("\\", "").split(".*")
    for piece in pieces:
        found = module.find(piece.removesuffix("$"), place)
        if found < 0:
            return False
        place = found + len(piece)
    return not pieces[-1].endswith("$") or module.endswith(pieces[-1].removesuffix("$"))


def read_quant_config(raw: Mapping[str, Any], source: str) -> QuantConfig | None:
    """Reads a whole config.json. Returns None if the model is not quantised."""
    older = raw.get("compression_config")  # the former name in compressed-tensors
    table = raw.get("quantization_config") if older is None else older
    if table is None:
        return None
    if not isinstance(table, dict):
        raise LoadError(f"{source}: quantization_config must be an object, got {repr(table)[:60]}")
    return _Table(table if older is None else table | {"quant_method": "compressed-tensors"}, source).read()


class _Table:
    def __init__(self, table: dict[str, Any], source: str, path: str = "") -> None:
        """`path`: to the table in `quantization_config`, for messages"""
        self.table = table
        self.source = source
        self.path = path

    def fail(self, key: str, wanted: str) -> LoadError:
        shown = repr(self.table.get(key, "(missing)"))[:60]
        return LoadError(f"{self.source}: quantization_config.{self.path}{key} is {shown}, supported: {wanted}")

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
        readers = {"awq": self.awq, "gptq": self.gptq, "fp8": self.fp8, "mxfp4": self.mxfp4, "compressed-tensors": self.compressed}
        return readers[self.choice("quant_method", METHODS)]()

    def mxfp4(self) -> QuantConfig:
        """Only experts, by the names of their tensors (`loading/views.py`)."""
        return QuantConfig("mxfp4", bits=4, group_size=MXFP4_GROUP, modules_to_not_convert=self.names("modules_to_not_convert"))

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
        return QuantConfig(
            method="gptq",
            bits=self.integer("bits", lambda bits: bits in (4, 8), "4, 8"),
            group_size=self.group_size(),
            sym=self.flag("sym", True),
            desc_act=self.flag("desc_act", False),
            stored_minus_one=self.choice("checkpoint_format", ("gptq", "gptq_v2"), default="gptq") == "gptq",
            modules_to_not_convert=self.names("modules_to_not_convert") + self.dynamic_exceptions(),
        )

    def dynamic_exceptions(self) -> tuple[str, ...]:
        """Returns the modules that `dynamic` leaves as floats: {"-:.*attn.*": {}}. Other patterns may only repeat the common settings."""
        rules = self.value("dynamic", {})
        if not isinstance(rules, dict):
            raise self.fail("dynamic", "an object")
        own = ("bits", "group_size", "sym", "desc_act")
        for pattern, values in rules.items():
            known = isinstance(values, dict) and all(key in own and value == self.table.get(key) for key, value in values.items())
            if not pattern.startswith("-:") and not known:
                raise LoadError(
                    f"{self.source}: quantization_config.dynamic has {reprlib.repr(values)} for {pattern[:60]!r}, "
                    "supported: modules in floats (-:), and the same bits and groups in all others"
                )
        return tuple(f"re:{pattern.removeprefix('-:')}" for pattern in rules if pattern.startswith("-:"))

    def fp8(self) -> QuantConfig:
        self.choice("fmt", ("e4m3",), default="e4m3")
        self.choice("activation_scheme", ("dynamic", "static"), default="dynamic")
        exceptions = self.names("modules_to_not_convert") + self.names("ignored_layers")
        return QuantConfig("fp8", 8, -1, sym=True, block=self.block("weight_block_size"), modules_to_not_convert=exceptions)

    def block(self, key: str) -> tuple[int, int] | None:
        value = self.table.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and 0 < size < 2**31 for size in value):
            raise self.fail(key, "two numbers, of rows and of columns")
        return value[0], value[1]

    def group_size(self) -> int:
        return self.integer("group_size", lambda size: size == -1 or 0 < size < 2**31, "-1 or a number of columns")

    # -- compressed-tensors: one group of settings for all its modules, in `config_groups`

    def compressed(self) -> QuantConfig:
        for key in ("sparsity_config", "transform_config"):
            if (value := self.table.get(key)) and not (isinstance(value, dict) and value.get("format") == "dense"):
                raise self.fail(key, "none")
        groups = self.table.get("config_groups")
        if not isinstance(groups, dict) or len(groups) != 1 or not all(isinstance(group, dict) for group in groups.values()):
            raise self.fail("config_groups", "one group of settings")
        (name, group), form = next(iter(groups.items())), self.table.get("format")
        settings = _Table({"format": form} | group, self.source, f"config_groups.{name[:40]}.")
        return settings.compressed_group(self.names("ignore"))

    def compressed_group(self, exceptions: tuple[str, ...]) -> QuantConfig:
        form = self.choice("format", ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"))
        if not isinstance(self.table.get("weights"), dict):
            raise self.fail("weights", "an object")
        weights = _Table(self.table["weights"], self.source, f"{self.path}weights.")
        floats = weights.choice("type", ("int", "float"), default="int") == "float"
        if floats != (form == "float-quantized") and form != "naive-quantized":
            raise weights.fail("type", f"what its format {form} has")
        layout = "fp8" if floats else "words" if form == "pack-quantized" else "bytes"
        return weights.compressed_weights(layout, exceptions)

    def compressed_weights(self, layout: str, exceptions: tuple[str, ...]) -> QuantConfig:
        allowed = (4, 8) if layout == "words" else (8,)
        bits = self.integer("num_bits", lambda bits: bits in allowed, ", ".join(map(str, allowed)))
        strategies = ("tensor", "channel", "block") if layout == "fp8" else ("tensor", "channel", "group")
        strategy = self.choice("strategy", strategies)
        symmetric = self.flag("symmetric", True)
        if layout == "fp8" and not symmetric:
            raise self.fail("symmetric", "true")
        ordered = self.choice("actorder", ("group", "weight", "static", "dynamic"), default="weight") in ("group", "dynamic")
        block = self.block("block_structure") if strategy == "block" else None
        if strategy == "block" and block is None:
            raise self.fail("block_structure", "two numbers, of rows and of columns")
        return QuantConfig(
            method="compressed-tensors",
            form=layout,
            bits=bits,
            group_size=self.group_size() if strategy == "group" else -1,
            sym=symmetric,
            desc_act=ordered and layout == "words",
            block=block,
            modules_to_not_convert=exceptions,
        )


def whole_group(name: str, group_size: int, columns: int) -> int:
    """Returns the largest of `GROUPS` that divides both a published group and a row of that many columns."""
    for group in GROUPS:
        if group_size % group == 0 and columns % group == 0:
            return group
    raise LoadError(f"{name}: groups of {group_size} in rows of {columns} are not made of groups of {' or '.join(map(str, GROUPS))}")
