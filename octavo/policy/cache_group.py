"""`CacheGroup`: layers with the same cache layout, which share one block table per sequence.

    group 0    full          layers 0 6 12     every position is kept
    group 1    window 512    layers 1 3 5      blocks behind the window are freed
    group 2    window 512    layers 2 4 7

All groups take blocks from one pool, so a block has the same number of bytes in each of them. Groups have the same number of layers
(if the layers of a kind cannot be divided evenly, its last groups have fewer, and the rest of their bytes is padding). A layer
with fewer bytes per token has more tokens in a block. A link of the hash chain is `block_size` tokens, which one digest covers; the
block of a group is a whole number of links.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroup:
    layers: tuple[int, ...] = ()  # empty: all layers of the model
    window: int | None = None  # positions a query sees, including its own; None: all positions before it
    links: int = 1  # links of `block_size` tokens in a block

    def first_seen(self, length: int, span: int) -> int:
        """Returns the first index of a table that a query at position `length` reads. `span`: tokens in a block"""
        return 0 if self.window is None else max(0, length - self.window + 1) // span

    def most_held(self, span: int, step_tokens: int) -> int | None:
        """Returns how many blocks a sequence can hold at once, or None if that is unbounded.

        Blocks behind the window of the last computed position are freed. At most the tokens of the step in flight and of the planned step
        follow that position.
        """
        return None if self.window is None else (2 * step_tokens + self.window - 2) // span + 2

    def blocks_for(self, num_tokens: int, span: int, step_tokens: int) -> int:
        """Returns how many blocks a sequence of this many tokens can hold at once."""
        needed, most = -(-num_tokens // span), self.most_held(span, step_tokens)
        return needed if most is None else min(needed, most)


FULL = CacheGroup()
