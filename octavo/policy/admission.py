"""`Admission`: decides which waiting requests are admitted. It matches, counts and allocates, in that order, all or nothing.

A sequence is admitted only if all of its present tokens fit and enough blocks stay free for the running sequences. If the first
waiting sequence does not fit, others may pass it for some steps; after that, none may. A sequence waits if another sequence is
computing its prefix.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable

from octavo.messages import Limits, SchedulerStats, StepPlan
from octavo.policy.kv_manager import KVManager
from octavo.policy.pins import Pins
from octavo.policy.prefix_matcher import PrefixHit
from octavo.policy.request import Request, Sequence, Status, policy_key
from octavo.policy.rows import Rows

MAX_PASSES = 16  # steps a request that does not fit may be passed by others
SCAN_LIMIT = 32  # requests looked at behind one that does not fit
LINKS_PER_STEP = 4096  # links hashed in one step, which takes about 5 ms: bursts of long prompts are matched over several steps
LOOKUPS_PER_HASH = 3  # links of a hit that are found and shared in the time that hashing one takes
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
        links_per_step: int,
    ) -> None:
        self.kv = kv
        self.waiting = waiting  # these are the scheduler's own lists
        self.running = running
        self.rows = rows
        self.pins = pins
        self.stats = stats
        self.clock = clock
        self.links_per_step = links_per_step
        self.unscheduled: OrderedDict[str, Request] = OrderedDict()  # requests that were never admitted, by arrival
        self.unforked: list[Sequence] = []  # running sequences that represent several samples until they are forked

    def admit(self, plan: StepPlan, budget: int, mask_turns: int) -> list[tuple[Sequence, int]]:
        """Admits in policy order. Returns the admitted sequences, and how many tokens the plan computes for each."""
        admitted: list[tuple[Sequence, int]] = []
        head: Sequence | None = None
        passed = False
        scanned = position = 0
        self.kv.prefixes.links_left = self.links_per_step
        while position < len(self.waiting) and budget > 0 and self.rows.free and self._smallest_fits():
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
        if seq.rows_needed > len(self.rows.free):
            return None
        if self.is_refused_still(seq):
            seq.waits_for = next((key for key in seq.misses if key in kv.pending), None)
            return None
        hit = kv.prefixes.match(seq)
        if hit is None:
            return None
        count = self._admit_from(hit, seq, plan, budget)
        kv.prefixes.links_left -= hit.num_tokens // kv.block_size // LOOKUPS_PER_HASH  # not sooner: each step must hash some links
        return count

    def _admit_from(self, hit: PrefixHit, seq: Sequence, plan: StepPlan, budget: int) -> int | None:
        kv = self.kv
        seq.waits_for = kv.prefixes.wait_for(seq, hit.missed) if hit.missed in kv.pending else None
        if seq.waits_for:
            kv.ask_for_state(seq, seq.waits_for)
            return None
        margin = self.margin(seq)
        lacking = kv.blocks_needed(seq, hit) + seq.blocks_for_others + margin - kv.pool.num_free
        if lacking > 0:
            seq.misses, seq.retry_at = hit.misses, kv.pool.freed - margin + lacking
            seq.states_kept = kv.states_kept if hit.num_tokens < hit.common else None
            return None
        if not kv.prefixes.hash_all(seq):
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

    def is_refused_still(self, seq: Sequence) -> bool:
        """Whether it did not fit when it was matched, and cannot fit now, so that it need not be matched again.

        Its hit is not longer before a block that it lacked is sealed, or a state that it lacked is kept. Until then what it lacks shrinks
        by at most a block for each block that becomes free, and by as many as its margin shrinks.
        """
        if seq.states_kept not in (None, self.kv.states_kept):
            return False
        return self.kv.pool.freed - self.margin(seq) < seq.retry_at and not self.kv.prefixes.any_cached(seq.misses)

    def _smallest_fits(self) -> bool:
        """Whether the free blocks suffice for the smallest request, which needs a block of each group."""
        return self.kv.pool.num_free >= self.kept_free() + len(self.kv.groups)

    def kept_free(self) -> int:
        """Blocks that must stay free for running sequences: one of each group for each."""
        return len(self.running) * len(self.kv.groups)

    def margin(self, seq: Sequence) -> int:
        """Blocks that must stay free if this sequence is admitted: more than others keep free if it was preempted before."""
        margin = self.kept_free()
        if seq.preemptions and self.running:
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
            life.cached_tokens, life.common_tokens = hit.num_tokens, hit.common
            self.stats.prefix_queries += seq.num_tokens
            self.stats.prefix_hits += hit.num_tokens
            self.stats.stateless_tokens += hit.common - hit.num_tokens
            if self.kv.pool.pinned:
                life.pinned_tokens = self.pins.note(seq, hit)


# -- the token budget of a plan


def share_of_plan(limits: Limits, running: list[Sequence], stages: int, num_plans: int) -> tuple[int, int]:
    """Returns the token budget of a plan and how many sequences it may decode: an equal part for each stage that has no work.

    `num_plans`: plans in flight, including this one
    """
    tokens, rows = limits.max_num_batched_tokens, limits.max_num_seqs
    if stages == 1:
        return tokens, rows
    idle = stages + 1 - num_plans
    return max(tokens // stages, rows), -(-sum(not seq.in_flight for seq in running) // max(1, idle))


def budget_of_prefills(budget: int, running: list[Sequence]) -> int:
    """Returns the tokens for running prefills while a request waits and a row is free: half of what decode leaves."""
    decoding = sum(seq.target - seq.num_planned == 1 for seq in running)
    return (budget - decoding) // 2
