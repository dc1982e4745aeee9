"""`BlockPool`: reference counts of all blocks, and the index of cached content.

    null          block 0: padding reads and writes it, it has no owner
    free          ref 0, in `free`; the first is taken next:   [ unsealed .. | sealed, least recently used .. most recently used ]
    held          ref > 0: the number of block tables and pins that contain it
    pinned        held and sealed: at least one holder is a pin. It stays when the cache is emptied
    sealed        its content is final and `index` finds it by its key, whether held or free; taking it from `free` evicts it

A key is a cache group and a digest. Every operation is O(1) per block. The pool knows nothing of tokens or sequences.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

NULL_BLOCK = 0
EVICTED_RING = 8192  # keys remembered after eviction, to distinguish "evicted" from "never seen"

BlockKey = tuple[int, bytes]  # cache group, digest of the tokens up to the block's end
Event = Literal["take", "share", "release", "seal", "evict", "pin", "unpin"]
OnEvent = Callable[[Event, int, BlockKey | None], None]  # event, block, key of a sealed block


@dataclass(slots=True)
class PoolCounts:
    taken: int = 0
    shared: int = 0
    sealed: int = 0
    evicted: int = 0


def _ignore(event: Event, block: int, key: BlockKey | None) -> None:
    """No observer is registered."""


class BlockPool:
    def __init__(self, num_blocks: int, on_event: OnEvent | None = None) -> None:
        assert num_blocks >= 2, "block 0 is the null block; a pool needs at least one more"
        self.num_blocks = num_blocks
        self.ref = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.index: dict[BlockKey, int] = {}  # key -> block
        self.key_of: list[BlockKey | None] = [None] * num_blocks
        self.evicted: OrderedDict[BlockKey, None] = OrderedDict()
        self.pinned: Counter[int] = Counter()  # block -> number of holders that are pins
        self.freed = 0  # how many times a block has become free
        self.counts = PoolCounts()
        self.on_event = on_event or _ignore  # a temporary observer sets its own callback here and restores the previous one

    @property
    def num_free(self) -> int:
        return len(self.free)

    def lookup(self, key: BlockKey) -> int | None:
        return self.index.get(key)

    def take(self, count: int) -> list[int]:
        """Takes `count` blocks with ref 1 and undefined contents; evicts what was cached in them. The caller ensures there are enough."""
        free = self.free
        assert count <= len(free), f"{count} blocks wanted, {len(free)} free"
        blocks = []
        for _ in range(count):
            block, _ = free.popitem(last=False)
            if self.key_of[block] is not None:
                self._evict(block)
            self.ref[block] = 1
            self.on_event("take", block, None)
            blocks.append(block)
        self.counts.taken += count
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Adds one holder to each block."""
        ref, free = self.ref, self.free
        for block in blocks:
            if ref[block] == 0:
                del free[block]
            ref[block] += 1
        self.counts.shared += len(blocks)
        if self.on_event is not _ignore:
            for block in blocks:
                self.on_event("share", block, self.key_of[block])

    def release(self, blocks: Iterable[int]) -> None:
        """Removes one holder from each block, given in table order. Tails are freed first, so that prefixes stay cached longest."""
        ref, observed = self.ref, self.on_event is not _ignore
        for block in reversed(list(blocks)):
            ref[block] -= 1
            assert ref[block] >= 0, f"block {block} released once too often"
            if observed:
                self.on_event("release", block, None)
            if ref[block] == 0:
                self.freed += 1
                self.free[block] = None
                if self.key_of[block] is None:
                    self.free.move_to_end(block, last=False)

    def seal(self, block: int, key: BlockKey) -> None:
        """Marks the block's content as final and indexes it. If the key is already cached, the block stays a private duplicate."""
        assert self.ref[block] > 0, f"block {block} sealed while free"
        if key in self.index:
            return
        assert self.key_of[block] is None, f"block {block} sealed twice"
        self.index[key] = block
        self.key_of[block] = key
        self.counts.sealed += 1
        self.on_event("seal", block, key)

    def writable(self, block: int) -> bool:
        return self.ref[block] == 1 and self.key_of[block] is None

    def pin(self, blocks: Sequence[int]) -> None:
        """Adds a pin as a holder of each block. The blocks are sealed, and stay in the index until their last pin is removed."""
        assert all(self.key_of[block] is not None for block in blocks), "a pin of a block that cannot be found"
        self.share(blocks)
        self.pinned.update(blocks)
        for block in blocks:
            self.on_event("pin", block, None)

    def unpin(self, blocks: Sequence[int]) -> None:
        """Removes a pin from the blocks. Blocks with other holders stay held, the rest become free but cached."""
        for block in blocks:
            self.pinned[block] -= 1
            if self.pinned[block] == 0:
                del self.pinned[block]
            self.on_event("unpin", block, None)
        self.release(blocks)

    def forget(self) -> None:
        """Empties the cache: only pinned blocks stay in the index. Holders keep their blocks."""
        for block in list(self.index.values()):
            if block not in self.pinned:
                self._evict(block)
        self.evicted.clear()

    def _evict(self, block: int) -> None:
        key = self.key_of[block]
        assert key is not None
        del self.index[key]
        self.key_of[block] = None
        self.evicted[key] = None
        if len(self.evicted) > EVICTED_RING:
            self.evicted.popitem(last=False)
        self.counts.evicted += 1
        self.on_event("evict", block, key)

    def check(self) -> None:
        """Asserts that every block is in exactly one state and that index and keys agree."""
        assert self.ref[NULL_BLOCK] == 0 and NULL_BLOCK not in self.free and self.key_of[NULL_BLOCK] is None
        held = sum(count > 0 for count in self.ref)
        assert len(self.free) + held + 1 == self.num_blocks
        assert all(self.ref[block] == 0 for block in self.free)
        sealed = {key: block for block, key in enumerate(self.key_of) if key is not None}
        assert sealed == self.index
        for block, pins in self.pinned.items():
            assert 0 < pins <= self.ref[block] and self.key_of[block] is not None, f"block {block} is pinned, and free or not found"
