"""A parser for GGUF headers with complete checks: nothing in the file is trusted.

    "GGUF" | version u32 | tensor count u64 | key count u64
    key count    x  key, value type u32, value
    tensor count x  name, number of dimensions u32, dimensions u64 (innermost first), kind u32, offset u64
    padding to the alignment | tensor data, every offset counted from here

The file is mapped, not read. Each count and length is compared with the remaining bytes, in Python's unbounded integers,
before anything is allocated for it, so a malicious file costs neither time nor memory: it ends in one `LoadError`.
"""

import mmap
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from octavo.errors import LoadError
from octavo.models.family import MAX_EXPERTS, Family, GGUFForm, Rules, of_expert
from octavo.models.gguf_keys import ROPE_FACTORS, GGUFKeys
from octavo.models.registry import families
from octavo.models.row_order import RowOrder

# GGML's tensor kinds by number: name, elements per group, bytes per group. All are listed, so that a refusal can name the kind.
KINDS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip

NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
BOOL, STRING, ARRAY = 7, 8, 9

MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, one letter, type, the shortest value
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
MAX_NAME_BYTES = 65535
MAX_HEADER_BYTES = 64 * 2**20  # several times any real one; a sparse file may have terabytes
MAX_STRING_BYTES = 4 * 2**20
MAX_ENTRIES = 2**16  # keys, and tensors
MAX_ARRAY_ELEMENTS = 2**22  # of all arrays together: many times any real vocabulary, to limit memory
MAX_ARRAY_DEPTH = 4
MAX_DIMS = 4
MAX_ROPE_FACTORS = 4096  # one for each pair of a head's dimensions
DEFAULT_ALIGNMENT, MIN_ALIGNMENT, MAX_ALIGNMENT = 32, 8, 2**20

MAX_LAYERS = 1024  # as in a config.json
SINGLE_ROW = ".ffn_gate_inp_shexp.weight"  # a matrix of one row, which is stored as a vector
OF_HEADS = (".attn_k_b.weight", ".attn_v_b.weight")  # matrices of all heads, which are stored as [heads, rows, columns]
CONVOLUTION = ".ssm_conv1d.weight"  # [channels, 1, width], which is stored as a matrix

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    name: str
    shape: tuple[int, ...]  # row-major as in torch: GGML's dimensions reversed
    kind: str
    offset: int  # from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    path: Path
    metadata: dict[str, Any]  # numbers, strings, booleans and lists of them
    tensors: dict[str, GGUFTensor]
    header_bytes: int


def read_gguf(path: Path) -> GGUFFile:
    """Parses and checks the header of a GGUF file. The tensor data is not touched."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise LoadError(f"{path}: not a GGUF file ({size} bytes)")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _HeaderReader(path, data).file()
    except OSError as error:
        raise LoadError(f"{path}: cannot be read ({error.strerror or error})") from error


def _shown(text: str) -> str:
    """Returns a name from the file for messages, shortened and on one line."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


class _HeaderReader:
    """Reads the mapped header sequentially. `need` checks the length before every read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.end = min(self.size, MAX_HEADER_BYTES)
        self.position = 0
        self.array_elements = 0

    def fail(self, reason: str) -> LoadError:
        return LoadError(f"{self.path}: {reason}")

    def need(self, num_bytes: int, what: str) -> None:
        left = self.end - self.position
        if num_bytes > left:
            raise self.fail(f"{what} needs {num_bytes} bytes but {left} are left in the {self.whole()}")

    def whole(self) -> str:
        return "file" if self.size <= MAX_HEADER_BYTES else f"{MAX_HEADER_BYTES // 2**20} MiB a header may have"

    def file(self) -> GGUFFile:
        if self.data[:4] != b"GGUF":
            raise self.fail(f"not a GGUF file (it starts with {self.data[:4]!r})")
        self.position = 4
        version = self.u32("version")
        if version not in (2, 3):
            raise self.fail(f"GGUF version {version} is not supported (2 and 3, little endian, are)")
        num_tensors, num_keys = self.u64("tensor count"), self.u64("key count")
        if max(num_tensors, num_keys) > MAX_ENTRIES:
            raise self.fail(f"a header of {num_keys} keys and {num_tensors} tensors (at most {MAX_ENTRIES} of each are allowed)")
        self.need(num_keys * MIN_KEY_BYTES + num_tensors * MIN_TENSOR_BYTES, f"a header of {num_keys} keys and {num_tensors} tensors")
        metadata = self.metadata(num_keys)
        alignment = self.alignment(metadata)
        declared = [self.tensor() for _ in range(num_tensors)]
        header_bytes = self.position
        tensors = self.placed(declared, start=-(-header_bytes // alignment) * alignment, alignment=alignment)
        return GGUFFile(self.path, metadata, tensors, header_bytes)

    # -- numbers and strings

    def u32(self, what: str) -> int:
        return int(self.unpack(_U32, what))

    def u64(self, what: str) -> int:
        return int(self.unpack(_U64, what))

    def unpack(self, layout: struct.Struct, what: str) -> Any:
        self.need(layout.size, what)
        (value,) = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return value

    def name(self, what: str) -> str:
        text = self.strings(1, f"the name of a {what}")[0]
        if not 1 <= len(text) <= MAX_NAME_BYTES:
            raise self.fail(f"the name of a {what} has {len(text)} characters (1 to {MAX_NAME_BYTES} are allowed)")
        return text

    def strings(self, count: int, what: str) -> list[str]:
        """Returns the next `count` strings. A vocabulary has 100,000 of them, so this loop dominates the time of reading a header."""
        data, end, position, length_of = self.data, self.end, self.position, _U64.unpack_from
        texts = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + length_of(data, position)[0]
                if position > end:
                    raise self.fail(f"{what}: a string of {position - start} bytes is longer than the {self.whole()}")
                if position - start > MAX_STRING_BYTES:
                    raise self.fail(f"{what}: a string of {position - start} bytes (at most {MAX_STRING_BYTES} are allowed)")
                texts.append(str(data[start:position], "utf-8"))
        except struct.error:
            raise self.fail(f"{what}: the file ends inside a string") from None
        except UnicodeDecodeError:
            raise self.fail(f"{what}: a string is not UTF-8") from None
        self.position = position
        return texts

    # -- keys and values

    def metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self.name("key")
            if key in found:
                raise self.fail(f"key {_shown(key)} occurs twice")
            found[key] = self.value(self.u32("a value type"), f"key {_shown(key)}", depth=0)
        return found

    def value(self, kind: int, what: str, depth: int) -> Any:
        if kind != ARRAY:
            return self.elements(kind, 1, what)[0]
        element_kind, count = self.u32(what), self.u64(what)
        self.array_elements += count
        if self.array_elements > MAX_ARRAY_ELEMENTS:
            raise self.fail(f"{what}: an array of {count} elements (all arrays together may have {MAX_ARRAY_ELEMENTS})")
        if element_kind != ARRAY:
            return self.elements(element_kind, count, what)
        if depth == MAX_ARRAY_DEPTH:
            raise self.fail(f"{what}: arrays nest deeper than {MAX_ARRAY_DEPTH}")
        return [self.value(ARRAY, what, depth + 1) for _ in range(count)]

    def elements(self, kind: int, count: int, what: str) -> list[Any]:
        if kind == STRING:
            self.need(8 * count, what)
            return self.strings(count, what)
        if kind == BOOL:
            return [bool(value) for value in self.numbers("u1", count, what)]
        if kind not in NUMBERS:
            raise self.fail(f"{what}: unknown value type {kind}")
        return self.numbers(NUMBERS[kind], count, what)

    def numbers(self, layout: str, count: int, what: str) -> list[Any]:
        dtype = np.dtype(layout)
        self.need(count * dtype.itemsize, what)
        values = np.frombuffer(self.data[self.position : self.position + count * dtype.itemsize], dtype)
        self.position += values.nbytes
        return list(values.tolist())

    def alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(value) is not int or not MIN_ALIGNMENT <= value <= MAX_ALIGNMENT or value & (value - 1):
            raise self.fail(f"general.alignment must be a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}, got {str(value)[:40]}")
        return value

    # -- tensors

    def tensor(self) -> GGUFTensor:
        """Returns one entry of the tensor list. Its offset is still relative to the data."""
        name = self.name("tensor")
        what = f"tensor {_shown(name)}"
        num_dims = self.u32(what)
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.fail(f"{what} has {num_dims} dimensions (1 to {MAX_DIMS} are allowed)")
        dims = [self.u64(what) for _ in range(num_dims)]
        number, offset = self.u32(what), self.u64(what)
        if number not in KINDS:
            raise self.fail(f"{what} is of unknown kind {number}")
        kind, group, group_bytes = KINDS[number]
        if 0 in dims or dims[0] % group:
            raise self.fail(f"{what} of kind {kind} has dimensions {dims}: rows must be whole groups of {group}, and none empty")
        return GGUFTensor(name, tuple(reversed(dims)), kind, offset, prod(dims) // group * group_bytes)

    def placed(self, declared: list[GGUFTensor], start: int, alignment: int) -> dict[str, GGUFTensor]:
        """Returns the tensors with offsets from the start of the file. Each must be inside the file, and none may overlap."""
        tensors: dict[str, GGUFTensor] = {}
        end = start
        for tensor in sorted(declared, key=attrgetter("offset")):
            what, offset = f"tensor {_shown(tensor.name)}", start + tensor.offset
            if tensor.name in tensors:
                raise self.fail(f"{what} occurs twice")
            if tensor.offset % alignment:
                raise self.fail(f"{what} lies at offset {tensor.offset}, not a multiple of the alignment {alignment}")
            if offset < end:
                raise self.fail(f"{what} at offset {tensor.offset} overlaps the tensor before it")
            end = offset + tensor.num_bytes
            if end > self.size:
                raise self.fail(f"{what} ends at byte {end} but the file has {self.size}")
            tensors[tensor.name] = replace(tensor, offset=offset)
        return tensors


def weights_in(tensor: GGUFTensor, name: str, source: str) -> dict[str, GGUFTensor]:
    """Returns the weights in a tensor by name: one, or one of every expert if `name` has a `*` for their numbers."""
    if "*" not in name:
        shape = tensor.shape
        if tensor.name.endswith(SINGLE_ROW) and len(shape) == 1:
            shape = (1, *shape)
        elif tensor.name.endswith(CONVOLUTION) and len(shape) == 2:
            shape = (shape[0], 1, shape[1])
        elif tensor.name.endswith(OF_HEADS) and len(shape) == 3:
            shape = (shape[0] * shape[1], shape[2])
        return {name: replace(tensor, shape=shape)}
    if len(tensor.shape) < 2 or tensor.shape[0] > MAX_EXPERTS or (Rules.layer(name) or 0) >= MAX_LAYERS:
        raise LoadError(f"{source}: {_shown(tensor.name)} has shape {list(tensor.shape)}, which is not a weight of each expert")
    count, size = tensor.shape[0], tensor.num_bytes // tensor.shape[0]
    each = [replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + expert * size, num_bytes=size) for expert in range(count)]
    return {of_expert(name, expert): one for expert, one in enumerate(each)}


# -- the equivalent of a config.json, by the family of the file's architecture


class GGUFModel(NamedTuple):
    """The family of a GGUF file, and the equivalent of its config.json."""

    family: Family
    config: dict[str, Any]
    orders: Mapping[str, RowOrder]  # see `GGUFForm`
    columns: Mapping[str, RowOrder]
    turned: Mapping[str, int]
    tensors: dict[str, GGUFTensor]  # of the model, without the layers that predict further tokens


def gguf_form(metadata: Mapping[str, Any], source: str) -> tuple[Family, GGUFForm, str]:
    """Returns the family of the file's architecture, its GGUF form, and the architecture."""
    parts, name = metadata.get("split.count", 1), metadata.get("general.architecture")
    if parts != 1:
        raise LoadError(f"{source}: is one of {reprlib.repr(parts)} parts of a split file; join them with llama-gguf-split --merge")
    forms = [(family, form) for family in families() if (form := family.gguf) is not None]
    known = dict.fromkeys(word for _, form in forms for word in form.architectures)
    if not isinstance(name, str) or name not in known:
        raise LoadError(f"{source}: general.architecture is {reprlib.repr(name)}; supported: {', '.join(known)}")
    fitting = [(family, form) for family, form in forms if name in form.architectures]
    experts = bool(metadata.get(f"{name}.expert_count"))  # dense models may use the same name
    return *next((one for one in fitting if one[1].experts == experts), fitting[0]), name


def rope_factors(gguf: GGUFFile) -> dict[str, list[float]]:
    """Returns the factors of rotary frequencies, which are tensors in the file but part of the config."""
    found = {}
    for name in ROPE_FACTORS:
        tensor = gguf.tensors.get(name)
        if tensor is None:
            continue
        if tensor.kind != "F32" or prod(tensor.shape) > MAX_ROPE_FACTORS:
            what = f"{name} is of kind {tensor.kind} and shape {list(tensor.shape)}"
            raise LoadError(f"{gguf.path}: {what}; it must be F32, and have at most {MAX_ROPE_FACTORS} numbers")
        with gguf.path.open("rb") as file:
            file.seek(tensor.offset)
            found[name] = np.frombuffer(file.read(tensor.num_bytes), "<f4").tolist()
    return found


def read_gguf_model(
    metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor], source: str, factors: Mapping[str, list[float]] | None = None
) -> GGUFModel:
    """`factors`: from `rope_factors`; None: only the header is available"""
    family, form, architecture = gguf_form(metadata, source)
    keys = GGUFKeys(metadata, {name: tensor.shape for name, tensor in tensors.items()}, architecture, source, factors)
    of_model = _of_model(tensors, keys)
    config = {"architectures": [form.architectures[architecture]], **form.config(keys), **keys.common()}
    columns = {} if form.columns is None else form.columns(architecture, config)
    turned = {} if form.turned is None else form.turned(architecture, config)
    return GGUFModel(family, config, form.orders(architecture, config), columns, turned, of_model)


def _of_model(tensors: Mapping[str, GGUFTensor], keys: GGUFKeys) -> dict[str, GGUFTensor]:
    """Returns the tensors of the model. Layers that predict further tokens, which have the last numbers, are left out."""
    further = range(keys.num_layers(), keys.integer("block_count"))
    if not further:
        return dict(tensors)
    layer_of = {name: Rules.layer(name) for name in tensors if name.startswith("blk.")}
    found = {name: tensor for name, tensor in tensors.items() if layer_of.get(name) not in further}
    if layer_of and layer_of.keys().isdisjoint(found):
        raise LoadError(f"{keys.source}: has only layers that predict further tokens, which are not supported; use the file of the model")
    return found


def config_dict(
    metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor], source: str, factors: Mapping[str, list[float]] | None = None
) -> dict[str, Any]:
    """Returns the equivalent of a config.json for this model."""
    return read_gguf_model(metadata, tensors, source, factors).config
