"""`Admission`: decides which waiting requests are admitted. It matches, counts and allocates, in that order, all or nothing.

A sequence is admitted only if all of its present tokens fit and enough blocks stay free for the running sequences. If the first
waiting sequence does not fit, others may pass it for some steps; after that, none may. A sequence waits if another sequence is
computing its prefix.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable

from octavo.messages import SchedulerStats, StepPlan
from octavo.policy.kv_manager import KVManager, PrefixHit
from octavo.policy.pins import Pins
from octavo.policy.request import Request, Sequence, Status, policy_key
from octavo.policy.rows import Rows

MAX_PASSES = 16  # steps a request that does not fit may be passed by others
SCAN_LIMIT = 32  # requests looked at behind one that does not fit
COMEBACK_TOKENS = 32  # free room required to readmit a sequence that was preempted k times: this times 2^k


class Admission:
    def __init__(
        self,
        kv: KVManager,
        waiting: list[Sequence],
        running: list[Sequence],
        rows: Rows,
        pins: Pins,
        stats: SchedulerStats,
        clock: Callable[[], float],
    ) -> None:
        self.kv = kv
        self.waiting = waiting  # these are the scheduler's own lists
        self.running = running
        self.rows = rows
        self.pins = pins
        self.stats = stats
        self.clock = clock
        self.unscheduled: OrderedDict[str, Request] = OrderedDict()  # requests that were never admitted, by arrival
        self.unforked: list[Sequence] = []  # running sequences that represent several samples until they are forked

    def admit(self, plan: StepPlan, budget: int, mask_turns: int) -> list[tuple[Sequence, int]]:
        """Admits in policy order. Returns the admitted sequences, and how many tokens the plan computes for each."""
        admitted: list[tuple[Sequence, int]] = []
        head: Sequence | None = None
        passed = False
        scanned = position = 0
        while position < len(self.waiting) and budget > 0 and self.rows.free:
            seq = self.waiting[position]
            not_yet = seq.waits_for in self.kv.pending or seq.in_flight or seq.request.held
            if not_yet or not seq.has_turn(plan.step, mask_turns):
                position += 1  # its prefix is being computed, a token is in flight, its grammar is not compiled, or it is not its turn
                continue
            count = self._admit(seq, plan, budget)
            if count is not None:
                del self.waiting[position]
                admitted.append((seq, count))
                budget -= count
                passed = head is not None
                continue
            position += 1
            if seq.waits_for:
                continue
            head = head or seq
            scanned += 1
            if head.steps_passed >= MAX_PASSES or scanned >= SCAN_LIMIT:
                break
        if head is not None and passed:
            head.steps_passed += 1
        return admitted

    def _admit(self, seq: Sequence, plan: StepPlan, budget: int) -> int | None:
        """Returns the tokens planned for it now, or None if it must wait."""
        kv = self.kv
        hit = kv.match(seq)
        seq.waits_for = hit.missed if hit.missed in kv.pending else None
        if seq.waits_for or seq.rows_needed > len(self.rows.free):
            return None
        if kv.blocks_needed(seq, hit) + seq.blocks_for_others + self.margin(seq) > kv.pool.num_free:
            return None
        count = min(seq.target - hit.num_tokens, budget)
        kv.admit(seq, hit)
        self.rows.take(seq)
        if seq.unforked:
            self.unforked.append(seq)
        plan.row_writes.append(seq.row_write(hit.num_tokens))
        fits = kv.allocate(seq, count, plan)
        assert fits, "admission counted too few blocks"
        seq.status, seq.since = Status.RUNNING, plan.step
        insort(self.running, seq, key=policy_key)
        self._note_admission(seq, hit)
        return count

    def margin(self, seq: Sequence) -> int:
        """Blocks that must stay free: one of each group per running sequence, and more for a sequence that was preempted before."""
        if not self.running:
            return 0
        margin = len(self.running) * len(self.kv.groups)
        if seq.preemptions:
            comeback = min(seq.limit - seq.num_tokens, COMEBACK_TOKENS << seq.preemptions)
            margin += self.kv.blocks_for(comeback)
        return margin

    def _note_admission(self, seq: Sequence, hit: PrefixHit) -> None:
        life = seq.request.life
        life.recomputed_tokens += max(0, seq.lost - hit.num_tokens)
        if life.first_scheduled is None:
            life.first_scheduled = self.clock()
            self.unscheduled.pop(seq.request.request_id, None)  # absent if it began on another engine: such a request never expires
            life.hit_reason = hit.reason
            life.hit_group = None if hit.missed is None or len(self.kv.groups) == 1 else hit.missed[0]
            life.cached_tokens = hit.num_tokens
            self.stats.prefix_queries += seq.num_tokens
            self.stats.prefix_hits += hit.num_tokens
            life.pinned_tokens = self.pins.note(seq, hit)
