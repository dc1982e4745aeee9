"""`StatePool`: reference counts of state slots, and the index of checkpoints.

    null         slot 0: the state before the first token. It is read by all sequences that begin, and never written
    empty        free, and nothing can be found in it; taken first
    held         ref > 0: a sequence or a pin has it
    checkpoint   `index` finds it by the digest of the tokens that it covers, whether held or not; if it is not held, it may be evicted

All slots have the same bytes, so a checkpoint is worth the tokens that need not be computed again while it is there, and less the longer
it is not used. Eviction follows the GreedyDual rule: the priority of a checkpoint is its worth plus that of the last one evicted at the
time of its last use, and the lowest priority goes first.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal

NULL_STATE = 0
EVICTED_RING = 8192  # digests remembered after eviction, to distinguish "evicted" from "never kept"
MOST_OUTDATED = 4  # entries of the heap for each slot

StateEvent = Literal["take", "seal", "evict"]
OnStateEvent = Callable[[StateEvent, int, bytes | None], None]  # event, slot, key of a checkpoint


@dataclass(slots=True)
class StateCounts:
    """Of checkpoints."""

    kept: int = 0
    used: int = 0
    evicted: int = 0


def _ignore(event: StateEvent, slot: int, key: bytes | None) -> None:
    """No observer is registered."""


class StatePool:
    def __init__(self, num_states: int, on_event: OnStateEvent | None = None) -> None:
        self.num_states = num_states
        self.ref = [0] * num_states
        self.empty = list(range(num_states - 1, NULL_STATE, -1))
        self.index: dict[bytes, int] = {}  # digest -> slot
        self.key_of: list[bytes | None] = [None] * num_states
        self.evicted: OrderedDict[bytes, None] = OrderedDict()
        self.pinned: Counter[int] = Counter()  # slot -> number of holders that are pins
        self.counts = StateCounts()
        self.num_held = 0
        self._on_event = on_event or _ignore
        self._worth = [0] * num_states  # tokens
        self._priority = [0.0] * num_states
        self._evictable: list[tuple[float, int]] = []  # a heap of (priority, slot); outdated entries are skipped
        self._floor = 0.0  # the priority of the last one evicted

    def take(self) -> int:
        """Takes a slot with ref 1 and undefined contents, from which a checkpoint may be evicted. The caller ensures there is one."""
        slot = self.empty.pop() if self.empty else self._evict()
        assert self.ref[slot] == 0
        self.share(slot)
        self._on_event("take", slot, None)
        return slot

    def share(self, slot: int) -> None:
        """Adds a holder."""
        if slot != NULL_STATE:
            self.num_held += self.ref[slot] == 0
            self.ref[slot] += 1

    def release(self, slot: int) -> None:
        """Removes a holder. A checkpoint without holders stays in the index until it is evicted."""
        if slot == NULL_STATE:
            return
        self.ref[slot] -= 1
        assert self.ref[slot] >= 0, f"state slot {slot} released once too often"
        if self.ref[slot] == 0:
            self.num_held -= 1
            if self.key_of[slot] is None:
                self.empty.append(slot)
            else:
                self._offer(slot)

    def seal(self, slot: int, key: bytes, worth: int) -> None:
        """Makes a held slot a checkpoint. If there is one for these tokens already, the slot stays private, and the other one is used."""
        assert self.ref[slot] > 0, f"state slot {slot} sealed while free"
        if (known := self.index.get(key)) is not None:
            self._touch(known)
            return
        assert self.key_of[slot] is None, f"state slot {slot} sealed twice"
        self.index[key], self.key_of[slot], self._worth[slot] = slot, key, worth
        self.counts.kept += 1
        self._on_event("seal", slot, key)
        self._touch(slot)

    def use(self, key: bytes) -> int:
        """Adds a holder to a checkpoint that a sequence starts from, and returns its slot."""
        slot = self.index[key]
        self._touch(slot)
        self.counts.used += 1
        self.share(slot)
        return slot

    def _touch(self, slot: int) -> None:
        self._priority[slot] = self._floor + self._worth[slot]
        if self.ref[slot] == 0:
            self._offer(slot)

    def _offer(self, slot: int) -> None:
        """Makes a checkpoint evictable."""
        heappush(self._evictable, (self._priority[slot], slot))
        if len(self._evictable) > MOST_OUTDATED * self.num_states:
            self._evictable = [(self._priority[one], one) for one in self.index.values() if self.ref[one] == 0]
            heapify(self._evictable)

    def drop(self, key: bytes) -> None:
        """Removes a checkpoint that another one replaces, unless it is held."""
        if (slot := self.index.get(key)) is not None and self.ref[slot] == 0:
            self._forget(slot)

    def pin(self, slots: Sequence[int]) -> None:
        """Adds a pin as a holder of each slot. They are checkpoints."""
        assert all(self.key_of[slot] is not None for slot in slots), "a pin of a state that cannot be found"
        for slot in slots:
            self.share(slot)
        self.pinned.update(slots)

    def unpin(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.pinned[slot] -= 1
            if self.pinned[slot] == 0:
                del self.pinned[slot]
            self.release(slot)

    def forget(self) -> None:
        """Removes all checkpoints that are not pinned."""
        for slot in list(self.index.values()):
            if slot not in self.pinned:
                self._forget(slot)
        self.evicted.clear()

    def _forget(self, slot: int) -> None:
        key = self.key_of[slot]
        assert key is not None
        del self.index[key]
        self.key_of[slot] = None
        self._on_event("evict", slot, key)
        if self.ref[slot] == 0:
            self.empty.append(slot)

    def _evict(self) -> int:
        while True:
            priority, slot = heappop(self._evictable)
            key = self.key_of[slot]
            if key is not None and self.ref[slot] == 0 and self._priority[slot] == priority:
                break
        self._floor = priority
        self._forget(slot)
        self.evicted[key] = None
        if len(self.evicted) > EVICTED_RING:
            self.evicted.popitem(last=False)
        self.counts.evicted += 1
        return self.empty.pop()

    def check(self) -> None:
        """Asserts that every slot is in exactly one state, and that index and keys agree."""
        assert self.ref[NULL_STATE] == 0 and NULL_STATE not in self.empty and self.key_of[NULL_STATE] is None
        assert len(set(self.empty)) == len(self.empty) and not any(self.ref[slot] or self.key_of[slot] for slot in self.empty)
        held, kept = ({slot for slot, what in enumerate(found) if what} for found in (self.ref, self.key_of))
        assert self.num_held == len(held), "the held state slots were counted wrong"
        assert len(self.empty) + len(held | kept) + 1 == self.num_states, "a state slot was lost"
        assert {key: slot for slot, key in enumerate(self.key_of) if key is not None} == self.index
        evictable = {slot for priority, slot in self._evictable if self._priority[slot] == priority}
        assert kept - held <= evictable, "a checkpoint can never be evicted"
        for slot, pins in self.pinned.items():
            assert 0 < pins <= self.ref[slot] and self.key_of[slot] is not None, f"state slot {slot} is pinned, and free or not found"
