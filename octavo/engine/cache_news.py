"""`CacheNews`: what the door of several engines is told about the cache of this one.

    pool.on_event ──► CacheNews ──► take()    what changed since the last take, for all doors
                                ──► full()    what all takes so far add up to, for a door that is new

A door asks which engine has the longest prefix of a prompt. One cache group is enough for that, so group 0 is told. A block that was
sealed and evicted between two takes is not told at all.
"""

from octavo.messages import CacheChange
from octavo.policy.block_pool import BlockKey, BlockPool, Event
from octavo.policy.digests import SHORT

GROUP = 0  # the one that is told


class CacheNews:
    """Used by the engine's loop alone, since the pool changes in every step.

    It stays hooked into the pool, so it is made before anybody watches: a watcher that leaves puts back what it found.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._on_event = pool.on_event
        self._sealed: set[bytes] = {digest for group, digest in pool.index if group == GROUP}  # not told yet
        self._evicted: set[bytes] = set()
        pool.on_event = self._on_block

    def _on_block(self, event: Event, block: int, key: BlockKey | None) -> None:
        self._on_event(event, block, key)
        if key is None or event == "share" or key[0] != GROUP:
            return  # most events; a key comes with seal, evict and share alone
        same, opposite = (self._sealed, self._evicted) if event == "seal" else (self._evicted, self._sealed)
        if key[1] in opposite:
            opposite.remove(key[1])  # both happened since the last take: nothing has changed
        else:
            same.add(key[1])

    def full(self) -> CacheChange:
        """Returns what a door knows that was told everything so far. What `take` gives later goes on from there.

        Blocks of this moment would not do: one that is sealed now and evicted before the next take is never told again.
        """
        found = {digest for group, digest in self._pool.index if group == GROUP}
        return CacheChange(True, _joined((found - self._sealed) | self._evicted))

    def take(self) -> CacheChange | None:
        """Returns what has changed since the last take, or None."""
        if not (self._sealed or self._evicted):
            return None
        change = CacheChange(False, _joined(self._sealed), _joined(self._evicted))
        self._sealed.clear()
        self._evicted.clear()
        return change


def _joined(digests: set[bytes]) -> bytes:
    return b"".join([digest[:SHORT] for digest in digests])
