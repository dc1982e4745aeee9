"""`States`: which state slots a sequence of a recurrent model has, and which of them are kept as checkpoints.

A recurrent layer computes its state from all tokens so far, so a prefix can be continued only from a position whose state was kept.

    positions   0 ........ 1024 ........ 2048 ......... 2100 (num_planned)
    slots       null        7*            3*             5      5 is the live one, which the next step reads; * are checkpoints

A step reads the live slot and writes another, which is live from then on. What it read is released with the next plan, unless it is a
checkpoint: that one is sealed under the digest of its tokens when they are computed, like a block, and later sequences start from it.
A checkpoint on the way of a step is one more slot that it writes. A fork shares the live slot. So no state is ever copied.

Checkpoints are kept at block edges (`_wanted`): on a grid whose gaps grow, at the ends of messages, at the end of the prompt, at the
point where a sequence left the prefix that it has in common with earlier ones, and at the end of what was generated.

Two slots for each row are always available to steps. Of the others, pins and checkpoints that are not sealed yet may each hold a half.
"""

from bisect import bisect_right
from collections import Counter

from octavo.messages import StepPlan
from octavo.policy.request import Sequence
from octavo.policy.state_pool import NULL_STATE, OnStateEvent, StatePool

LEAST_GAP = 256  # tokens between two checkpoints of the grid
GROWTH = 4  # a gap is at least this part of the position where it begins


class States:
    def __init__(
        self, num_states: int, num_rows: int, block_size: int, max_len: int, caching: bool, on_event: OnStateEvent | None = None
    ) -> None:
        self.pool = StatePool(num_states, on_event)
        spare = num_states - 1 - 2 * num_rows  # slots beside those that steps need
        assert spare >= 0, f"{num_states} state slots for {num_rows} rows"
        self.most_pinned = spare // 2
        self._most_beside = spare - self.most_pinned
        self._block_size = block_size
        self.caching = caching and spare > 0  # whether checkpoints are kept
        self._grid = grid(max_len, block_size)
        self._beside = 0  # slots that sequences hold beside their live ones
        self._read: list[int] = []  # live slots that the last plan read
        self._covered = [0] * num_states  # slot -> tokens that its checkpoint covers

    # --- steps -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Releases what the last plan read. A step must not write what another entry of the same step reads."""
        for slot in self._read:
            self.pool.release(slot)
        self._read = []

    def plan(self, seq: Sequence, start: int, plan: StepPlan) -> None:
        """Adds the slots of a sequence to the entry that was just planned, which begins at `start`."""
        end, write = seq.num_planned, self.pool.take()
        position, read = seq.states[-1] if seq.states else (0, NULL_STATE)
        plan.states.append((read, write))
        if position in seq.unsealed and self._beside < self._most_beside:
            self._beside += 1
        elif seq.states:
            self._read.append(seq.states.pop()[1])
            seq.unsealed.discard(position)
        for position in self._wanted(seq, start, end):
            if position == end:
                seq.unsealed.add(end)
            elif self._beside < self._most_beside:
                self._beside += 1
                slot = self.pool.take()
                plan.checkpoints.append((len(plan.row) - 1, position, slot))
                seq.states.append((position, slot))
                seq.unsealed.add(position)
        seq.states.append((end, write))

    def _wanted(self, seq: Sequence, start: int, end: int) -> list[int]:
        """Returns the positions after `start` and up to `end` at which a checkpoint is wanted, in ascending order."""
        if not self.caching or start // self._block_size == end // self._block_size:
            return []
        grid = self._grid[bisect_right(self._grid, start) : bisect_right(self._grid, end)]
        wanted = {*grid, *(position for position in seq.marks if start < position <= end)}
        if end % self._block_size == 0 and end >= seq.request.num_prompt:
            wanted.add(end)
        return sorted(wanted)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def reach(self, digests: list[bytes], links: int) -> int:
        """Returns the longest prefix of at most `links` links after which a state is kept."""
        index = self.pool.index
        while links and digests[links - 1] not in index:
            links -= 1
        return links

    def was_evicted(self, digests: list[bytes]) -> bool:
        """Whether there was a checkpoint after any of these links."""
        return any(digest in self.pool.evicted for digest in digests)

    def seal(self, seq: Sequence) -> None:
        """Seals the checkpoints whose tokens have been computed. Of those in what was generated only the last is kept."""
        if not seq.unsealed:
            return
        held, live = [], seq.states[-1]
        for position, slot in seq.states:
            if position in seq.unsealed and position <= seq.num_computed:
                seq.unsealed.remove(position)
                self._seal(seq, position, slot)
            if (position, slot) == live or position in seq.unsealed:
                held.append((position, slot))
            else:
                self.pool.release(slot)
                self._beside -= 1
        seq.states = held

    def _seal(self, seq: Sequence, position: int, slot: int) -> None:
        key = seq.digests[position // self._block_size - 1]
        if seq.tail is not None:
            self.pool.drop(seq.tail)
        self.pool.seal(slot, key, position - seq.last_kept)
        self._covered[self.pool.index[key]] = position
        is_tail = position > seq.request.num_prompt and position not in seq.marks and not self._is_on_grid(position)
        seq.tail = key if is_tail and self.pool.key_of[slot] == key else None
        if not is_tail:
            seq.last_kept = position

    def _is_on_grid(self, position: int) -> bool:
        at = bisect_right(self._grid, position) - 1
        return at >= 0 and self._grid[at] == position

    def find(self, seq: Sequence, num_tokens: int) -> int:
        """Returns the slot of the state after the first tokens of a sequence, sealed again if the cache was emptied since."""
        key = seq.digests[num_tokens // self._block_size - 1]
        if key not in self.pool.index:
            position, slot = seq.states[-1]
            assert position == num_tokens, "the state after a pinned prefix was not kept"
            self.pool.seal(slot, key, num_tokens)
            self._covered[slot] = num_tokens
        return self.pool.index[key]

    # --- sequences ---------------------------------------------------------------------------------------------------

    def admit(self, seq: Sequence, num_tokens: int, common: int) -> None:
        """Lets a sequence start with the state after its first `num_tokens` tokens. `common`: tokens whose blocks were found"""
        size = self._block_size
        seq.states, seq.unsealed, seq.tail, seq.last_kept = [], set(), None, num_tokens
        if num_tokens:
            seq.states = [(num_tokens, self.pool.use(seq.digests[num_tokens // size - 1]))]
        request = seq.request
        ends = [*request.checkpoints, common, seq.num_tokens - 1, *([request.num_prompt] if request.pin is not None else ())]
        seq.marks = {end // size * size for end in ends}

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Shares the live slot of the parent, which both read."""
        position, slot = parent.states[-1] if parent.states else (0, NULL_STATE)
        assert position == child.num_planned, "a fork needs the state before its next token"
        self.pool.share(slot)
        child.states, child.unsealed, child.marks, child.tail = [(position, slot)] if slot else [], set(), set(), None
        child.last_kept = parent.last_kept

    def release(self, seq: Sequence) -> None:
        """Releases all slots of a sequence."""
        for _, slot in seq.states:
            self.pool.release(slot)
        self._beside -= max(0, len(seq.states) - 1)
        seq.states, seq.unsealed = [], set()

    def kept_of(self, seq: Sequence) -> list[int]:
        """Returns after how many tokens of a sequence a state is kept, in ascending order."""
        size, digests = self._block_size, seq.digests
        kept = ((self._covered[slot], key) for key, slot in self.pool.index.items())
        return sorted(count for count, key in kept if count <= len(digests) * size and digests[count // size - 1] == key)

    @property
    def num_held(self) -> int:
        """How many slots sequences and pins hold. Those that were only read by the last plan are released with the next one."""
        return self.pool.num_held - sum(self.pool.ref[slot] == count for slot, count in Counter(self._read).items())

    def check(self, running: list[Sequence]) -> None:
        """Asserts that slots and sequences agree, between two plans."""
        self.pool.check()
        held = [slot for seq in running for _, slot in seq.states] + self._read + list(self.pool.pinned.elements())
        assert all(self.pool.ref[slot] == held.count(slot) for slot in range(1, self.pool.num_states)), "a state slot leaked"
        assert self._beside == sum(len(seq.states) - 1 for seq in running if seq.states)
        for seq in running:
            positions = [position for position, _ in seq.states]
            assert positions == sorted(set(positions)) and (positions or [0])[-1] == seq.num_planned, "no live state"
            assert seq.unsealed <= set(positions) and set(positions[:-1]) <= seq.unsealed


def grid(max_len: int, block_size: int) -> list[int]:
    """Returns positions at block edges, with gaps of a quarter of the position and at least `LEAST_GAP` tokens.

    They are the same for all sequences, so that sequences with a common prefix find the checkpoints of each other.
    """
    positions: list[int] = []
    at = 0
    while at < max_len:
        at = (at + max(LEAST_GAP, at // GROWTH)) // block_size * block_size or block_size
        positions.append(at)
    return positions
