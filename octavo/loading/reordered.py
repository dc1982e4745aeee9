"""A checkpoint of a folder whose projections have their rows in the order of the model (`models/row_order.py`).

GGUF files have orders of their own (`loading/checkpoint.py`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.loading.checkpoint import WHOLE, FileCheckpoint
from octavo.model_config import ModelConfig
from octavo.models.registry import family_of
from octavo.models.row_order import RowOrder, in_file
from octavo.models.split import Part
from octavo.quant.fp8 import Quantised


def reordered(stored: FileCheckpoint, config: ModelConfig) -> FileCheckpoint:
    """Returns the checkpoint itself if its family has no such projections. `config`: of the whole model"""
    family = family_of(config)
    if family.orders is None:
        return stored
    by_module = family.orders(config)
    orders = {name: by_module[key] for name in stored.names() if (key := family.rules.pattern(name.rpartition(".")[0])) in by_module}
    return ReorderedCheckpoint(stored, orders)


class ReorderedCheckpoint:
    def __init__(self, stored: FileCheckpoint, orders: Mapping[str, RowOrder]) -> None:
        """`orders`: of weights and biases, by name"""
        self.source = stored.source
        self._stored = stored
        self._orders = orders
        for name, order in orders.items():
            if not order.fits(rows := stored.shape(name)[0]):
                raise LoadError(f"{self.source}: {name[:200]} has {rows} rows, which are not whole heads")

    def names(self) -> list[str]:
        return self._stored.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored.shape(name)

    def read(self, name: str) -> Tensor:
        return self.read_part(name, WHOLE)

    def packed(self, name: str) -> Quantised | None:
        return self.packed_part(name, WHOLE)

    def check_part(self, name: str, part: Part) -> None:
        self._stored.check_part(name, self._in_file(name, part)[0])

    def read_part(self, name: str, part: Part) -> Tensor:
        stored, places = self._in_file(name, part)
        values = self._stored.read_part(name, stored)
        return values if places is None else values[places]

    def packed_part(self, name: str, part: Part) -> Quantised | None:
        stored, places = self._in_file(name, part)
        weight = self._stored.packed_part(name, stored)
        return weight if weight is None or places is None else weight.rows(places)

    def _in_file(self, name: str, part: Part) -> tuple[Part, Tensor | None]:
        """Returns the part of the file that has these rows, and where each of them is in it; None: in the order of the file"""
        order = self._orders.get(name)
        if order is None:
            return part, None
        rows, places = in_file(order, self.shape(name)[0], part.rows)
        return Part(rows, part.columns), torch.from_numpy(places)

    def fingerprint(self) -> bytes:
        return self._stored.fingerprint()
