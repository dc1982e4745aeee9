"""Expert weights that a folder stores in one tensor for all experts: presents them as one weight per expert.

    NAME          [experts, columns, rows]                 floats
    NAME_blocks   [experts, rows, columns / 32, 16] uint8  MXFP4: two 4-bit codes per byte, the first in the lower half
    NAME_scales   [experts, rows, columns / 32] uint8      and the exponents of their scales, with a bias of 127
    NAME_bias     [experts, rows]

Rows of several parts alternate: gate 0, up 0, gate 1, up 1, ... `Stack` (`models/family.py`) lists such tensors of a family.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError, LoadError
from octavo.loading.checkpoint import WHOLE, FileCheckpoint
from octavo.loading.packed_modules import cut
from octavo.model_config import ModelConfig
from octavo.models.family import MAX_EXPERTS, of_expert
from octavo.models.registry import family_of
from octavo.models.split import Part
from octavo.quant.fp8 import Quantised
from octavo.quant.packed import PackedWeight, pack
from octavo.quant.quant_config import MXFP4_GROUP, STACKED_CODES

BIAS, (BLOCKS, SCALES) = "_bias", STACKED_CODES
NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the values of codes 0 to 7; from 8 on the same, negative
MIDDLE = 16  # a power of two, by which the table is shifted
TABLE = torch.tensor([MIDDLE + sign * number for sign in (1, -1) for number in NUMBERS], dtype=torch.uint8)
ONE_HALF = 128  # the exponent for a factor of one on doubled numbers


def unstacked(stored: FileCheckpoint, config: ModelConfig) -> FileCheckpoint:
    """Returns a checkpoint with one weight per expert, for any format of the files."""
    rules, found = family_of(config).rules, {}
    for name in stored.names():
        tensor = next((name.removesuffix(end) for end in (BIAS, BLOCKS, SCALES) if name.endswith(end)), name)
        modules = rules.stacked(tensor)
        if modules is not None and (rules.layer(tensor) or 0) < config.num_layers:  # the loader refuses other layers
            found[tensor] = modules
    return UnstackedCheckpoint(stored, found) if found else stored


class _Place(NamedTuple):
    """The location of an expert's weight."""

    tensor: str  # without the suffix of blocks and scales
    expert: int
    turn: int  # its rows are this one, and every `turns`-th after it
    turns: int
    bias: bool


class UnstackedCheckpoint:
    def __init__(self, stored: FileCheckpoint, stacks: Mapping[str, tuple[str, ...]]) -> None:
        """`stacks`: tensor -> the modules whose rows alternate in it, with a `*` for the expert"""
        self.source = stored.source
        self._stored = stored
        self._there = frozenset(stored.names())
        self._places: dict[str, _Place] = {}
        of_stacks = set()
        for tensor, modules in stacks.items():
            of_stacks |= {f"{tensor}{end}" for end in ("", BIAS, BLOCKS, SCALES)}
            self._places |= self._find(tensor, modules)
        self._plain = [name for name in stored.names() if name not in of_stacks]

    def _find(self, tensor: str, modules: tuple[str, ...]) -> dict[str, _Place]:
        """Returns the locations of the weights and biases of all experts."""
        self._check(tensor, len(modules))
        found: dict[str, _Place] = {}
        for leaf, ending in (("weight", ""), ("bias", BIAS)):
            count = self._count(tensor + ending)
            for turn, module in enumerate(modules):
                places = {of_expert(module, expert): _Place(tensor, expert, turn, len(modules), bool(ending)) for expert in range(count)}
                found |= {f"{name}.{leaf}": place for name, place in places.items()}
        return found

    def _count(self, tensor: str) -> int:
        name = next((name for name in (tensor, tensor + BLOCKS) if name in self._there), None)
        return 0 if name is None else self._stored.shape(name)[0]

    def _check(self, tensor: str, turns: int) -> None:
        """Refuses tensors that cannot be split into weights. Whether their sizes match the model is checked during loading."""
        shapes = {end: self._stored.shape(tensor + end) for end in ("", BIAS, BLOCKS, SCALES) if tensor + end in self._there}
        dims = {"": 3, BIAS: 2, BLOCKS: 4, SCALES: 3}
        rows = {"": -1, BIAS: -1, BLOCKS: 1, SCALES: 1}
        for end, shape in shapes.items():
            if len(shape) != dims[end] or shape[0] > MAX_EXPERTS or shape[rows[end]] % turns or not all(shape):
                raise self._fail(tensor + end, f"has shape {list(shape)}, which is not a weight of each expert")
        blocks, scales = shapes.get(BLOCKS), shapes.get(SCALES)
        if (blocks is None) != (scales is None) or (blocks is not None and blocks != (*(scales or ()), MXFP4_GROUP // 2)):
            raise self._fail(tensor + BLOCKS, f"has shape {blocks}, and its scales have {scales}")
        if blocks is not None and "" in shapes:
            raise self._fail(tensor, f"exists twice, as floats and as {BLOCKS[1:]}")

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
        if place.tensor in self._there:
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
    return pack(name, 4, codes, scale, scale * -MIDDLE, table=TABLE)
