"""`Rows`: which rows are free, and the pending row updates that the worker has not received.

Between two plans sequences may be forked, exchange their rows, be truncated, or have their last id replaced. The next plan contains
all of these updates. Until then the worker still has a sequence in its previous row, which is its source.

    fork        row 5 <- row 2                   a new sequence starts as a copy of its parent
    exchange    row 2 <- row 4, row 4 <- row 2    every source is read before any row is written

If a sequence ends before the next plan, its pending updates are dropped. Its row may be reused at once: sources are read first.
"""

from octavo.messages import RowFork, StepPlan
from octavo.policy.request import Sequence


class Rows:
    def __init__(self, count: int) -> None:
        self.free = list(range(count - 1, -1, -1))
        self._sources: dict[Sequence, int] = {}  # of sequences whose row the worker does not have yet
        self._forked: set[Sequence] = set()  # those of them that are copies, which leave their source unchanged
        self._shortened: dict[Sequence, None] = {}
        self._replaced: dict[Sequence, None] = {}

    def take(self, seq: Sequence) -> None:
        """Takes a row for a sequence, and reserves more for the samples it represents."""
        seq.row = self.free.pop()
        seq.reserved = [self.free.pop() for _ in range(seq.rows_needed - 1)]

    def release(self, seq: Sequence) -> None:
        self.free.append(seq.row)
        self.free.extend(seq.reserved)
        seq.row, seq.reserved = -1, []
        for pending in (self._sources, self._shortened, self._replaced):
            pending.pop(seq, None)
        self._forked.discard(seq)

    def source(self, seq: Sequence) -> int:
        """The row in which the worker has this sequence now."""
        return self._sources.get(seq, seq.row)

    def is_sent(self, seq: Sequence) -> bool:
        """Whether the worker has received all updates of this sequence."""
        return not any(seq in pending for pending in (self._sources, self._shortened, self._replaced))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Takes a free row for a copy of `parent`, with the tokens that the host knows."""
        child.row = self.free.pop()
        self._sources[child] = self.source(parent)
        self._forked.add(child)
        self._shortened[child] = None
        if parent in self._replaced:
            self._replaced[child] = None

    def exchange(self, one: Sequence, other: Sequence) -> None:
        assert one.row >= 0 and other.row >= 0, "only sequences that run have rows"
        sources = self.source(one), self.source(other)
        one.row, other.row = other.row, one.row
        for seq, source in zip((one, other), sources):
            self._sources[seq] = source
            if source == seq.row and seq not in self._forked:  # a copy is sent even then: that row has the noise key of its parent
                del self._sources[seq]

    def shorten(self, seq: Sequence) -> None:
        self._shortened[seq] = None

    def replace_last(self, seq: Sequence) -> None:
        self._replaced[seq] = None

    def put_into(self, plan: StepPlan) -> list[Sequence]:
        """Moves all pending updates into a plan. Returns the sequences that they concern."""
        if not (self._sources or self._shortened or self._replaced):
            return []
        sequences = [*self._sources, *self._shortened, *self._replaced]
        for seq, source in self._sources.items():
            moves = seq not in self._forked
            plan.row_forks.append(RowFork(seq.row, source, seq.seq_id, seq.request.noise(seq.index), moves))
        plan.lengths += [(seq.row, seq.num_tokens) for seq in self._shortened]
        plan.last_ids += [(seq.row, seq.token_ids[-1]) for seq in self._replaced]
        for pending in (self._sources, self._shortened, self._replaced):
            pending.clear()
        self._forked.clear()
        return sequences
