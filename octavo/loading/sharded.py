"""The weights of one of several ranks, from the files of the whole model.

    ShardedCheckpoint    tensor parallelism: the rank's part of each weight, under the weight's own name
    of_experts           expert parallelism: the experts of a rank, numbered from 0
    of_stage             pipeline parallelism: the layers of a stage, numbered from 0

So loaders fill a model that was built with the rank's config in the same way as a whole one. Data of other ranks is not read; for the
exception with act-order see `PackedModule`.
"""

import hashlib
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.loading.checkpoint import WHOLE, Checkpoint, FileCheckpoint
from octavo.loading.views import RenamedCheckpoint, RenamedWeights
from octavo.model_config import ModelConfig
from octavo.models.family import Rules
from octavo.models.registry import describe, rank_parts
from octavo.models.split import Part
from octavo.quant.fp8 import Quantised, folded
from octavo.quant.packed import concatenate


def of_rank(
    stored: FileCheckpoint, config: ModelConfig, size: int, rank: int, context: int = 1, expert_ranks: int = 1
) -> Checkpoint:
    """Returns the part of a checkpoint for one of `size` ranks.

    `config`: of the whole model; `context`: ranks that share a context; `expert_ranks`: the number of ranks that have whole experts
    """
    if size == 1:
        return stored
    if expert_ranks > 1:
        count = next(mlp.experts.count for mlp in (layer.mlp for layer in describe(config).layers) if mlp.experts is not None)
        held = count // expert_ranks
        stored = of_experts(stored, count, range(rank * held, (rank + 1) * held))
    return ShardedCheckpoint(stored, rank_parts(config, size, rank, context, expert_ranks))


class ShardedCheckpoint:
    def __init__(self, stored: FileCheckpoint, parts: Mapping[str, Part]) -> None:
        """`parts`: by name; a rank has all of any weight that is not listed. Refuses parts that cannot be read separately."""
        self.source = stored.source
        self._stored = stored
        self._parts = parts
        for name in stored.names():
            self._check_size(name)
            for piece in _pieces(self._part(name)):
                stored.check_part(name, piece)

    def _part(self, name: str) -> Part:
        return self._parts.get(name, WHOLE)

    def _check_size(self, name: str) -> None:
        """Refuses a weight whose size differs from that of all its parts: a loader sees only one part, which could match anyway."""
        shape, part = self._stored.shape(name), self._part(name)
        axis = 0 if part.columns is None else 1
        if part.whole and shape[axis : axis + 1] != (part.whole,):
            found, wanted = f"{name[:200]} has shape {list(shape)}", f"{part.whole} {'columns' if axis else 'rows'}"
            raise LoadError(f"{self.source}: weights do not match the model: {found}, this model expects {wanted}")

    def names(self) -> list[str]:
        return self._stored.names()

    def shape(self, name: str) -> tuple[int, ...]:
        shape, part = self._stored.shape(name), self._part(name)
        if part.columns is not None:
            return shape[0], len(part.columns)
        if part.runs:
            return sum(len(run) for run in part.runs), *shape[1:]
        return shape if part.rows is None else (len(part.rows), *shape[1:])

    def read(self, name: str) -> Tensor:
        part = self._part(name)
        if part.zeros:
            return torch.zeros(self.shape(name))
        pieces = [self._stored.read_part(name, piece) for piece in _pieces(part)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def packed(self, name: str) -> Quantised | None:
        pieces = [self._stored.packed_part(name, piece) for piece in _pieces(self._part(name))]
        found = [folded(piece) for piece in pieces if piece is not None]
        if len(found) < len(pieces):
            return None
        return found[0] if len(found) == 1 else concatenate(found)

    def fingerprint(self) -> bytes:
        """Returns a different digest for each rank and number of ranks, because their caches differ."""
        return hashlib.blake2b(self._stored.fingerprint() + repr(sorted(self._parts.items(), key=str)).encode(), digest_size=32).digest()


def _pieces(part: Part) -> list[Part]:
    """Returns the parts that a file can read, one for each range of rows."""
    return [Part(rows=run) for run in part.runs] or [part]


def of_experts(stored: FileCheckpoint, count: int, own: range) -> FileCheckpoint:
    """Returns a checkpoint with some of `count` experts, numbered from 0; with a different digest for each rank and number of ranks."""
    found: dict[str, str] = {}
    for name in stored.names():
        expert = Rules.expert(name)
        if expert is None or expert >= count:  # the loader refuses an expert that the model does not have
            found[name] = name
        elif expert in own:
            found[Rules.with_expert(name, expert - own.start)] = name
    return RenamedCheckpoint(stored, found, mark=repr(own).encode())


def of_stage(stored: Checkpoint, layers: range, elsewhere: Collection[str], last: bool) -> Checkpoint:
    """Returns a checkpoint with some of the layers, numbered from 0. Its digest is that of all layers.

    `elsewhere`: weights outside of layers that other stages have; `last`: also include layers that the model does not have
    """
    found: dict[str, str] = {}
    for name in stored.names():
        layer = Rules.layer(name)
        if layer is None and name not in elsewhere:
            found[name] = name
        elif layer is not None and layers.start <= layer and (layer < layers.stop or last):
            found[Rules.with_layer(name, layer - layers.start)] = name
    return RenamedWeights(stored, found)
