"""Weights by name, from any storage: a folder of safetensors or a GGUF file, behind one small protocol.

Names are Hugging Face's (`model.embed_tokens.weight`). Files are mapped, and a tensor is read on demand. All information in
headers is checked when the checkpoint is opened.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.errors import ConfigError, LoadError
from octavo.kernels.cpu.gguf_blocks import BLOCK_KINDS
from octavo.kernels.cpu.packing import Blocks
from octavo.kernels.reference.dequant import DENSE, QUANTISED, SUPPORTED_KINDS, dequantize
from octavo.loading.files import INDEX, SINGLE, fingerprint, no_model_folder, read_weight_map
from octavo.loading.gguf import GGUFFile, GGUFTensor, read_gguf_model, rope_factors, weights_in
from octavo.loading.mapped_file import MappedFile
from octavo.loading.packed_modules import Header, PackedModule, cut, find_packed, part_dtype
from octavo.models.family import parts_of_gguf
from octavo.models.gguf_keys import ROPE_FACTORS
from octavo.models.row_order import RowOrder, in_file
from octavo.models.split import Part
from octavo.quant.fp8 import Quantised
from octavo.quant.packed import PackedWeight, fold_gguf
from octavo.quant.quant_config import OF_CACHE, QuantConfig

WHOLE = Part()
MAX_HEADER_BYTES = 32 * 2**20  # 250,000 weights in one file; the library would accept 100 MB


class Checkpoint(Protocol):
    source: str

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor:
        """Returns a dense tensor, in the float type of the file, or in float32 if it was quantised. It may be a view of the file."""
        ...

    def packed(self, name: str) -> Quantised | None:
        """Returns a quantised matrix, as integers or 8-bit floats, or None if it is stored as wider floats."""

    def fingerprint(self) -> bytes: ...


class FileCheckpoint(Checkpoint, Protocol):
    """Weights that can be read in parts, for ranks that share a model (`models/split.py`)."""

    def check_part(self, name: str, part: Part) -> None:
        """Refuses a part that cannot be read separately. No matrix is read."""

    def read_part(self, name: str, part: Part) -> Tensor:
        """Returns a part of the result of `read`."""
        ...

    def packed_part(self, name: str, part: Part) -> Quantised | None:
        """Returns a part of the result of `packed`, or None if it must be dequantised."""


def _listed(names: set[str]) -> str:
    """Returns names for a message: the first few, and the number of the others."""
    first = ", ".join(name[:80] for name in sorted(names)[:5])
    return first if len(names) <= 5 else f"{first} and {len(names) - 5} more"


# -- a folder of safetensors


class SafetensorsCheckpoint:
    """A Hugging Face folder: one model.safetensors, or shards and an index with the shard of each weight.

    With a `quantization_config`, the tensors of a quantised module represent a single weight.
    """

    def __init__(self, folder: Path, quantization: QuantConfig | None = None) -> None:
        self.source = str(folder)
        if (folder / INDEX).exists():
            self._files = self._open_shards(folder, quantization)
        elif (folder / SINGLE).exists():
            self._files = [_SafetensorsFile(_inside(folder, SINGLE), quantization)]
        elif any(path.suffix in (".bin", ".pt", ".pth") for path in folder.iterdir()):
            raise LoadError(f"{folder}: has only pickled weights, which can run code; convert them to {SINGLE} (save_pretrained does)")
        else:
            raise no_model_folder(folder)
        self._file_of = {name: file for file in self._files for name in file.headers}
        in_stacks = quantization is not None and quantization.method == "mxfp4"  # `loading/views.py` reads these
        self._packed = {} if quantization is None or in_stacks else self._find_packed(quantization)
        of_modules = {tensor: name for name, module in self._packed.items() for tensor in module.tensors}
        of_cache = OF_CACHE if quantization is not None else ()
        self._names = list(dict.fromkeys(of_modules.get(name, name) for name in self._file_of if not name.endswith(of_cache)))

    def _find_packed(self, quantization: QuantConfig) -> dict[str, PackedModule]:
        headers = {name: file.headers[name] for name, file in self._file_of.items()}
        with self._named():
            return {f"{module.name}.weight": module for module in find_packed(headers, quantization)}

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Prepends the folder's name to errors about its tensors."""
        try:
            yield
        except LoadError as error:
            raise LoadError(f"{self.source}: {str(error)[:500]}") from None  # names may be of any length

    @staticmethod
    def _open_shards(folder: Path, quantization: QuantConfig | None) -> list["_SafetensorsFile"]:
        placed: dict[str, set[str]] = defaultdict(set)
        for name, shard in read_weight_map(folder / INDEX).items():
            placed[shard].add(name)
        paths = {shard: _inside(folder, shard) for shard in sorted(placed)}
        files = []
        for shard, path in paths.items():
            file, promised = _SafetensorsFile(path, quantization), placed[shard]
            if missing := promised - file.headers.keys():
                raise LoadError(f"{file.path}: lacks weights that {INDEX} lists for it: {_listed(missing)}")
            if extra := file.headers.keys() - promised:
                raise LoadError(f"{file.path}: has weights that {INDEX} does not list for it: {_listed(extra)}")
            files.append(file)
        return files

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._packed:
            return self._packed[name].layout.n, self._packed[name].layout.k
        return self._file_of[name].headers[name].shape

    def read(self, name: str) -> Tensor:
        return self.read_part(name, WHOLE)

    def packed(self, name: str) -> Quantised | None:
        return self.packed_part(name, WHOLE)

    def check_part(self, name: str, part: Part) -> None:
        if name in self._packed:
            self._packed[name].check(part)

    def read_part(self, name: str, part: Part) -> Tensor:
        if name not in self._packed:
            return cut(self._stored(name), part)
        with self._named():
            return self._packed[name].floats(self._stored, part)

    def packed_part(self, name: str, part: Part) -> Quantised | None:
        if name not in self._packed:
            return None
        with self._named():
            return self._packed[name].codes(self._stored, part)

    def _stored(self, name: str) -> Tensor:
        """Returns a view of the file."""
        return self._file_of[name].read(name)

    def fingerprint(self) -> bytes:
        return fingerprint([(file.path, file.header_bytes) for file in self._files])


def _inside(folder: Path, name: str) -> Path:
    """Returns the path of a weight file, which must be a plain name of a file inside the model, also after following links."""
    path = folder / name
    homes = [folder.resolve()]
    if homes[0].parent.name == "snapshots":  # in the hub cache, models--x--y/snapshots/<commit>/<name> links to models--x--y/blobs/<digest>
        repo = homes[0].parent.parent
        homes.append(repo / "blobs")
        if repo.name.startswith("models--"):  # and that links to <cache>/blobs/ab/<digest> for files that several repositories share
            homes.append(repo.parent / "blobs")
    try:
        inside = Path(name).name == name and any(path.resolve().is_relative_to(home) for home in homes)
        found = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL or invalid Unicode in it, a link to itself
        raise LoadError(f"{folder}: weight file {name[:80]!r} cannot be looked up ({type(error).__name__})") from error
    if not name or not inside:
        raise LoadError(f"{folder}: weight file {name[:80]!r} leads out of the model folder")
    if not found:
        raise LoadError(f"{path}: not found")
    return path


def _map(path: Path) -> Any:  # the library is not annotated
    return safe_open(path, framework="pt", device="cpu")


class _SafetensorsFile:
    """One mapped file. The library checks the header (sizes, overlaps, dtypes); its errors are raised as `LoadError`."""

    def __init__(self, path: Path, quantization: QuantConfig | None) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.header_bytes = 8 + int.from_bytes(file.read(8), "little")
            if self.header_bytes > MAX_HEADER_BYTES:
                raise LoadError(f"{path}: declares a header of {self.header_bytes - 8} bytes, at most {MAX_HEADER_BYTES} are allowed")
            self._open = _map(path)
            views = {name: self._open.get_slice(name) for name in self._open.offset_keys()}
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{path}: not a valid safetensors file ({error})") from error
        self.headers = {name: self._header(name, view, quantization) for name, view in views.items()}

    def _header(self, name: str, view: Any, quantization: QuantConfig | None) -> Header:
        """Accepts floats, and other dtypes only for parts of a quantised module."""
        stored, shape = view.get_dtype(), tuple(view.get_shape())
        dtype = None if quantization is None else part_dtype(name, stored, quantization)
        if dtype is not None:
            return Header(dtype, shape)
        if stored not in DENSE:
            raise LoadError(f"{self.path}: weight {name[:80]} is stored as {stored}; supported: {', '.join(DENSE)}")
        return Header(DENSE[stored], shape)

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._open.get_tensor(name)
        return tensor


# -- a GGUF file


def _part(tensor: GGUFTensor) -> str:
    """Returns attn_q for blk.0.attn_q.weight."""
    return parts_of_gguf(tensor.name)[0].rpartition(".")[2]


class GGUFCheckpoint:
    """A GGUF file under Hugging Face names. Without `output.weight` the head is tied to the embedding."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.source = str(gguf.path)
        self._gguf = gguf
        self._file = MappedFile(gguf.path)
        self._model = read_gguf_model(gguf.metadata, gguf.tensors, self.source, rope_factors(gguf))
        self._tensor_of = self._by_hf_name()
        self._check_orders()

    def _by_hf_name(self) -> dict[str, GGUFTensor]:
        found: dict[str, GGUFTensor] = {}
        unknown = set()
        for tensor in self._model.tensors.values():
            if tensor.kind not in SUPPORTED_KINDS:
                supported = ", ".join(SUPPORTED_KINDS)
                raise LoadError(f"{self.source}: tensor {tensor.name[:80]!r} is of kind {tensor.kind}; supported: {supported}")
            name = self._model.family.rules.of_gguf(tensor.name)
            if name is not None:
                found |= weights_in(tensor, name, self.source)
            elif tensor.name not in ROPE_FACTORS:
                unknown.add(repr(tensor.name[:80]))
        if unknown:
            raise LoadError(f"{self.source}: has tensors that no {self._model.family.name} model has: {_listed(unknown)}")
        return found

    def _check_orders(self) -> None:
        for tensor in self._tensor_of.values():
            order = self._order(tensor)
            if order is not None and not order.fits(tensor.shape[0]):
                rows = f"{tensor.shape[0]} rows, not an even number for each of {order.heads} heads"
                raise LoadError(f"{self.source}: {tensor.name} has {rows}")
            columns = self._model.columns.get(_part(tensor))
            if columns is not None and not (len(tensor.shape) == 2 and columns.fits(tensor.shape[1])):
                raise LoadError(f"{self.source}: {tensor.name} has shape {list(tensor.shape)}, which is not one of whole heads")
            heads = self._model.turned.get(_part(tensor))
            if heads is not None and (len(tensor.shape) != 2 or tensor.shape[0] % heads):
                what = f"{self.source}: {tensor.name} has shape {list(tensor.shape)}"
                raise LoadError(f"{what}, which is not a matrix of each of {heads} heads")

    def names(self) -> list[str]:
        return list(self._tensor_of)

    def shape(self, name: str) -> tuple[int, ...]:
        tensor = self._tensor_of[name]
        heads = self._model.turned.get(_part(tensor))
        return tensor.shape if heads is None else (tensor.shape[1] * heads, tensor.shape[0] // heads)

    def read(self, name: str) -> Tensor:
        return self.read_part(name, WHOLE)

    def packed(self, name: str) -> PackedWeight | None:
        return self.packed_part(name, WHOLE)

    def check_part(self, name: str, part: Part) -> None:
        tensor = self._tensor_of[name]
        if _part(tensor) in self._model.turned:
            return
        if tensor.kind not in DENSE and part.columns is not None and _part(tensor) not in self._model.columns:
            self._in_groups(tensor, part.columns)

    def read_part(self, name: str, part: Part) -> Tensor:
        tensor = self._tensor_of[name]
        if (heads := self._model.turned.get(_part(tensor))) is not None:
            return cut(self._dense(tensor).unflatten(0, (heads, -1)).transpose(1, 2).flatten(0, 1), part)
        columns = self._columns(tensor, part)
        part, places = self._in_file(tensor, part)
        dense = self._dense(tensor, part)
        if plus := self._model.family.rules.plus(name):  # the file already includes it, but a checkpoint returns what a folder contains
            dense = dense.float() - plus
        if self._model.family.rules.negative_exp(name):
            dense = (-dense.float()).log()
        dense = dense if columns is None else dense[:, columns]
        return dense if places is None else dense[places]

    def packed_part(self, name: str, part: Part) -> PackedWeight | None:
        tensor = self._tensor_of[name]
        if tensor.kind in DENSE or _part(tensor) in self._model.turned:
            return None
        columns = self._columns(tensor, part)
        part, places = self._in_file(tensor, part)
        raw, shape = self._quantised(tensor, part)
        weight = fold_gguf(raw, tensor.kind, shape, f"{self.source}: {tensor.name}")
        if columns is not None:
            return weight.columns(columns)
        return weight if places is None else weight.rows(places)

    def blocks(self, name: str) -> Blocks | None:
        """Returns a quantised matrix in the format of the file, if the native library supports such blocks."""
        tensor = self._tensor_of[name]
        other_order = _part(tensor) in self._model.turned or self._columns(tensor) is not None
        if tensor.kind not in BLOCK_KINDS or len(tensor.shape) != 2 or other_order:
            return None
        n, k = tensor.shape
        order = self._order(tensor)
        rows = None if order is None else order.places(n)
        return Blocks(f"{self.source}: {tensor.name}", self._bytes(tensor).numpy(), tensor.kind, (n, k), rows)

    def _order(self, tensor: GGUFTensor) -> RowOrder | None:
        return self._model.orders.get(_part(tensor))

    def _columns(self, tensor: GGUFTensor, part: Part = WHOLE) -> Tensor | None:
        """Returns the column of the file for each column of the part; None: in the order of the file. All columns are read."""
        order = self._model.columns.get(_part(tensor))
        if order is None:
            return None
        places = torch.from_numpy(order.places(tensor.shape[1]))
        return places if part.columns is None else places[part.columns.start : part.columns.stop]

    def _in_file(self, tensor: GGUFTensor, part: Part) -> tuple[Part, Tensor | None]:
        """Returns the part of the file that has these rows, and where each of them is in it; None: in the order of the file"""
        order = self._order(tensor)
        if _part(tensor) in self._model.columns:
            part = Part(part.rows)
        if order is None:
            return part, None
        rows, places = in_file(order, tensor.shape[0], part.rows)
        return Part(rows, part.columns), torch.from_numpy(places)

    def _bytes(self, tensor: GGUFTensor) -> Tensor:
        return self._file.bytes(tensor.offset, tensor.num_bytes)

    def _dense(self, tensor: GGUFTensor, part: Part = WHOLE) -> Tensor:
        if tensor.kind in DENSE:
            return cut(self._bytes(tensor).view(DENSE[tensor.kind]).view(tensor.shape), part)
        if len(tensor.shape) == 1:  # a group contains several of its numbers
            return cut(dequantize(self._bytes(tensor), tensor.kind, tensor.shape), part)
        raw, shape = self._quantised(tensor, part)
        return dequantize(raw, tensor.kind, shape)

    def _quantised(self, tensor: GGUFTensor, part: Part) -> tuple[Tensor, tuple[int, ...]]:
        """Returns the bytes of the part, and its shape. Rows are a view of the file; columns are copied from each row."""
        if part == WHOLE:
            return self._bytes(tensor), tensor.shape
        (n, k), group_bytes = tensor.shape, QUANTISED[tensor.kind][0]
        rows, columns = part.rows or range(n), part.columns or range(k)
        groups = self._bytes(tensor).view(n, -1, group_bytes)
        return cut(groups, Part(rows, self._in_groups(tensor, columns))).reshape(-1), (len(rows), len(columns))

    def _in_groups(self, tensor: GGUFTensor, columns: range) -> range:
        """Returns the groups of these columns. Refuses columns that are not whole groups."""
        k, group = tensor.shape[-1], prod(tensor.shape) * QUANTISED[tensor.kind][0] // tensor.num_bytes
        if columns.start % group or columns.stop % group:
            what = f"{self.source}: {tensor.name}: {k} columns in groups of {group}"
            raise ConfigError(f"{what} cannot be split over tensor_parallel_size {k // len(columns)}: {len(columns)} are not whole groups")
        return range(columns.start // group, columns.stop // group)

    def fingerprint(self) -> bytes:
        return fingerprint([(self._gguf.path, self._gguf.header_bytes)])
