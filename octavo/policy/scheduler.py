"""`Scheduler`: decides which sequences get tokens in the next step. It owns every id; its decisions are data (`StepPlan`).

There are no phases. A step has one token budget; sequences draw from it until each has caught up with its own tokens.

    schedule    fork sequences that reached their last prompt token -> walk `running` in policy order, decode is never starved,
                victims from the end -> admit whole sequences that fit from `waiting`, unless a sequence was preempted
    update      append sampled tokens, seal full blocks, end finished sequences; a preempted sequence keeps only its tokens

Plans run in order on one stream, so blocks and rows freed here are reusable at once.

A request in the base case passes through six methods: `add`, `schedule`, `_plan_running`, `_plan`, `update` and `_deliver`. Read these
first, and skip every branch about beams, pins, turns (grammars), stages and several tokens per row: none is taken.
"""

import time
from array import array
from bisect import insort
from collections.abc import Callable
from dataclasses import replace

from octavo.errors import RequestError
from octavo.messages import AddRequest, Delta, Ending, FinishReason, Limits, RowFork, SchedulerStats, StepPlan, StepResult, TokenLogprobs
from octavo.policy.admission import LINKS_PER_STEP, Admission, budget_of_prefills, share_of_plan
from octavo.policy.beam_groups import BeamGroups
from octavo.policy.drafts import Draft, Drafts, up_to_end
from octavo.policy.kv_manager import KVManager
from octavo.policy.moves import Moves
from octavo.policy.pins import Pins
from octavo.policy.request import NEVER_TRIED, Request, Sequence, Status, check_request, length_limit, policy_key
from octavo.policy.rows import Rows

SEALS_PER_STEP = 32  # larger batches seal in turns: if all sequences cross a block boundary together, the work is spread over several steps
RESUMED = 1 << 40  # a request that began on another engine goes before all new ones: its client has already received tokens
NOT_FINITE = "numerical_error: values that are not finite, or an id outside the vocabulary"


class Scheduler:
    def __init__(
        self,
        kv: KVManager,
        limits: Limits,
        by_priority: bool = False,
        end_ids: tuple[int, ...] = (),
        seed: int = 0,
        preempt_every: int = 0,
        clock: Callable[[], float] = time.monotonic,
        stages: int = 1,
        draft: Draft | None = None,
    ) -> None:
        """`stages`: of a pipeline. As many plans are in flight, and sequences are divided among them: none is in two that sample.
        `draft`: proposes ids that may come next. It must know all ids so far, so then no sequence is planned while tokens are in flight.
        """
        assert limits.max_num_seqs <= limits.max_num_batched_tokens, "the tokens of one step may not fit into the next"
        self.kv = kv
        self.limits = replace(limits, cache_tokens=kv.most_tokens())
        self.by_priority = by_priority
        self.end_ids = frozenset(end_ids)
        self.seed = seed
        self.preempt_every = preempt_every
        self.stages = stages
        self.clock = clock
        self.on_end: Callable[[Sequence, Ending], None] = lambda seq, reason: None  # called while the sequence still has its blocks
        self.step = 0
        self.mask_turns = 1  # a sequence with a grammar is planned in one of this many steps, if masks take long
        self.waiting: list[Sequence] = []  # both in policy order
        self.running: list[Sequence] = []
        self.requests: dict[str, Request] = {}  # the live ones
        self.rows = Rows(limits.max_num_seqs)
        self.stats = SchedulerStats(0, 0, 0, kv.pool.num_blocks, 0, 0, 0, 0, 0)
        self._planned: dict[int, list[Sequence]] = {}  # step -> its sequences, until its update
        self._updated: dict[int, list[Sequence]] = {}  # step -> sequences whose row updates it contains, if any
        self.pins = Pins(kv, self.limits, self.stats, clock)
        links = max(LINKS_PER_STEP, limits.max_num_batched_tokens // kv.block_size)  # no fewer than a step computes
        self.admission = Admission(kv, self.waiting, self.running, self.rows, self.pins, self.stats, clock, links)
        self.moves = Moves(kv, self.rows, self.waiting, self.running, self._planned, self._new_sequence)
        self.beams = BeamGroups(kv, self.rows, self.running, self.moves, self._new_sequence, self._remove)
        self.drafts = Drafts(kv, self.rows, self.waiting, draft)
        self._arrivals = 0
        self._seq_ids = 0

    def add(self, message: AddRequest) -> None:
        """Queues a request, or refuses one that can never be served."""
        if message.request_id in self.requests:
            raise RequestError(f"request id {message.request_id!r} is already in use", "request_id")
        check_request(message, self.limits)
        if message.pin is not None:
            message = self.pins.begin(message, self.beams.most_needed())
        prompt, limit = message.prompt_token_ids, length_limit(message, self.limits)
        if message.beams is not None:
            self.beams.check_size(len(prompt), limit, message.beams.width, self.pins.num_blocks)
        arrival = self._arrivals - (RESUMED if message.outputs else 0)
        request = Request(message, arrival, self.kv.digests.root(message), self.end_ids, self.seed, self.clock())
        self._arrivals += 1
        self.requests[request.request_id] = request
        if message.outputs is not None:
            for index, output in message.outputs.items():
                assert len(prompt) + len(output) < limit, "a sample that had ended was begun again"
                insort(self.waiting, self._new_sequence(request, index, array("i", prompt + output), limit), key=policy_key)
            return
        self.admission.unscheduled[request.request_id] = request
        seq = self._new_sequence(request, 0, array("i", prompt), limit)
        if message.beams is not None:
            self.beams.add(seq)
        elif request.params.n > 1:
            seq.stop_at, seq.rows_needed = request.num_prompt - 1, request.params.n
        insort(self.waiting, seq, key=policy_key)

    def _new_sequence(self, request: Request, index: int, token_ids: "array[int]", limit: int) -> Sequence:
        seq = Sequence(self._seq_ids, request, index, token_ids, limit, self.by_priority, len(self.kv.groups))
        self._seq_ids += 1
        request.sequences.append(seq)
        return seq

    def abort(self, request_id: str, index: int | None = None) -> list[Delta]:
        """Ends a request, or one sample of it, in any state. Unknown or ended ones are ignored. Beams end together."""
        request = self.requests.get(request_id)
        if request is None:
            return []
        if request.beams is not None:
            return self.beams.end(request, "abort", None, None)
        seqs = [seq for seq in request.sequences if index is None or (seq.index == index and not seq.unforked)]
        if seqs:
            return [delta for seq in seqs for delta in self.finish(seq, "abort")]
        parent = next((seq for seq in request.sequences if seq.unforked), None)
        if parent is None or index is None or not 0 <= index < request.params.n or index in request.aborted:
            return []
        if len(request.aborted) + 1 == request.params.n:
            return self.finish(parent, "abort")
        request.aborted.add(index)
        return [Delta(request_id, index, [], finish_reason="abort", life=request.life)]

    def expire(self, seconds: float) -> list[Delta]:
        """Ends every request that waited this long and was never admitted. Costs nothing if there is none."""
        deltas: list[Delta] = []
        while (request := next(iter(self.admission.unscheduled.values()), None)) is not None:
            if (waited := self.clock() - request.life.queued) < seconds:
                break
            deltas += self.fail_request(request, f"waited {waited:.1f} s in the queue, queue_timeout is {seconds:g} s", "queue_timeout")
        return deltas

    def schedule(self) -> StepPlan:
        """Returns the plan of the next step. It may be empty while results are awaited."""
        self.step += 1
        plan = StepPlan(self.step)
        planned = self._planned.setdefault(plan.step, [])
        self.kv.begin_plan()
        preempted = self._preempt_on_schedule()
        for parent in self.admission.unforked.copy():
            if parent.num_planned == parent.stop_at:
                self._fork(parent, plan)
        if self.beams.groups:
            self.beams.unpark(plan)
        if updated := self.rows.put_into(plan):
            self._updated[plan.step] = updated
        budget, starved = self._plan_running(plan, planned)
        if self.waiting and not (preempted or starved):
            for seq, count in self.admission.admit(plan, budget, self.mask_turns):
                if count:
                    self._plan(seq, count, plan, planned)
        self.kv.plan_lengths(plan)
        return plan

    def _plan_running(self, plan: StepPlan, planned: list[Sequence]) -> tuple[int, bool]:
        """Plans tokens for running sequences. Returns the budget left, and whether a sequence was preempted."""
        running, kv, is_running = self.running, self.kv, Status.RUNNING
        budget, share = share_of_plan(self.limits, running, self.stages, len(self._planned))
        prefill_budget = budget_of_prefills(budget, running) if self.waiting and self.rows.free else budget
        beams: Request | None = None  # the last request whose beams were given room
        lacking: int | None = None  # tokens that prefills from here on need; computed at the first prefill
        preempted, turns, drafting = False, self.mask_turns, self.drafts.source is not None
        one_plan = drafting or self.stages > 1
        after = len(running)  # reserved for the sequences behind, so that decode is never starved
        for seq in running.copy():
            after -= 1
            if seq.status is not is_running:
                break  # it was preempted for an earlier sequence, and so were all behind it
            count = min(seq.num_tokens + seq.in_flight, seq.stop_at) - seq.num_planned
            if one_plan and seq.in_flight:
                continue  # its next drafts depend on its tokens, or its token is still in the pipeline
            if turns > 1 and not seq.has_turn(self.step, turns):
                continue
            if count <= 1:
                if count <= 0 or share == 0:
                    continue  # waits for its result, or for the next plan
                share -= 1
            else:
                lacking = (self._prefill_lack() if lacking is None else lacking) - count  # needed by those behind: leave it, at most half
                count = max(0, min(count, budget - after, max(prefill_budget - lacking, (prefill_budget + 1) // 2)))
                prefill_budget -= count
            if count == 0:
                continue  # waits for its turn
            if seq.request.beams is not None and seq.rows_needed == 1 and seq.request is not beams:
                beams, preempted = seq.request, self._make_room_for_beams(seq) or preempted
                if seq.status is not is_running:
                    break
            while not (seq.num_planned + count <= seq.room or kv.allocate(seq, count, plan)):
                victim = running[-1]
                self._preempt(victim)
                preempted = True
                if victim is seq:
                    break
            if seq.status is is_running:
                self._plan(seq, count, plan, planned)
                budget -= count
                if drafting and plan.outputs[-1]:
                    budget -= self.drafts.add(seq, budget - after, plan)
        return budget, preempted

    def _prefill_lack(self) -> int:
        """The tokens that running prefills need, together."""
        return sum(lack for seq in self.running if (lack := seq.target - seq.num_planned) > 1)

    def _plan(self, seq: Sequence, count: int, plan: StepPlan, planned: list[Sequence]) -> None:
        start, end = seq.num_planned, seq.num_planned + count
        samples = end == seq.num_tokens + seq.in_flight
        plan.row.append(seq.row)
        plan.seq_id.append(seq.seq_id)
        plan.start.append(start)
        plan.num_query.append(count)
        plan.outputs.append(1 if samples else 0)
        planned.append(seq)
        seq.num_planned = end
        self.kv.plan_states(seq, start, plan)
        if samples:
            seq.in_flight += 1
            if seq.request.beams is not None:
                seq.stop_at = end  # it is not planned again before the choice
            if seq.request.params.structured_outputs is not None:
                plan.mask_rows.append(len(plan.row) - 1)

    def _fork(self, parent: Sequence, plan: StepPlan) -> None:
        """Forks a sequence whose prompt is planned except for its last token. From here on the samples are independent."""
        self.admission.unforked.remove(parent)
        parent.stop_at, parent.rows_needed = parent.limit - 1, 1
        request, rows, parent.reserved = parent.request, parent.reserved, []
        for index in range(1, request.params.n):
            if index in request.aborted:  # never created: this plan could give its row to another, and a row is written only once per plan
                self.rows.free.append(rows.pop())
                continue
            child = self._new_sequence(request, index, array("i", parent.token_ids), parent.limit)
            child.row, child.status = rows.pop(), Status.RUNNING
            self.kv.fork(parent, child)
            insort(self.running, child, key=policy_key)
            plan.row_forks.append(RowFork(child.row, self.rows.source(parent), child.seq_id, request.noise(index)))
        if parent.index in request.aborted:
            self._remove(parent, "abort")

    def _make_room_for_beams(self, seq: Sequence) -> bool:
        """Makes room for all beams of a group, or preempts all: none may be a victim when another is in the plan. Returns if any was."""
        before = self.stats.preemptions
        while seq.status is Status.RUNNING and not self.kv.have_room(self.beams.members(seq)):
            self._preempt(self.running[-1])
        return self.stats.preemptions > before

    def _preempt(self, seq: Sequence) -> None:
        """Frees all blocks of a sequence, which is computed again later. A token still in flight is kept when it arrives."""
        if seq.request.beams is not None:
            seq = self.beams.park(seq)
        self.running.remove(seq)
        seq.lost = seq.num_planned
        self._free(seq)
        seq.status = Status.WAITING
        seq.preemptions += 1
        seq.waits_for, seq.retry_at = None, NEVER_TRIED
        seq.request.life.preemptions += 1
        self.stats.preemptions += 1
        insort(self.waiting, seq, key=policy_key)

    def _preempt_on_schedule(self) -> bool:
        """For tests: every k steps preempts the last sequence, if it made progress since last time (otherwise it might never end)."""
        due = self.preempt_every and self.step % self.preempt_every == 0 and self.running
        if not due or self.running[-1].num_planned <= self.running[-1].lost:
            return False
        self._preempt(self.running[-1])
        return True

    def _free(self, seq: Sequence) -> None:
        self.kv.release(seq)
        self.rows.release(seq)
        if seq in self.admission.unforked:
            self.admission.unforked.remove(seq)

    def update(self, plan: StepPlan, result: StepResult) -> list[Delta]:
        """Processes the result of a plan. Plans are updated in the order in which they were made."""
        deltas: list[Delta] = []
        size, is_finished, is_running = self.kv.block_size, Status.FINISHED, Status.RUNNING
        planned = self._planned.pop(plan.step)
        self._updated.pop(plan.step, None)
        turns, drafts = max(1, len(planned) // SEALS_PER_STEP), plan.drafts
        bad, computed = set(result.bad_rows), sum(plan.num_query)
        searched: dict[Request, int] = {}  # with beams -> tokens received
        for entry, seq in enumerate(planned):
            if entry in bad:  # also if this sample has ended: its siblings may share the bad values
                deltas += self.fail_request(seq.request, NOT_FINITE, NOT_FINITE.partition(":")[0])
            if seq.status is is_finished:
                computed -= plan.num_query[entry]
                continue
            tokens = result.tokens[entry]
            runs = seq.status is is_running and seq.since <= plan.step  # else it was preempted: only its tokens are still valid
            if runs:
                seq.num_computed = plan.start[entry] + plan.num_query[entry]
            if entry in result.prompt_logprobs:
                deltas.append(Delta(seq.request.request_id, seq.index, [], prompt_logprobs=result.prompt_logprobs[entry]))
            if tokens:
                drafted = drafts and entry in drafts
                if drafted:
                    tokens = up_to_end(seq, tokens)
                    computed -= len(drafts[entry]) + 1 - len(tokens)
                seq.append(tokens)
                if drafted and runs:  # the slots after this may be those of rejected drafts
                    seq.num_planned = seq.num_computed = seq.num_tokens - 1
            if seq.num_computed // size > seq.num_sealed and (seq.seq_id + plan.step) % turns == 0:
                self.kv.seal(seq)
            if tokens and seq.request.beams is not None:
                self.beams.hear(seq, result.logprobs[entry][0])
                searched[seq.request] = searched.get(seq.request, 0) + 1
            elif tokens:
                deltas.append(self._deliver(seq, tokens, result.logprobs.get(entry)))
        generated = sum([len(delta.token_ids) for delta in deltas]) + sum(searched.values())
        for request in searched:
            self._count_first(request)
            deltas += self.beams.choose(request)
        self.stats.prompt_tokens += computed - generated
        self.stats.generation_tokens += generated
        return deltas

    def _deliver(self, seq: Sequence, tokens: list[int], logprobs: list[TokenLogprobs] | None) -> Delta:
        """Returns the delta of newly appended tokens; finishes the sequence if they end it."""
        request = seq.request
        delta = Delta(request.request_id, seq.index, tokens, None if logprobs is None else logprobs[: len(tokens)])
        if self._count_first(request):
            delta.life = request.life
        token = tokens[-1]
        if token in request.end_ids:
            delta.finish_reason = "stop"
            delta.stop_reason = token if token in request.params.stop_token_ids else None
        elif seq.num_tokens >= seq.limit:
            delta.finish_reason = "length"
        else:
            return delta
        if request.pin is not None and seq.status is Status.WAITING:  # it was preempted: its blocks are gone, so it starts again
            self.moves.truncate(seq, request.num_prompt)
            return Delta(request.request_id, seq.index, [])
        self.kv.seal(seq)
        self._remove(seq, delta.finish_reason)
        delta.life = request.life
        return delta

    def _count_first(self, request: Request) -> bool:
        """Returns whether this is its first token. The position before that one is the last of the prompt, not a generated one."""
        if request.life.first_token is not None:
            return False
        request.life.first_token = self.clock()
        self.stats.prompt_tokens += 1
        return True

    def fail(self, plan: StepPlan, message: str) -> list[Delta]:
        """Handles a plan that was not executed: every request in it ends with an error."""
        hurt = [seq.request for seq in self._planned.pop(plan.step)]  # also of a sample that has ended: others share its blocks
        hurt += [seq.request for seq in self._updated.pop(plan.step, ())]
        moved = {*(write.seq_id for write in plan.row_writes), *(fork.seq_id for fork in plan.row_forks)}
        hurt += [request for request in self.requests.values() if any(seq.seq_id in moved for seq in request.sequences)]
        return [delta for request in hurt for delta in self.fail_request(request, message)]

    def fail_request(self, request: Request, message: str, code: str | None = None) -> list[Delta]:
        """Ends all samples of a request: they may share the failure."""
        if request.beams is not None:
            return self.beams.end(request, "error", message, code) if request.sequences else []
        return [delta for seq in request.sequences.copy() for delta in self.finish(seq, "error", message, code)]

    def finish(self, seq: Sequence, reason: FinishReason, error: str | None = None, code: str | None = None) -> list[Delta]:
        request = seq.request
        indices = [index for index in range(request.params.n) if index not in request.aborted] if seq.unforked else [seq.index]
        self._remove(seq, reason)
        name, life = request.request_id, request.life
        return [Delta(name, index, [], finish_reason=reason, error=error, code=code, life=life) for index in indices]

    def _remove(self, seq: Sequence, reason: Ending) -> None:
        """Removes a sequence from the engine, in any state."""
        if seq.request.pin is not None:
            self.pins.settle(seq, reason)
        self.on_end(seq, reason)
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self._free(seq)
        else:
            self.waiting.remove(seq)
        seq.status, seq.ended = Status.FINISHED, reason
        request = seq.request
        request.sequences.remove(seq)
        if not request.sequences:
            request.life.finished = self.clock()
            del self.requests[request.request_id]
            self.admission.unscheduled.pop(request.request_id, None)

    def snapshot(self) -> SchedulerStats:
        """Returns the counters and gauges at this moment, as an immutable copy that other threads can read."""
        numbers = {"running": len(self.running), "waiting": len(self.waiting)} | self.kv.numbers()
        return replace(self.stats, steps=self.stats.steps.copy(), **numbers)
