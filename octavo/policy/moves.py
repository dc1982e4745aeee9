"""`Moves`: forks or truncates a sequence that has generated tokens, or replaces its last id, between two plans.

The next plan informs the worker (`policy/rows.py`).
"""

from array import array
from bisect import insort
from collections.abc import Callable

from octavo.policy.kv_manager import KVManager
from octavo.policy.request import Request, Sequence, Status, policy_key
from octavo.policy.rows import Rows

NewSequence = Callable[[Request, int, "array[int]", int], Sequence]  # request, sample, token ids, limit


class Moves:
    def __init__(
        self,
        kv: KVManager,
        rows: Rows,
        waiting: list[Sequence],
        running: list[Sequence],
        planned: dict[int, list[Sequence]],
        new_sequence: NewSequence,
    ) -> None:
        """The lists are the scheduler's own. `planned`: step -> its sequences, for plans whose result has not arrived"""
        self._kv = kv
        self._rows = rows
        self._waiting = waiting
        self._running = running
        self._planned = planned
        self._new_sequence = new_sequence

    def fork(self, parent: Sequence, index: int) -> Sequence | None:
        """Creates sample `index` from the tokens the host knows of another sample.

        Returns None if that one runs, and no row is free or its state before the last of these tokens is gone.
        """
        assert not parent.unforked and parent.status is not Status.FINISHED
        if parent.status is Status.RUNNING and not (self._rows.free and self._kv.can_fork(parent)):
            return None
        child = self._new_sequence(parent.request, index, array("i", parent.token_ids), parent.limit)
        if parent.status is Status.WAITING:
            insort(self._waiting, child, key=policy_key)
            return child
        child.status = Status.RUNNING
        self._rows.fork(parent, child)
        self._kv.fork(parent, child)
        insort(self._running, child, key=policy_key)
        return child

    def truncate(self, seq: Sequence, length: int) -> None:
        """Keeps its first `length` tokens, which must include the prompt. Tokens in flight behind them are dropped on arrival."""
        assert seq.request.num_prompt <= length and seq.request.num_prompt < seq.num_tokens and seq.status is not Status.FINISHED
        if seq.num_planned >= length or seq.in_flight:
            self.drop_in_flight(seq)
        self._kv.truncate(seq, length)
        if seq.status is Status.RUNNING:
            self._rows.shorten(seq)

    def drop_in_flight(self, seq: Sequence) -> None:
        """Discards the results of plans in flight for it. A finished sequence takes its place in them: a fault still ends the request."""
        ended = Sequence(-1, seq.request, seq.index, array("i"), 0, by_priority=False)
        ended.status = Status.FINISHED
        for planned in self._planned.values():
            planned[:] = [ended if other is seq else other for other in planned]
        seq.in_flight = 0

    def replace_last(self, seq: Sequence, token: int) -> None:
        """Replaces its last id, which no plan has computed yet."""
        assert seq.in_flight == 0 and seq.request.num_prompt < seq.num_tokens and seq.num_planned < seq.num_tokens
        seq.token_ids[-1] = token
        self._kv.forget_digests(seq, (seq.num_tokens - 1) // self._kv.block_size)
        if seq.status is Status.RUNNING:
            self._rows.replace_last(seq)
