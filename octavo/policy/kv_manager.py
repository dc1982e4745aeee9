"""`KVManager`: block tables over the pool: allocate, copy on write, seal, fork, free.

    tokens      [ t0 .. t15 | t16 .. t31 | t32 .. t47 | t48 .. ]
    digests     [    d0     |     d1     |     d2     ]            d1 = H(d0, t16..t31): equal digests mean equal prefixes
    tables[0]   [    5      |     9      |     2      |   7    ]    a full group: block 5 holds positions 0..15
    tables[1]   [    0      |     0      |     4      |   8    ]    a group with a window: blocks behind it were freed

What a group keeps is the business of its kind (`CacheGroup`).

A table only grows. An index changes in two cases. If the block of the next position is shared or sealed, a fresh copy takes its
place, in the plan that first writes to it. If it is never read again, it becomes the null block.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable

from octavo.messages import StepPlan
from octavo.policy.block_pool import NULL_BLOCK, BlockKey, BlockPool
from octavo.policy.cache_group import FULL, UNBOUNDED, CacheGroup
from octavo.policy.prefix_matcher import Digests, PrefixHit, PrefixMatcher
from octavo.policy.request import NEVER_TRIED, Sequence
from octavo.policy.states import States


def _ignore(seq: Sequence, group: int, first: int, end: int) -> None:
    """No observer is registered."""


class KVManager:
    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        caching: bool,
        key: bytes,
        identity: bytes,
        force_miss: bool = False,
        groups: tuple[CacheGroup, ...] = (FULL,),
        step_tokens: int = UNBOUNDED,
        states: States | None = None,
    ) -> None:
        """`identity`: everything that must be equal for two caches to hold equal bytes. `step_tokens`: the most that a plan computes.
        `states`: of a recurrent model
        """
        self.pool = pool
        self.block_size = block_size  # tokens of a link
        self.caching = caching
        self.groups = groups
        self.states = states
        self.keeps_states = states is not None and states.caching
        self.spans = [group.links * block_size for group in groups]  # tokens in a block
        self.pending: dict[BlockKey, Sequence] = {}  # block -> the sequence that computes it
        self.on_seal: Callable[[Sequence, int, int, int], None] = _ignore  # sequence, group, range of table indices that were sealed
        self.digests = Digests(key, identity)
        self.prefixes = PrefixMatcher(pool, block_size, caching, self.digests, self.pending, groups, force_miss, states)
        self._freeing = [number for number, group in enumerate(groups) if group.frees]
        self._lengths = {number: group.length for number, group in enumerate(groups) if type(group).length is not CacheGroup.length}
        self._most_held = [group.most_held(span, step_tokens) for group, span in zip(groups, self.spans)]

    # --- blocks ------------------------------------------------------------------------------------------------------

    def blocks_needed(self, seq: Sequence, hit: PrefixHit) -> int:
        """Free blocks needed to hold the whole present sequence, including hit blocks that are now free."""
        ref, needed = self.pool.ref, 0
        for table, span, most_held in zip(hit.tables, self.spans, self._most_held):
            fresh = -(-seq.num_tokens // span) - len(table)
            free = sum(ref[block] == 0 for block in table if block != NULL_BLOCK)
            needed += min(fresh + free, most_held)
        return needed

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks this many tokens can hold at once, in all groups."""
        return sum(min(-(-num_tokens // span), most_held) for span, most_held in zip(self.spans, self._most_held))

    def blocks_for_beams(self, shared: int, num_tokens: int, width: int) -> int:
        """How many blocks a number of beams of this length can hold, which have their first `shared` tokens in common.

        `shared` ends at a block boundary of every group. One more block is counted where blocks are freed: it may not be free yet.
        """
        own = self.blocks_for(num_tokens - shared) + len(self._freeing)
        return self.blocks_for(shared) + len(self.groups) + width * own

    def most_tokens(self) -> int:
        """The maximum length of one sequence in the whole pool."""
        return bisect_right(range(UNBOUNDED), self.pool.num_blocks - 1, key=self.blocks_for) - 1

    def admit(self, seq: Sequence, hit: PrefixHit) -> None:
        """Initialises tables from a hit, and announces the blocks this sequence is going to fill."""
        assert not any(seq.tables)
        for table in hit.tables:
            self.pool.share(_held(table))
        seq.tables = [list(table) for table in hit.tables]
        seq.num_planned = seq.num_computed = hit.num_tokens
        seq.num_sealed = hit.num_tokens // self.block_size
        if self.states is not None:
            self.states.admit(seq, hit.num_tokens, hit.common)
        if self.caching:
            self.prefixes.extend(seq, seq.num_tokens // self.block_size)
            for number, group in enumerate(self.groups):
                for digest in seq.digests[seq.num_sealed + group.links - 1 :: group.links]:
                    if self.pending.setdefault((number, digest), seq) is seq:
                        seq.pending.append((number, digest))

    def ask_for_state(self, seq: Sequence, awaited: BlockKey) -> None:
        """Has the sequence that computes a block keep the state after it, for a sequence that waits for it."""
        if self.states is not None:
            self.pending[awaited].marks.add((seq.digests.index(awaited[1]) + 1) * self.block_size)

    def have_room(self, seqs: list[Sequence]) -> bool:
        """Whether `allocate` can give all of these sequences room for all their tokens, one after the other, while it frees blocks."""
        pool, needed = self.pool, 0
        writers: Counter[int] = Counter()  # writers per partially filled block
        for seq in seqs:
            start, end = seq.num_planned, seq.target
            for table, span, most_held in zip(seq.tables, self.spans, self._most_held):
                held = len(table) - table.count(NULL_BLOCK)
                needed += min(-(-end // span) - len(table), most_held - held)
                if start % span and start < end:
                    writers[table[start // span]] += 1
        for block, count in writers.items():
            stays = pool.ref[block] == count and pool.key_of[block] is None  # the last one of them writes in place
            needed += count - stays
        return needed <= pool.num_free

    def allocate(self, seq: Sequence, count: int, plan: StepPlan) -> bool:
        """Allocates room for the next `count` positions and private copies of shared blocks. If there is not enough, changes nothing."""
        pool, start, last, needed = self.pool, seq.num_planned, seq.num_planned + count - 1, 0
        for table, span in zip(seq.tables, self.spans):
            needed += max(0, last // span + 1 - len(table))  # it may still have blocks of rejected drafts
            if start % span and count and not pool.writable(table[start // span]):
                needed += 1
        unread = self._unread(seq) if self._freeing else None
        if needed > len(pool.free) + (sum(pool.ref[seq.tables[group][index]] == 1 for group, index in unread) if unread else 0):
            return False
        if unread:
            self._free_unread(seq, unread, plan)
        room = UNBOUNDED
        for number, table in enumerate(seq.tables):
            span = self.spans[number]
            if start % span and count and not pool.writable(table[start // span]):
                self._copy(seq, number, start // span, plan)
            index = len(table)
            if index <= last // span:
                for block in pool.take(last // span + 1 - index):
                    plan.new_blocks.append((seq.row, number, index, block))
                    table.append(block)
                    index += 1
            if index * span < room:
                room = index * span
        seq.room = room
        return True

    def _copy(self, seq: Sequence, number: int, index: int, plan: StepPlan) -> None:
        """Replaces a shared or sealed block by a private copy."""
        table, (copy,) = seq.tables[number], self.pool.take(1)
        plan.copies.append((table[index], copy))
        plan.new_blocks.append((seq.row, number, index, copy))
        self.pool.release((table[index],))
        table[index] = copy

    def _unread(self, seq: Sequence) -> list[tuple[int, int]]:
        """Returns the (group, index) of blocks that are never read again."""
        return [
            (number, index)
            for number in self._freeing
            for index in self.groups[number].unread(seq.tables[number], seq.num_computed, self.spans[number])
        ]

    def _free_unread(self, seq: Sequence, unread: list[tuple[int, int]], plan: StepPlan) -> None:
        """Frees them, and tells the worker in the same plan, which is the first that no longer reads them and may reuse them."""
        self.seal(seq)  # while they are still in the table
        for number, index in unread:
            self.pool.release((seq.tables[number][index],))
            seq.tables[number][index] = NULL_BLOCK
            plan.new_blocks.append((seq.row, number, index, NULL_BLOCK))

    def begin_plan(self) -> None:
        """Releases the state slots that the last plan read."""
        if self.states is not None:
            self.states.begin()

    def plan_states(self, seq: Sequence, start: int, plan: StepPlan) -> None:
        """Adds the state slots of a sequence to the entry that was just planned, which begins at `start`."""
        if self.states is not None:
            self.states.plan(seq, start, plan)

    def plan_lengths(self, plan: StepPlan) -> None:
        """Writes into the plan the lengths of its entries in groups whose kind has its own `length`."""
        for number, length in self._lengths.items():
            plan.group_lengths[number] = [length(start + count) for start, count in zip(plan.start, plan.num_query)]

    def seal(self, seq: Sequence) -> None:
        """Seals the blocks that `num_computed` has filled, so that they enter the cache."""
        full, pool, pending = seq.num_computed // self.block_size, self.pool, self.pending
        if self.caching:
            self.prefixes.extend(seq, full)
            for number, group in enumerate(self.groups):
                table, links = seq.tables[number], group.links
                first, end = seq.num_sealed // links, full // links
                for index in range(first, end):
                    key = (number, seq.digests[(index + 1) * links - 1])
                    pool.seal(table[index], key)
                    if pending:
                        pending.pop(key, None)
                self.on_seal(seq, number, first, end)
            if self.states is not None:
                self.states.seal(seq)
        seq.num_sealed = full

    def keys_of(self, digests: list[bytes]) -> list[BlockKey]:
        """Returns the blocks that a hit of all these links needs, in every group. The hit must end at a block boundary of each group."""
        end = len(digests) * self.block_size
        return [
            (number, digests[(index + 1) * group.links - 1])
            for number, (group, span) in enumerate(zip(self.groups, self.spans))
            for index in range(group.first_read(end) // span, end // span)
        ]

    def find_all(self, seq: Sequence) -> list[int]:
        """Returns the blocks of `keys_of` for a computed prompt: all of it before its last token.

        A block is sealed again if its key is not in the index: it was a duplicate when it was computed, or the cache was emptied since.
        """
        blocks, end = [], seq.num_tokens - 1
        for number, (group, span) in enumerate(zip(self.groups, self.spans)):
            first = group.first_read(end) // span
            for index in range(first, end // span):
                key = (number, seq.digests[(index + 1) * group.links - 1])
                self.pool.seal(seq.tables[number][index], key)
                blocks.append(self.pool.index[key])
            self.on_seal(seq, number, first, end // span)
        return blocks

    @property
    def states_kept(self) -> int:
        """How many checkpoints have been kept so far."""
        return 0 if self.states is None else self.states.pool.counts.kept

    def numbers(self) -> dict[str, int]:
        """Returns the fields of `SchedulerStats` that count blocks and states."""
        numbers = {"free_blocks": self.pool.num_free, "pinned_blocks": len(self.pool.pinned)}
        if self.states is not None:
            pool, counts = self.states.pool, self.states.pool.counts
            numbers |= {"state_slots": pool.num_states - 1, "held_states": self.states.num_held, "checkpoints": len(pool.index)}
            numbers |= {"checkpoints_kept": counts.kept, "checkpoints_used": counts.used, "checkpoints_evicted": counts.evicted}
        return numbers

    def forget(self) -> None:
        """Empties the cache: only what is pinned can still be found."""
        self.pool.forget()
        if self.states is not None:
            self.states.pool.forget()

    # --- sequences ---------------------------------------------------------------------------------------------------

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Shares the parent's blocks with the child, except a block needed only for the last token, which the child computes itself.

        The first sequence that writes into a shared block copies it.
        """
        child.num_planned = min(parent.num_planned, parent.num_tokens - 1)
        child.num_computed, child.num_sealed = min(parent.num_computed, child.num_planned), parent.num_sealed
        child.tables = [table[: -(-child.num_planned // span)] for table, span in zip(parent.tables, self.spans)]
        for table in child.tables:
            self.pool.share(_held(table))
        child.digests = list(parent.digests)
        parent.room = child.room = 0
        if self.states is not None:
            self.states.fork(parent, child)

    def can_fork(self, parent: Sequence) -> bool:
        """Whether the state is kept with which a fork of it begins: no tokens are in flight."""
        return self.states is None or parent.num_planned < parent.num_tokens

    def shortest(self, seq: Sequence) -> int:
        """The minimum length it can be truncated to."""
        shortest = max(group.shortest(table, span) for group, table, span in zip(self.groups, seq.tables, self.spans))
        return shortest if self.states is None else max(shortest, seq.num_planned + 1)  # an earlier state is not kept

    def truncate(self, seq: Sequence, length: int) -> None:
        """Keeps its first `length` tokens and frees the blocks behind them; sealed ones stay cached."""
        assert self.shortest(seq) <= length <= seq.num_tokens
        del seq.token_ids[length:]
        seq.num_tokens, seq.retry_at = length, NEVER_TRIED
        seq.num_planned = cut = min(seq.num_planned, length - 1)  # sampling needs the last token computed again
        seq.num_computed, seq.num_sealed = min(seq.num_computed, cut), min(seq.num_sealed, cut // self.block_size)
        seq.room = 0
        for table, span in zip(seq.tables, self.spans):
            kept = -(-cut // span)
            self.pool.release(_held(table[kept:]))
            del table[kept:]
        self.forget_digests(seq, length // self.block_size)

    def forget_digests(self, seq: Sequence, kept: int) -> None:
        """Withdraws the digests and announcements after the first `kept` links, because the tokens there have changed."""
        gone = set(seq.digests[kept:])
        del seq.digests[kept:]
        self._withdraw(seq, [key for key in seq.pending if key[1] in gone])
        seq.pending = [key for key in seq.pending if key[1] not in gone]

    def _withdraw(self, seq: Sequence, keys: list[BlockKey]) -> None:
        for key in keys:
            if self.pending.get(key) is seq:
                del self.pending[key]

    def release(self, seq: Sequence) -> None:
        """Frees all blocks of the sequence and withdraws its announcements."""
        for table in seq.tables:
            self.pool.release(_held(table))
        seq.tables = [[] for _ in self.groups]
        seq.num_planned = seq.num_computed = seq.num_sealed = seq.room = 0
        if self.states is not None:
            self.states.release(seq)
        self._withdraw(seq, seq.pending)
        seq.pending = []


def _held(table: list[int]) -> list[int]:
    """Returns the blocks of a table, without null blocks."""
    return [block for block in table if block != NULL_BLOCK]
