"""`CacheGroup`: layers that keep their tokens alike, and so share one block table of a sequence.

    group 0    full          layers 0 6 12     every position is kept
    group 1    window 512    layers 1 3 5      blocks behind the window are given back
    group 2    window 512    layers 2 4 7

All groups take blocks from one pool, so a block has the same number of bytes in each of them. Two things make it so: groups have
equally many layers (where a kind does not divide, the last groups have fewer, and the rest of their bytes is padding), and a layer
that keeps fewer bytes a token has more tokens in a block. A link is `block_size` tokens, which is what one digest covers; a group's
block is a whole number of links.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGroup:
    layers: tuple[int, ...] = ()  # empty: all layers of the model
    window: int | None = None  # positions a query sees, its own included; None: all before it
    links: int = 1  # of `block_size` tokens, in a block

    def first_seen(self, length: int, span: int) -> int:
        """Returns the first entry of a table that a query at position `length` reads. `span`: tokens in a block"""
        return 0 if self.window is None else max(0, length - self.window + 1) // span

    def most_held(self, span: int, step_tokens: int) -> int | None:
        """Returns the most blocks that a sequence holds at once, or None where that has no bound.

        What lies behind the window of the last position known to be computed is given back. After that position come at most the
        tokens of the step in flight and of the step that is planned.
        """
        return None if self.window is None else (2 * step_tokens + self.window - 2) // span + 2

    def blocks_for(self, num_tokens: int, span: int, step_tokens: int) -> int:
        """Returns the most blocks that a sequence of this many tokens holds at once."""
        needed, most = -(-num_tokens // span), self.most_held(span, step_tokens)
        return needed if most is None else min(needed, most)


FULL = CacheGroup()
