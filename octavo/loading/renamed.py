"""A checkpoint under the names that its family's rules have.

A model of text and images has its text part under a prefix of its own. Here its weights have the names of a model of text alone,
and those that this engine has no use for are not shown.
"""

from torch import Tensor

from octavo.errors import LoadError
from octavo.loading.checkpoint import FileCheckpoint
from octavo.models.family import Rules
from octavo.policy.split import Part
from octavo.quant.packed import PackedWeight


def under_rules(stored: FileCheckpoint, rules: Rules) -> FileCheckpoint:
    return RenamedCheckpoint(stored, rules) if rules.renames else stored


class RenamedCheckpoint:
    def __init__(self, stored: FileCheckpoint, rules: Rules) -> None:
        self.source = stored.source
        self._stored = stored
        self._stored_name: dict[str, str] = {}  # by the name that is shown
        for name in stored.names():
            shown = rules.of_checkpoint(name)
            if shown in self._stored_name:
                raise LoadError(f"{self.source}: {name[:200]} and {self._stored_name[shown][:200]} are the same weight")
            if shown is not None:
                self._stored_name[shown] = name

    def names(self) -> list[str]:
        return list(self._stored_name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored.shape(self._stored_name[name])

    def read(self, name: str) -> Tensor:
        return self._stored.read(self._stored_name[name])

    def packed(self, name: str) -> PackedWeight | None:
        return self._stored.packed(self._stored_name[name])

    def check_part(self, name: str, part: Part) -> None:
        self._stored.check_part(self._stored_name[name], part)

    def read_part(self, name: str, part: Part) -> Tensor:
        return self._stored.read_part(self._stored_name[name], part)

    def packed_part(self, name: str, part: Part) -> PackedWeight | None:
        return self._stored.packed_part(self._stored_name[name], part)

    def fingerprint(self) -> bytes:
        return self._stored.fingerprint()
