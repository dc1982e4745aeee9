"""The order of a projection's rows in a file, where it is not the order of the model. It uses no torch.

    interleaved   a head rotates pairs of rows: in the file (2i, 2i + 1), in the model (i, i + d/2), of the d rows that are rotated
    by head       q, k and v are one weight: in the file [heads][q k v][head_dim], in the model [q k v][heads][head_dim]
    of group      one weight holds rows of several modules: in the file [heads][q gate][head_dim], for each module [heads][head_dim]
    tiled         v heads of a k head are neighbours in the model, and in the file every `k_heads`-th: 0 2 4 1 3 5 for 0 1 2 3 4 5

q and k are reordered alike, so their products stay the same, and no kernel needs a second kind of rotation.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]


class RowOrder(Protocol):
    @property
    def heads(self) -> int: ...

    def fits(self, count: int) -> bool:
        """Whether a weight can have this many rows."""

    def places(self, count: int) -> Places:
        """Returns the row of the file for each row of the model. `count`: of the rows in the file"""


@dataclass(frozen=True, slots=True)
class Interleaved:
    heads: int
    rotated: int | None = None  # rows of a head, the first ones; None: all
    before: int = 0  # rows of a head before those

    def fits(self, count: int) -> bool:
        size, rest = divmod(count, self.heads)
        return rest == 0 and size >= self.before + (self.rotated or 0) and (size - self.before) % 2 == 0

    def places(self, count: int) -> Places:
        rows = np.arange(count).reshape(self.heads, -1)
        end = rows.shape[1] if self.rotated is None else self.before + self.rotated
        pairs = rows[:, self.before : end].reshape(self.heads, -1, 2)
        return np.concatenate([rows[:, : self.before], pairs[:, :, 0], pairs[:, :, 1], rows[:, end:]], axis=1).reshape(-1)


@dataclass(frozen=True, slots=True)
class ByHead:
    heads: int
    parts: int = 3

    def fits(self, count: int) -> bool:
        return count % (self.parts * self.heads) == 0

    def places(self, count: int) -> Places:
        return np.arange(count).reshape(self.heads, self.parts, -1).swapaxes(0, 1).reshape(-1)


@dataclass(frozen=True, slots=True)
class OfGroup:
    heads: int
    sizes: tuple[int, ...]  # rows of each part in the group of a head
    parts: tuple[int, ...]  # the parts that belong to this module, one after the other

    def fits(self, count: int) -> bool:
        return count == self.heads * sum(self.sizes)

    def places(self, count: int) -> Places:
        groups = np.split(np.arange(count).reshape(self.heads, -1), np.cumsum(self.sizes)[:-1], axis=1)
        return np.concatenate([groups[part].reshape(-1) for part in self.parts])


@dataclass(frozen=True, slots=True)
class Tiled:
    """`heads`: k heads; of the rows, the first `before` are not reordered."""

    heads: int
    times: int  # v heads of each k head
    before: int = 0

    def fits(self, count: int) -> bool:
        return count > self.before and (count - self.before) % (self.heads * self.times) == 0

    def places(self, count: int) -> Places:
        tiled = np.arange(self.before, count).reshape(self.times, self.heads, -1).swapaxes(0, 1).reshape(-1)
        return np.concatenate([np.arange(self.before), tiled])


def in_file(order: RowOrder, count: int, rows: range | None) -> tuple[range | None, Places]:
    """Returns the range of a file that has these rows of the model, and where each of them is in it. None: all rows of `count`"""
    places = order.places(count)
    if rows is None:
        return None, places
    own = places[rows.start : rows.stop]
    first = int(own.min())
    return range(first, int(own.max()) + 1), own - first
