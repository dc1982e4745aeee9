"""`CacheNews`: cache updates of one engine for the frontends that choose between several engines.

    pool.on_event ──► CacheNews ──► take()    changes since the last take, for all frontends
                                ──► full()    the sum of all takes so far, for a new frontend

A frontend asks which engine has the longest prefix of a prompt. One cache group is enough for that, so only group 0 is sent. A block
that is sealed and evicted between two takes is not sent at all.
"""

from octavo.messages import CacheChange
from octavo.policy.block_pool import BlockKey, BlockPool, Event
from octavo.policy.digests import SHORT

GROUP = 0  # the cache group that is sent


class CacheNews:
    """Used only by the engine's loop, since the pool changes in every step.

        It stays hooked into the pool, so it must be created before the first watcher: a watcher that leaves restores the hook it found.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._on_event = pool.on_event
        self._sealed: set[bytes] = {digest for group, digest in pool.index if group == GROUP}  # not sent yet
        self._evicted: set[bytes] = set()
        pool.on_event = self._on_block

    def _on_block(self, event: Event, block: int, key: BlockKey | None) -> None:
        self._on_event(event, block, key)
        if key is None or event == "share" or key[0] != GROUP:
            return  # most events have no key; only seal, evict and share have one
        same, opposite = (self._sealed, self._evicted) if event == "seal" else (self._evicted, self._sealed)
        if key[1] in opposite:
            opposite.remove(key[1])  # both happened since the last take, so nothing has changed
        else:
            same.add(key[1])

    def full(self) -> CacheChange:
        """Returns what a frontend knows that received every update so far. The next `take` continues from there.

        The current blocks would be wrong: a block that is sealed now and evicted before the next take is never reported again.
        """
        found = {digest for group, digest in self._pool.index if group == GROUP}
        return CacheChange(True, _joined((found - self._sealed) | self._evicted))

    def take(self) -> CacheChange | None:
        """Returns the changes since the last take, or None."""
        if not (self._sealed or self._evicted):
            return None
        change = CacheChange(False, _joined(self._sealed), _joined(self._evicted))
        self._sealed.clear()
        self._evicted.clear()
        return change


def _joined(digests: set[bytes]) -> bytes:
    return b"".join([digest[:SHORT] for digest in digests])
