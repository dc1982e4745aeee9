"""`BeamGroups`: the sequences of requests that use beam search. `policy/beam.py` selects the beams, and this module moves sequences.

    prompt ─► one sequence ─► candidates ─► width sequences ─► candidates of each ─► a choice ─► ... ─► answers
                  ▲                              │ preempted: all of them at once
                  └── their common prefix ◄──────┘ the tokens after it are stored here, and computed again for each beam

Beams that continue in place keep their row and blocks. Others are forked, by reference, into the rows of beams that ended. A beam that
has sampled its candidates is not planned again before the choice, so when a choice is made nothing of its group is in flight.
"""

from array import array
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from math import lcm

from octavo.errors import RequestError
from octavo.messages import Delta, Ending, FinishReason, StepPlan, TokenLogprobs
from octavo.policy.beam import BeamAnswer, BeamSearch
from octavo.policy.kv_manager import KVManager
from octavo.policy.moves import Moves, NewSequence
from octavo.policy.request import Request, Sequence, Status, policy_key
from octavo.policy.rows import Rows


@dataclass(slots=True)
class BeamGroup:
    request: Request
    search: BeamSearch
    sequences: list[Sequence]  # in the order of the beams; only one before the first choice, and while the group is parked
    found: dict[Sequence, TokenLogprobs] = field(default_factory=dict)  # candidates received since the last choice
    parked: list["array[int]"] = field(default_factory=list)  # the ids of every beam, while one sequence represents all


class BeamGroups:
    def __init__(
        self,
        kv: KVManager,
        rows: Rows,
        running: list[Sequence],
        moves: Moves,
        new_sequence: NewSequence,
        remove: Callable[[Sequence, Ending], None],
    ) -> None:
        """`running` is the scheduler's own list. `remove`: takes a sequence out of the engine"""
        self._kv = kv
        self._rows = rows
        self._running = running
        self._moves = moves
        self._new_sequence = new_sequence
        self._remove = remove
        self._span = lcm(*kv.spans)  # a prefix of a multiple of this length ends at a block boundary of every cache group
        self.groups: dict[str, BeamGroup] = {}  # by request

    def check_size(self, num_prompt: int, limit: int, width: int, pinned: int) -> None:
        """Refuses a group that could outgrow the cache: it would be preempted and restarted for ever. `pinned`: blocks it cannot use"""
        needed, most = self._blocks_for(num_prompt, limit, width), self._kv.pool.num_blocks - 1 - pinned
        if needed > most:
            beside = f" beside {pinned} pinned ones" if pinned else ""
            raise RequestError(
                f"{width} beams may grow to {needed} blocks of {self._kv.block_size} tokens, but the KV cache has {most}{beside}; lower "
                "max_tokens or the beam width, or enlarge the KV cache (--kv-cache-memory-bytes, --num-gpu-blocks-override)",
                "max_tokens",
                "context_length_exceeded",
            )

    def _blocks_for(self, num_prompt: int, limit: int, width: int) -> int:
        return self._kv.blocks_for_beams(num_prompt // self._span * self._span, limit, width)

    def most_needed(self) -> int:
        """Returns how many blocks the largest group can grow to."""
        found = ((group.request.num_prompt, group.sequences[0].limit, group.request.num_samples) for group in self.groups.values())
        return max((self._blocks_for(*numbers) for numbers in found), default=0)

    def add(self, seq: Sequence) -> None:
        """Starts a search with the sequence of a prompt."""
        request, beams = seq.request, seq.request.beams
        assert beams is not None
        search = BeamSearch(beams, request.end_ids, seq.limit - request.num_prompt)
        self.groups[request.request_id] = BeamGroup(request, search, [seq])
        self._set_needs(seq, beams.width, (beams.width - 1) * len(self._kv.groups))

    def _set_needs(self, seq: Sequence, rows: int, blocks: int) -> None:
        seq.rows_needed, seq.blocks_for_others = rows, blocks

    def members(self, seq: Sequence) -> list[Sequence]:
        """Returns the beams of its group."""
        return self.groups[seq.request.request_id].sequences

    # --- a choice ----------------------------------------------------------------------------------------------------

    def hear(self, seq: Sequence, found: TokenLogprobs) -> None:
        """Records the candidates that a beam sampled. The last id of the beam is provisional until the choice."""
        self.groups[seq.request.request_id].found[seq] = found

    def choose(self, request: Request) -> list[Delta]:
        """Makes a choice if all beams have their candidates. Returns the answers if it was the last choice."""
        group = self.groups.get(request.request_id)
        if group is None or len(group.found) < len(group.sequences):
            return []
        chosen = group.search.choose([group.found[seq] for seq in group.sequences])
        group.found.clear()
        if not chosen:
            return self._answer(group)
        self._follow(group, chosen)
        return []

    def _follow(self, group: BeamGroup, chosen: list[tuple[int, int]]) -> None:
        """Turns the sequences into the chosen beams. The first successor of a beam continues in its place, the others are forks of it."""
        old = group.sequences
        self._share_rows(old[0])
        heirs = {parent for parent, _ in chosen}
        for place, seq in enumerate(old):
            if place not in heirs:
                self._remove(seq, "lost")
        taken = {old[place].index for place in heirs}
        free = [index for index in range(len(chosen)) if index not in taken]
        group.sequences = []
        for parent, token in chosen:
            seq = old[parent]
            if seq in group.sequences:
                seq = self._fork(seq, free.pop())
            group.sequences.append(seq)
            seq.stop_at = seq.limit - 1
            if seq.token_ids[-1] != token:
                self._moves.replace_last(seq, token)

    def _share_rows(self, seq: Sequence) -> None:
        """Makes the rows that were reserved for the other beams available to them."""
        self._rows.free.extend(seq.reserved)
        seq.reserved = []
        self._set_needs(seq, 1, 0)

    def _fork(self, parent: Sequence, index: int) -> Sequence:
        child = self._moves.fork(parent, index)
        assert child is not None, "a group has as many rows as beams"
        child.since, child.lost, child.preemptions = parent.since, parent.lost, parent.preemptions
        return child

    # --- a preemption ------------------------------------------------------------------------------------------------

    def park(self, seq: Sequence) -> Sequence:
        """Preempts all beams: the first one represents all of them, cut to their common prefix. Returns it, and the caller preempts it."""
        group = self.groups[seq.request.request_id]
        self._moves.drop_in_flight(group.sequences[0])
        if len(group.sequences) == 1:
            seq.stop_at = seq.stop_at if group.parked else seq.limit - 1
            return seq
        length = group.request.num_prompt + group.search.length
        first, *others = group.sequences
        group.parked = [beam.token_ids[:length] for beam in group.sequences]
        group.sequences = [first]
        group.found.clear()
        for other in others:
            self._remove(other, "lost")
        cut = _shared(group.parked) // self._span * self._span
        self._set_tokens(first, group.parked[0][: cut + 1], cut)
        width = len(group.parked)
        self._set_needs(first, width, width * self._kv.blocks_for(length - cut))
        return first

    def _set_tokens(self, seq: Sequence, token_ids: "array[int]", stop_at: int) -> None:
        self._kv.forget_digests(seq, min(seq.num_tokens, len(token_ids)) // self._kv.block_size)
        seq.token_ids, seq.num_tokens, seq.stop_at = token_ids, len(token_ids), stop_at

    def unpark(self, plan: StepPlan) -> None:
        """Restores the beams of groups whose common prefix has been computed."""
        for group in self.groups.values():
            first = group.sequences[0]
            if group.parked and first.status is Status.RUNNING and first.num_computed == first.stop_at:
                self._unpark(group, plan)

    def _unpark(self, group: BeamGroup, plan: StepPlan) -> None:
        """Writes each beam into a row, as if it had been found in the cache up to the point where the beams differ."""
        first, parked = group.sequences[0], group.parked
        self._kv.seal(first)
        free = [index for index in range(len(parked)) if index != first.index]
        for token_ids in parked[1:]:
            beam = self._new_sequence(group.request, free.pop(), token_ids, first.limit)
            beam.row, beam.status, beam.since = first.reserved.pop(), Status.RUNNING, plan.step
            beam.lost, beam.preemptions = first.lost, first.preemptions
            self._kv.fork(first, beam)
            self._kv.forget_digests(beam, beam.num_planned // self._kv.block_size)  # the next id of the first beam may differ
            insort(self._running, beam, key=policy_key)
            group.sequences.append(beam)
        self._share_rows(first)
        self._set_tokens(first, parked[0], first.limit - 1)
        group.parked = []
        plan.row_writes += [beam.row_write(beam.num_planned) for beam in group.sequences]

    # --- the end -----------------------------------------------------------------------------------------------------

    def _answer(self, group: BeamGroup) -> list[Delta]:
        answers = group.search.answers[: group.request.params.n]
        for seq in group.sequences:
            self._kv.seal(seq)
        self._leave(group, answers[0].finish_reason)
        return [_delta(group.request, index, answer) for index, answer in enumerate(answers)]

    def end(self, request: Request, reason: FinishReason, error: str | None, code: str | None) -> list[Delta]:
        """Ends a request early, with all its sequences."""
        self._leave(self.groups[request.request_id], reason)
        name, life = request.request_id, request.life
        return [Delta(name, index, [], finish_reason=reason, error=error, code=code, life=life) for index in range(request.params.n)]

    def _leave(self, group: BeamGroup, reason: FinishReason) -> None:
        for seq in group.sequences:
            self._remove(seq, reason)
        del self.groups[group.request.request_id]

    def check(self) -> None:
        """Asserts the invariants between the groups and their sequences."""
        for group in self.groups.values():
            length = group.request.num_prompt + group.search.length
            assert group.request.sequences and set(group.request.sequences) == set(group.sequences)
            assert len({seq.status for seq in group.sequences}) == 1, "a group runs and waits as a whole"
            if len(group.sequences) == 1 and group.search.width > 1:
                assert group.sequences[0].rows_needed == group.search.width
            for seq in group.sequences:
                assert bool(group.parked) or seq.num_tokens == length + (seq in group.found), "a beam is ahead of its group"


def _shared(beams: list["array[int]"]) -> int:
    """Returns the length of the common prefix of all beams."""
    shortest, longest = min(beams), max(beams)  # the first and the last in lexicographic order
    return next((at for at, (one, other) in enumerate(zip(shortest, longest)) if one != other), len(shortest))


def _delta(request: Request, index: int, answer: BeamAnswer) -> Delta:
    steps, count = answer.steps(), request.reported_logprobs
    logprobs = None if count is None else [step.logprobs.best(count) for step in steps]
    return Delta(request.request_id, index, [step.token for step in steps], logprobs, answer.finish_reason, life=request.life)
