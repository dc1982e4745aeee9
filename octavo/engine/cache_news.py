"""`CacheNews`: cache updates of one engine for the frontends that choose between several engines.

    pool.on_event ──► CacheNews ──► take()         changes since the last take, for all frontends
                      add(name) ──► next_part()    what is cached, a part at a time, for a new frontend

A frontend asks which engine has the longest prefix of a prompt. One cache group is enough for that, so only group 0 is sent.
A pool can have a million blocks. So what the loop of the engine sends in one turn is limited, and the rest follows in the next turns.

Parts go over the blocks in order, while they change. A frontend with all parts and all changes since the first part knows exactly what
is cached: a digest that moves to a block that was passed already is sealed there, and whatever happens to a digest last is a change.
"""

from collections.abc import Iterable
from itertools import islice

from octavo.messages import CacheChange
from octavo.policy.block_pool import BlockKey, BlockPool, Event
from octavo.policy.digests import SHORT

GROUP = 0  # the cache group that is sent
MOST_BLOCKS = 8192  # of which a part tells, about a millisecond of work
MOST_DIGESTS = 4096  # sealed, and as many evicted, in one take


class CacheNews:
    """Used only by the engine's loop, since the pool changes in every step.

    It stays hooked into the pool, so it must be created before the first watcher: a watcher that leaves restores the hook it found.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._on_event = pool.on_event
        self._sealed: dict[bytes, None] = dict.fromkeys(digest for group, digest in pool.index if group == GROUP)  # not sent yet
        self._evicted: dict[bytes, None] = {}
        self._new: dict[str, int] = {}  # frontends that have not got all parts, and the first block of the next one
        pool.on_event = self._on_block

    def _on_block(self, event: Event, block: int, key: BlockKey | None) -> None:
        self._on_event(event, block, key)
        if key is None or event == "share" or key[0] != GROUP:
            return  # most events have no key; only seal, evict and share have one
        now, before = (self._sealed, self._evicted) if event == "seal" else (self._evicted, self._sealed)
        before.pop(key[1], None)
        now[key[1]] = None

    @property
    def is_behind(self) -> bool:
        """Whether there is more to send."""
        return bool(self._sealed or self._evicted or self._new)

    def add(self, name: str) -> None:
        """A frontend is new, or has forgotten everything."""
        self._new.pop(name, None)
        self._new[name] = 0

    def drop(self, name: str) -> None:
        """A frontend has left."""
        self._new.pop(name, None)

    def next_part(self) -> tuple[str, CacheChange] | None:
        """Returns a frontend that is new, and the next part of what is cached; None if there is no such frontend, or nothing in this part.

        The first part is `full`: it replaces what came before.
        """
        if not self._new:
            return None
        name, start = next(iter(self._new.items()))
        self._new[name] = end = start + MOST_BLOCKS
        if end >= self._pool.num_blocks:
            del self._new[name]
        found = [key[1] for key in self._pool.key_of[start:end] if key is not None and key[0] == GROUP]
        return (name, CacheChange(start == 0, _joined(found))) if found or start == 0 else None

    def take(self) -> CacheChange | None:
        """Returns changes since the last take, oldest first, or None."""
        if not (self._sealed or self._evicted):
            return None
        return CacheChange(False, _joined(_taken(self._sealed)), _joined(_taken(self._evicted)))


def _taken(digests: dict[bytes, None]) -> list[bytes]:
    """Removes the first digests, and returns them."""
    taken = list(islice(digests, MOST_DIGESTS))
    for digest in taken:
        del digests[digest]
    return taken


def _joined(digests: Iterable[bytes]) -> bytes:
    return b"".join([digest[:SHORT] for digest in digests])
