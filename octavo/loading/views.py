"""Presents the weights of files as a model wants them: under its names, one for each expert, with rows in its order.

    under_rules   weights under the names of the family's rules; those without such a name are hidden
    unstacked     one weight per expert, where a folder has one tensor for all experts
    taken_apart   one weight per module, where a file has one that holds rows of several
    reordered     projections with their rows in the order of the model

All of them leave data where it is until a weight is read.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError, LoadError
from octavo.kernels.cpu.packing import Blocks
from octavo.kernels.reference.dequant import FP4_MIDDLE, FP4_TABLE
from octavo.loading.checkpoint import WHOLE, Checkpoint, FileCheckpoint, GGUFCheckpoint
from octavo.loading.packed_modules import cut
from octavo.model_config import ModelConfig
from octavo.models.family import MAX_EXPERTS, Rules, Stack, of_expert
from octavo.models.registry import family_of
from octavo.models.row_order import RowOrder, in_file
from octavo.models.split import Part
from octavo.quant.fp8 import Quantised
from octavo.quant.packed import PackedWeight, pack
from octavo.quant.quant_config import MXFP4_GROUP, STACKED_CODES

BIAS, (BLOCKS, SCALES) = "_bias", STACKED_CODES
ONE_HALF = 128  # the exponent for a factor of one on the doubled numbers of FP4_TABLE

# -- names: a model for text and images has its text part under a prefix, and shows it like a text-only model


def under_rules(stored: FileCheckpoint, rules: Rules) -> FileCheckpoint:
    if not rules.renames or isinstance(stored, GGUFCheckpoint):  # which has names of the rules
        return stored
    found: dict[str, str] = {}
    for name in stored.names():
        shown = rules.of_checkpoint(name)
        if shown in found:
            raise LoadError(f"{stored.source}: {name[:200]} and {found[shown][:200]} are the same weight")
        if shown is not None:
            found[shown] = name
    return RenamedCheckpoint(stored, found)


class RenamedWeights:
    def __init__(self, stored: Checkpoint, stored_name: Mapping[str, str]) -> None:
        """`stored_name`: stored name by visible name"""
        self.source = stored.source
        self._whole = stored
        self._stored_name = stored_name

    def names(self) -> list[str]:
        return list(self._stored_name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._whole.shape(self._stored_name[name])

    def read(self, name: str) -> Tensor:
        return self._whole.read(self._stored_name[name])

    def packed(self, name: str) -> Quantised | None:
        return self._whole.packed(self._stored_name[name])

    def fingerprint(self) -> bytes:
        return self._whole.fingerprint()


class RenamedCheckpoint(RenamedWeights):
    """The same for files: parts of weights can be read, too."""

    def __init__(self, stored: FileCheckpoint, stored_name: Mapping[str, str], mark: bytes = b"") -> None:
        """`mark`: changes the digest if these are not all weights"""
        super().__init__(stored, stored_name)
        self._stored = stored
        self._mark = mark

    def check_part(self, name: str, part: Part) -> None:
        self._stored.check_part(self._stored_name[name], part)

    def read_part(self, name: str, part: Part) -> Tensor:
        return self._stored.read_part(self._stored_name[name], part)

    def packed_part(self, name: str, part: Part) -> Quantised | None:
        return self._stored.packed_part(self._stored_name[name], part)

    def fingerprint(self) -> bytes:
        whole = super().fingerprint()
        return hashlib.blake2b(whole + self._mark, digest_size=32).digest() if self._mark else whole


# -- experts that a folder stores in one tensor for all of them
#
#     NAME          [experts, columns, rows]                 floats; in some families [experts, rows, columns]
#     NAME_blocks   [experts, rows, columns / 32, 16] uint8  MXFP4: two 4-bit codes per byte, the first in the lower half
#     NAME_scales   [experts, rows, columns / 32] uint8      and the exponents of their scales, with a bias of 127
#     NAME_bias     [experts, rows]
#
# Rows of several parts alternate: gate 0, up 0, gate 1, up 1, ..., or those of one part are after those of the other. `Stack`
# (`models/family.py`) lists such tensors of a family.


def unstacked(stored: FileCheckpoint, config: ModelConfig) -> FileCheckpoint:
    """Returns a checkpoint with one weight per expert, for any format of the files."""
    rules, found = family_of(config).rules, {}
    for name in stored.names():
        tensor = next((name.removesuffix(end) for end in (BIAS, BLOCKS, SCALES) if name.endswith(end)), name)
        stack = rules.stacked(tensor)
        if stack is not None and (rules.layer(tensor) or 0) < config.num_layers:  # the loader refuses other layers
            found[tensor] = stack
    return UnstackedCheckpoint(stored, found) if found else stored


class _Place(NamedTuple):
    """The location of an expert's weight."""

    tensor: str  # without the suffix of blocks and scales
    expert: int
    turn: int  # its rows are this one, and every `turns`-th after it
    turns: int
    bias: bool
    in_rows: bool = False  # its rows are this part of the rows, of `turns` parts


class UnstackedCheckpoint:
    def __init__(self, stored: FileCheckpoint, stacks: Mapping[str, Stack]) -> None:
        """`stacks`: by tensor, with a `*` for the expert in the names of modules"""
        self.source = stored.source
        self._stored = stored
        self._there = frozenset(stored.names())
        self._places: dict[str, _Place] = {}
        of_stacks = set()
        for tensor, stack in stacks.items():
            of_stacks |= {f"{tensor}{end}" for end in ("", BIAS, BLOCKS, SCALES)}
            self._places |= self._find(tensor, stack)
        self._plain = [name for name in stored.names() if name not in of_stacks]

    def _find(self, tensor: str, stack: Stack) -> dict[str, _Place]:
        """Returns the locations of the weights and biases of all experts."""
        turns = len(stack.modules)
        self._check(tensor, turns, stack.in_rows)
        found: dict[str, _Place] = {}
        for leaf, ending in (("weight", ""), ("bias", BIAS)):
            experts = range(self._count(tensor + ending))
            for turn, module in enumerate(stack.modules):
                places = {of_expert(module, expert): _Place(tensor, expert, turn, turns, bool(ending), stack.in_rows) for expert in experts}
                found |= {f"{name}.{leaf}": place for name, place in places.items()}
        return found

    def _count(self, tensor: str) -> int:
        name = next((name for name in (tensor, tensor + BLOCKS) if name in self._there), None)
        return 0 if name is None else self._stored.shape(name)[0]

    def _check(self, tensor: str, turns: int, in_rows: bool) -> None:
        """Refuses tensors that cannot be split into weights. Whether their sizes match the model is checked during loading."""
        shapes = {end: self._stored.shape(tensor + end) for end in ("", BIAS, BLOCKS, SCALES) if tensor + end in self._there}
        dims = {"": 3, BIAS: 2, BLOCKS: 4, SCALES: 3}
        rows = {"": 1 if in_rows else -1, BIAS: -1, BLOCKS: 1, SCALES: 1}
        for end, shape in shapes.items():
            if len(shape) != dims[end] or shape[0] > MAX_EXPERTS or shape[rows[end]] % turns or not all(shape):
                raise self._fail(tensor + end, f"has shape {list(shape)}, which is not a weight of each expert")
        blocks, scales = shapes.get(BLOCKS), shapes.get(SCALES)
        if (blocks is None) != (scales is None) or (blocks is not None and blocks != (*(scales or ()), MXFP4_GROUP // 2)):
            raise self._fail(tensor + BLOCKS, f"has shape {blocks}, and its scales have {scales}")
        if blocks is not None and "" in shapes:
            raise self._fail(tensor, f"exists twice, as floats and as {BLOCKS[1:]}")
        if in_rows and shapes.keys() - {""}:
            raise self._fail(tensor, "has biases or codes beside it, which no such tensor has")

    def _fail(self, tensor: str, why: str) -> LoadError:
        return LoadError(f"{self.source}: {tensor[:200]} {why}")

    def names(self) -> list[str]:
        return [*self._plain, *self._places]

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places.get(name)
        if place is None:
            return self._stored.shape(name)
        if place.bias:
            return (self._stored.shape(place.tensor + BIAS)[1] // place.turns,)
        if place.in_rows:
            _, rows, columns = self._stored.shape(place.tensor)
        elif place.tensor in self._there:
            _, columns, rows = self._stored.shape(place.tensor)
        else:
            _, rows, groups = self._stored.shape(place.tensor + SCALES)
            columns = groups * MXFP4_GROUP
        return rows // place.turns, columns

    def read(self, name: str) -> Tensor:
        return self.read_part(name, WHOLE)

    def packed(self, name: str) -> Quantised | None:
        return self.packed_part(name, WHOLE)

    def check_part(self, name: str, part: Part) -> None:
        place = self._places.get(name)
        if place is None:
            self._stored.check_part(name, part)
        elif part.columns is not None and place.tensor not in self._there and len(part.columns) % MXFP4_GROUP:
            size, count = part.whole // len(part.columns), len(part.columns)
            why = f"{count} columns are not whole groups of {MXFP4_GROUP}; set enable_expert_parallel, or another size"
            raise ConfigError(f"{self.source}: {place.tensor} cannot be split over tensor_parallel_size {size}: {why}")

    def read_part(self, name: str, part: Part) -> Tensor:
        place = self._places.get(name)
        if place is None:
            return self._stored.read_part(name, part)
        if place.bias:
            return cut(self._rows(place, BIAS), part)
        if place.in_rows:
            return cut(self._stored.read(place.tensor)[place.expert].chunk(place.turns)[place.turn], part)
        if place.tensor in self._there:
            return cut(self._stored.read(place.tensor)[place.expert].T[place.turn :: place.turns], part)
        return self._codes(place, part).dequantize()

    def _rows(self, place: _Place, end: str) -> Tensor:
        return self._stored.read(place.tensor + end)[place.expert][place.turn :: place.turns]

    def packed_part(self, name: str, part: Part) -> Quantised | None:
        place = self._places.get(name)
        if place is None:
            return self._stored.packed_part(name, part)
        return None if place.bias or place.tensor in self._there else self._codes(place, part)

    def _codes(self, place: _Place, part: Part) -> PackedWeight:
        groups = None if part.columns is None else range(part.columns.start // MXFP4_GROUP, part.columns.stop // MXFP4_GROUP)
        blocks, scales = (cut(self._rows(place, end), Part(part.rows, groups)) for end in (BLOCKS, SCALES))
        return mxfp4_weight(blocks, scales, f"{self.source}: {place.tensor}")

    def fingerprint(self) -> bytes:
        return self._stored.fingerprint()


def mxfp4_weight(blocks: Tensor, scales: Tensor, name: str) -> PackedWeight:
    """Returns the matrix of codes. blocks: [rows, groups, 16] uint8; scales: [rows, groups] uint8; `name`: for messages"""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1)  # [rows, columns]
    scale = torch.ldexp(torch.ones(scales.shape), scales.int() - ONE_HALF)
    return pack(name, 4, codes, scale, scale * -FP4_MIDDLE, table=FP4_TABLE)


# -- the order of rows (`models/row_order.py`): of a folder, and of modules in weights that hold several. GGUF files have orders of their
# own, too (`loading/checkpoint.py`)


def taken_apart(stored: FileCheckpoint, config: ModelConfig) -> FileCheckpoint:
    """Returns the checkpoint itself if its family has no weights that hold rows of several modules. `config`: of the whole model"""
    family = family_of(config)
    modules: dict[str, tuple[str, RowOrder]] = {}
    if family.places is None:
        return stored
    by_module = family.places(config)
    for name in stored.names():
        module, _, leaf = name.rpartition(".")
        held = family.rules.held_by(module)
        if held != (module,):
            modules |= {f"{one}.{leaf}": (name, by_module[family.rules.pattern(one)]) for one in held}
    return ReorderedCheckpoint(stored, {}, modules)


def reordered(stored: FileCheckpoint, config: ModelConfig) -> FileCheckpoint:
    """Returns the checkpoint itself if its family has no such projections. `config`: of the whole model"""
    family = family_of(config)
    if family.orders is None:
        return stored
    by_module = family.orders(config)
    orders = {name: by_module[key] for name in stored.names() if (key := family.rules.pattern(name.rpartition(".")[0])) in by_module}
    return ReorderedCheckpoint(stored, orders)


class ReorderedCheckpoint:
    def __init__(
        self, stored: FileCheckpoint, orders: Mapping[str, RowOrder], held: Mapping[str, tuple[str, RowOrder]] = MappingProxyType({})
    ) -> None:
        """`orders`: of weights and biases, by name; `held`: by the name of a module's weight, the stored weight with its rows"""
        self.source = stored.source
        self._stored = stored
        self._orders = {name: (name, order) for name, order in orders.items()} | dict(held)
        for name, order in self._orders.values():
            if not (shape := stored.shape(name)) or not order.fits(shape[0]):
                raise LoadError(f"{self.source}: {name[:200]} has {shape[0] if shape else 0} rows, which are not whole heads")
        holders = {stored_name for stored_name, _ in held.values()}
        self._names = [*(name for name in stored.names() if name not in holders), *held]
        if len(self._names) > len(set(self._names)):
            twice = next(name for name in held if name in stored.names())
            raise LoadError(f"{self.source}: {twice[:200]} and {held[twice][0][:200]} are the same weight")

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._orders.get(name)
        if found is None:
            return self._stored.shape(name)
        count, *rest = self._stored.shape(found[0])
        return (len(found[1].places(count)), *rest)

    def read(self, name: str) -> Tensor:
        return self.read_part(name, WHOLE)

    def packed(self, name: str) -> Quantised | None:
        return self.packed_part(name, WHOLE)

    def check_part(self, name: str, part: Part) -> None:
        stored_name, stored, _ = self._in_file(name, part)
        self._stored.check_part(stored_name, stored)

    def read_part(self, name: str, part: Part) -> Tensor:
        stored_name, stored, places = self._in_file(name, part)
        values = self._stored.read_part(stored_name, stored)
        return values if places is None else values[places]

    def packed_part(self, name: str, part: Part) -> Quantised | None:
        stored_name, stored, places = self._in_file(name, part)
        weight = self._stored.packed_part(stored_name, stored)
        return weight if weight is None or places is None else weight.rows(places)

    def blocks(self, name: str) -> Blocks | None:
        """Like `GGUFCheckpoint.blocks`."""
        stored_name, order = self._orders.get(name, (name, None))
        blocks = self._stored.blocks(stored_name) if isinstance(self._stored, GGUFCheckpoint) else None
        if blocks is None or order is None:
            return blocks
        places = order.places(blocks.shape[0])
        return replace(blocks, rows=places if blocks.rows is None else blocks.rows[places])

    def _in_file(self, name: str, part: Part) -> tuple[str, Part, Tensor | None]:
        """Returns the stored weight, the part of it that has these rows, and where each of them is in it; None: in the order of the file"""
        found = self._orders.get(name)
        if found is None:
            return name, part, None
        stored_name, order = found
        rows, places = in_file(order, self._stored.shape(stored_name)[0], part.rows)
        return stored_name, Part(rows, part.columns), torch.from_numpy(places)

    def fingerprint(self) -> bytes:
        return self._stored.fingerprint()
