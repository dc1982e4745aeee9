"""`KVManager`: block tables over the pool: match a prefix, allocate, copy on write, seal, fork, release.

    tokens     [ t0 .. t15 | t16 .. t31 | t32 .. ]
    table      [    5      |     9      |   2    ]      block 5 holds positions 0..15
    digests    [    d0     |     d1     ]               d1 = H(d0, t16..t31): equal digests mean equal prefixes

A table only grows. An entry changes in one case: the block of the next position is shared with another sample; then a
fresh copy takes its place, in the plan that writes it first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from octavo.messages import HitReason, StepPlan
from octavo.policy.block_pool import BlockPool
from octavo.policy.request import Sequence


@dataclass(frozen=True, slots=True)
class PrefixHit:
    table: list[int]
    num_tokens: int
    reason: HitReason  # why it ends where it ends
    missed: bytes = b""  # digest of the first block that was not found


def _ignore(seq: Sequence, first: int, end: int) -> None:
    """Nobody asks later what a cached block holds."""


class KVManager:
    def __init__(self, pool: BlockPool, block_size: int, caching: bool, key: bytes, identity: bytes, force_miss: bool = False) -> None:
        self.pool = pool
        self.block_size = block_size
        self.caching = caching
        self.pending: dict[bytes, int] = {}  # digest -> seq_id of who is computing that block
        self.on_seal: Callable[[Sequence, int, int], None] = _ignore  # the sequence, and which entries of its table were offered
        self._hash = blake2b(key=key, digest_size=32)  # keyed once, copied for every digest
        self._identity = identity  # model, weights, dtypes, block size: what must be equal for KV bytes to be
        self._force_miss = force_miss

    def root(self, salt: str) -> bytes:
        """Start of a digest chain; no lookup crosses identities or salts."""
        state = self._hash.copy()
        state.update(self._identity + b"\0" + salt.encode())
        return state.digest()

    def match(self, seq: Sequence) -> PrefixHit:
        """The longest cached prefix in whole blocks, short of the last token: that one is always computed."""
        if not self.caching or not seq.reads_cache:
            return PrefixHit([], 0, "off")
        full = (seq.num_tokens - 1) // self.block_size
        self._extend_digests(seq, full)
        table: list[int] = []
        for digest in seq.digests[:full]:
            block = None if self._force_miss else self.pool.lookup(digest)
            if block is None:
                return PrefixHit(table, len(table) * self.block_size, self._miss_reason(digest, len(table)), digest)
            table.append(block)
        return PrefixHit(table, len(table) * self.block_size, "end" if full else "short")

    def _miss_reason(self, digest: bytes, num_matched: int) -> HitReason:
        if digest in self.pool.evicted:
            return "evicted"
        return "differs" if num_matched else "cold"

    def blocks_needed(self, seq: Sequence, hit: PrefixHit) -> int:
        """Free blocks it takes to hold the whole present sequence, hit blocks that are now free included."""
        total = -(-seq.num_tokens // self.block_size)
        ref = self.pool.ref
        return total - len(hit.table) + sum(ref[block] == 0 for block in hit.table)

    def admit(self, seq: Sequence, hit: PrefixHit) -> None:
        """Start a table from a hit, and announce the blocks this sequence is going to fill."""
        assert not seq.table
        self.pool.share(hit.table)
        seq.table = list(hit.table)
        seq.num_planned = seq.num_computed = hit.num_tokens
        seq.num_sealed = len(hit.table)
        if self.caching:
            self._extend_digests(seq, seq.num_tokens // self.block_size)
            for digest in seq.digests[seq.num_sealed :]:
                if self.pending.setdefault(digest, seq.seq_id) == seq.seq_id:
                    seq.pending.append(digest)

    def has_room(self, seq: Sequence, count: int) -> bool:
        """Whether the next `count` positions are in blocks it already has to itself: nearly every decode step."""
        start = seq.num_planned
        return start % self.block_size != 0 and start + count <= len(seq.table) * self.block_size and self.pool.ref[seq.table[-1]] == 1

    def allocate(self, seq: Sequence, count: int, plan: StepPlan) -> bool:
        """Room for the next `count` positions, with a private copy of a shared block; or False and nothing changed."""
        table, size, pool = seq.table, self.block_size, self.pool
        start = seq.num_planned
        fresh = (start + count - 1) // size + 1 - len(table)
        shared = start % size != 0 and count > 0 and pool.ref[table[start // size]] > 1
        if fresh + shared > len(pool.free):
            return False
        if shared:
            index = start // size
            (copy,) = pool.take(1)
            plan.copies.append((table[index], copy))
            plan.new_blocks.append((seq.row, index, copy))
            pool.release((table[index],))
            table[index] = copy
        if fresh > 0:
            for block in pool.take(fresh):
                plan.new_blocks.append((seq.row, len(table), block))
                table.append(block)
        return True

    def seal(self, seq: Sequence) -> None:
        """Offer the blocks that `num_computed` has filled to the cache."""
        full = seq.num_computed // self.block_size
        if self.caching:
            self._extend_digests(seq, full)
            for index in range(seq.num_sealed, full):
                self.pool.seal(seq.table[index], seq.digests[index])
                self.pending.pop(seq.digests[index], None)
            self.on_seal(seq, seq.num_sealed, full)
        seq.num_sealed = full

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares every block of its parent; who writes first copies."""
        self.pool.share(parent.table)
        child.table = list(parent.table)
        child.digests = list(parent.digests)
        child.num_planned, child.num_computed, child.num_sealed = parent.num_planned, parent.num_computed, parent.num_sealed

    def release(self, seq: Sequence) -> None:
        """Give back the whole table and withdraw what was announced."""
        self.pool.release(seq.table)
        seq.table = []
        seq.num_planned = seq.num_computed = seq.num_sealed = 0
        for digest in seq.pending:
            if self.pending.get(digest) == seq.seq_id:
                del self.pending[digest]
        seq.pending = []

    def _extend_digests(self, seq: Sequence, count: int) -> None:
        digests, size = seq.digests, self.block_size
        parent = digests[-1] if digests else seq.request.root
        for start in range(len(digests) * size, count * size, size):
            state = self._hash.copy()
            state.update(parent)
            state.update(seq.token_ids[start : start + size])
            parent = state.digest()
            digests.append(parent)
