"""A checkpoint with renamed weights. Weights without a new name are hidden.

A model for text and images has its text part under a prefix. `under_rules` gives its weights the names of a text-only model,
which are those of its family's rules.
"""

import hashlib
from collections.abc import Mapping

from torch import Tensor

from octavo.errors import LoadError
from octavo.loading.checkpoint import Checkpoint, FileCheckpoint
from octavo.models.family import Rules
from octavo.models.split import Part
from octavo.quant.fp8 import Quantised


def under_rules(stored: FileCheckpoint, rules: Rules) -> FileCheckpoint:
    if not rules.renames:
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
