"""`CacheGroup`: layers with the same cache layout, which share one block table per sequence. Its class is the kind of their cache.

    group 0    CacheGroup      layers 0 6 12     every position is kept
    group 1    WindowGroup     layers 1 3 5      a query sees 512 positions: blocks behind the window are freed
    group 2    WindowGroup     layers 2 4 7

All groups take blocks from one pool, so a block has the same number of bytes in each of them. Groups have the same number of layers
(if the layers of a kind cannot be divided evenly, its last groups have fewer, and the rest of their bytes is padding). A layer
with fewer bytes per token has more tokens in a block. A link of the hash chain is `block_size` tokens, which one digest covers; the
block of a group is a whole number of links, and its span is the number of its tokens.

A kind that keeps other positions is a subclass with its own `first_read`, `length` and `most_held`. The KV manager knows no kind.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from octavo.policy.block_pool import NULL_BLOCK

UNBOUNDED = 1 << 60
LOOKED_UP = 32  # blocks looked up at once, so that little is hashed behind the first one that is missing

Find = Callable[[int, int], list[int | None] | None]  # the cached blocks of a range of table indices; None if that takes too much hashing


@dataclass(frozen=True, slots=True)
class CacheGroup:
    layers: tuple[int, ...] = ()  # empty: all layers of the model
    links: int = 1  # links of `block_size` tokens in a block

    frees: ClassVar[bool] = False  # whether blocks are freed while the sequence runs

    def first_read(self, length: int) -> int:
        """Returns the first position that a query at position `length` reads. It never falls as sequences grow."""
        return 0

    def length(self, end: int) -> int:
        """Returns how many positions of its cache a sequence can read after a step that ends at position `end`."""
        return end

    def most_held(self, span: int, step_tokens: int) -> int:
        """Returns how many blocks a sequence can hold at once. `step_tokens`: the most that a plan computes"""
        return UNBOUNDED

    def blocks_for(self, num_tokens: int, span: int, step_tokens: int) -> int:
        """Returns how many blocks a sequence of this many tokens can hold at once."""
        return min(-(-num_tokens // span), self.most_held(span, step_tokens))

    def unread(self, table: list[int], num_computed: int, span: int) -> list[int]:
        """Returns the indices of blocks that are never read again, the last first.

        A sequence may be truncated to any length from `num_computed` on, so what is read from there is kept.
        """
        indices = []
        index = min(self.first_read(num_computed) // span, len(table)) - 1
        while index >= 0 and table[index] != NULL_BLOCK:
            indices.append(index)
            index -= 1
        return indices

    def shortest(self, table: list[int], span: int) -> int:
        """Returns the minimum length that a sequence can be truncated to: what its last token reads has not been freed."""
        freed = table.count(NULL_BLOCK)
        return 1 + bisect_left(range(UNBOUNDED), freed, key=lambda length: self.first_read(length) // span) if freed else 1

    def fit(self, end: int, span: int, find: Find) -> tuple[int, int | None] | None:
        """Returns the longest prefix of at most `end` blocks that can be used, and the index of the block that it lacks for more.

        Returns None if that takes too much hashing. Blocks are looked up from the first on, or, if not all are read, from the last on.
        """
        if not self.frees:
            for at in range(0, end, LOOKED_UP):
                blocks = find(at, min(at + LOOKED_UP, end))
                if blocks is None:
                    return None
                if None in blocks:
                    return at + blocks.index(None), at + blocks.index(None)
            return end, None
        at, missing = end, None
        while at > self.first_read(end * span) // span:
            at -= 1
            blocks = find(at, at + 1)
            if blocks is None:
                return None
            if blocks == [None]:
                end = missing = at
        return end, missing


@dataclass(frozen=True, slots=True)
class WindowGroup(CacheGroup):
    window: int = 0  # positions that a query sees, including its own

    frees: ClassVar[bool] = True

    def first_read(self, length: int) -> int:
        return max(0, length - self.window + 1)

    def most_held(self, span: int, step_tokens: int) -> int:
        """Blocks behind the window of the last computed position are freed. At most the tokens of the step in flight and of the planned
        step follow that position.
        """
        return (2 * step_tokens + self.window - 2) // span + 2


FULL = CacheGroup()
