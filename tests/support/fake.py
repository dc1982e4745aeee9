"""A whole engine on FakeKV for tests: the real `EngineCore` and `Scheduler` over a runner in which any paging mistake shows.

`FakeEngine` keeps what every request was given and when, and checks, at every step, what must hold between scheduler and
worker: a plan writes only blocks its sequence has to itself, sealed content never changes, both hold the same tables.
Work can be let in at two points inside a step: `before_forward` (scheduled, not computed) and `after_forward` (computed,
not updated). The clock counts steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from octavo.config import Debug
from octavo.engine.core import EngineCore
from octavo.errors import EngineError
from octavo.messages import AddRequest, Beams, Delta, FinishReason, Limits, PinOrder, StepPlan
from octavo.policy import invariants
from octavo.policy.block_pool import BlockKey, BlockPool, Event
from octavo.policy.cache_group import FULL, CacheGroup, WindowGroup
from octavo.policy.cache_spec import CacheGeometry
from octavo.policy.kv_manager import KVManager
from octavo.policy.request import Request, Sequence
from octavo.policy.scheduler import Scheduler
from octavo.policy.states import States
from octavo.sampling_params import SamplingParams
from octavo.worker.executor import Masks, Promise
from octavo.worker.fake_runner import FakeRunner, Slot, expected
from octavo.worker.faults import Faults
from tests.support.beams import expected_beams

VOCAB = 50


@dataclass(frozen=True, slots=True)
class PairsGroup(CacheGroup):
    """A position can be read as soon as the second one of its pair is there."""

    def length(self, end: int) -> int:
        return end // 2 * 2


GROUPS = [
    (FULL,), (FULL,), (FULL, WindowGroup(window=3)), (FULL, WindowGroup(window=6, links=2)), (CacheGroup(links=2), WindowGroup(window=5)),
    (FULL, WindowGroup(window=5), PairsGroup()),
]  # fmt: skip
Hook = Callable[[], None]


def sampling(count: int | None = 4, n: int = 1, seed: int | None = None, stop: tuple[int, ...] = ()) -> SamplingParams:
    return SamplingParams(max_tokens=count, n=n, seed=seed, stop_token_ids=stop)


class ChosenFaults(Faults):
    """Faults for the next plan that is carried out: entries to poison, and the entry at which to raise (-1: before all)."""

    def __init__(self) -> None:
        super().__init__(Debug())
        self.poison: set[int] = set()
        self.raise_at: int | None = None

    def before_forward(self, step: int) -> None:
        if self.raise_at == -1:
            raise EngineError("planted: before forward")

    def poisons(self, step: int, entry: int) -> bool:
        if self.raise_at == entry:
            raise EngineError(f"planted: at entry {entry}")
        return entry in self.poison


class WatchedExecutor:
    """A runner with hooks around its forward pass."""

    def __init__(self, runner: FakeRunner, on_plan: Callable[[StepPlan], None]) -> None:
        self.runner = runner
        self.plans: list[StepPlan] = []
        self.on_plan = on_plan
        self.before_forward: list[Hook] = []
        self.after_forward: list[Hook] = []

    def forward(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.on_plan(plan)
        _drain(self.before_forward)
        self.runner.forward(plan)
        _drain(self.after_forward)

    def sample(self, masks: Masks | None = None) -> Promise:
        return self.runner.sample(masks)

    def stop(self) -> None:
        self.runner.stop()


def _drain(hooks: list[Hook]) -> None:
    while hooks:
        hooks.pop(0)()


class FakeEngine:
    def __init__(
        self,
        *,
        block_size: int = 4,
        num_blocks: int = 64,
        rows: int = 8,
        budget: int = 64,
        max_len: int | None = None,
        most_len: int = 1 << 30,
        depth: int = 1,
        caching: bool = True,
        by_priority: bool = False,
        preempt_every: int = 0,
        end_ids: tuple[int, ...] = (),
        check: bool = True,
        groups: tuple[CacheGroup, ...] = (FULL,),
        drafts: int = 0,
        stages: int = 1,
        pinned: int = 1 << 30,
        links: int | None = None,
        states: int | None = None,
    ) -> None:
        """`drafts`: the most that are proposed for a sequence, right and wrong ones. `pinned`: the most blocks that may be.
        `links`: the most that are hashed in a step. `states`: of a recurrent model, state slots beside the two of each row.
        `max_len`: without it, as long as fits into the pool, and no longer than `most_len`.
        """
        self.pool = BlockPool(num_blocks, self._on_event)
        num_states = 0 if states is None else 1 + 2 * rows + states
        slots = States(num_states, rows, block_size, max_len or num_blocks * block_size, caching) if num_states else None
        self.kv = KVManager(self.pool, block_size, caching, b"k" * 16, b"model", groups=groups, step_tokens=budget, states=slots)
        self.max_len = max_len or min(most_len, self.kv.most_tokens() + 1)
        limits = Limits(rows, budget, self.max_len, VOCAB, num_blocks, block_size, max_pinned_blocks=pinned)
        self.scheduler = Scheduler(
            self.kv, limits, by_priority, end_ids, 5, preempt_every, clock=lambda: float(self.scheduler.step),
            stages=stages, draft=self._draft if drafts else None,
        )  # fmt: skip
        if links is not None:
            self.scheduler.admission.links_per_step = links
        self.faults = ChosenFaults()
        geometry = CacheGeometry(num_blocks, block_size, self.max_len, 1, groups, num_states=num_states)
        self.runner = FakeRunner(geometry, VOCAB, self.faults)
        self.executor = WatchedExecutor(self.runner, self._check_writes)
        self.core = EngineCore(self.scheduler, self.executor, depth, check)
        self.check = check
        self._most_drafts, self._random = drafts, Random(num_blocks)
        self.asked: dict[str, tuple[AddRequest, Request]] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.chosen: dict[tuple[str, int], list[int]] = {}  # the first tokens of a sample that were not its own
        self.token_steps: dict[tuple[str, int], list[int]] = {}  # the step each token came out of
        self.ends: dict[tuple[str, int], Delta] = {}
        self.sealed: dict[BlockKey, list[Slot]] = {}  # content by key, for ever

    # --- driving -----------------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: list[int],
        params: SamplingParams | None = None,
        priority: int = 0,
        salt: str = "",
        bad_words: list[list[int]] | None = None,
        beams: Beams | None = None,
        pin: PinOrder | None = None,
        position_offset: int = 0,
        checkpoints: list[int] | None = None,
    ) -> Request:
        message = AddRequest(
            name, list(prompt), params or sampling(), priority, salt, bad_words or [], beams=beams, pin=pin,
            position_offset=position_offset, checkpoints=checkpoints or [],
        )  # fmt: skip
        self.core.add(message)
        request = self.scheduler.requests[name]
        message = replace(message, prompt_token_ids=message.prompt_token_ids[: request.num_prompt])  # a pin has whole blocks
        self.asked[name] = (message, request)
        for index in range(message.params.n):
            self.tokens[name, index], self.token_steps[name, index] = [], []
        return request

    def pin(self, name: str, prompt: list[int], seconds: float | None = None, salt: str = "", request: str = "") -> Request:
        """A request that computes a prefix, which is held then. `request`: its name, where that is not the pin's"""
        return self.add(request or name, prompt, sampling(1), salt=salt, pin=PinOrder(name, seconds))

    def unpin(self, name: str) -> None:
        self.core.unpin(name)
        if self.check:
            invariants.check(self.scheduler)

    def abort(self, name: str, index: int | None = None) -> list[Delta]:
        deltas = self.core.abort(name, index)
        self._record(deltas)
        if self.check:
            invariants.check(self.scheduler)
        return deltas

    def begin_again(self, name: str) -> None:
        """A request ends here, unheard, and goes on with what its client has, as it would in another engine."""
        message, request = self.asked[name]
        live = {index: tokens.copy() for (at, index), tokens in self.tokens.items() if at == name and (at, index) not in self.ends}
        self.core.abort(name)
        message = replace(message, params=replace(message.params, seed=request.seed), outputs=live if any(live.values()) else None)
        if message.outputs is None and len(live) < message.params.n:
            message.outputs = live  # a sample has ended before it began
        self.core.add(message)
        self.asked[name] = message, self.scheduler.requests[name]

    def expire(self, steps: float) -> list[Delta]:
        deltas = self.scheduler.expire(steps)
        self._record(deltas)
        return deltas

    def step(self) -> list[Delta]:
        deltas = self.core.step()
        self._record(deltas)
        self.faults.poison, self.faults.raise_at = set(), None
        _drain(self.executor.before_forward)  # an empty plan reaches no worker
        _drain(self.executor.after_forward)
        if self.check:
            self._check_worker()
        return deltas

    def fork(self, parent: Sequence) -> Sequence | None:
        """Another sample of the request, which begins with all its parent has said."""
        name = parent.request.request_id
        index = max(at for other, at in self.tokens if other == name) + 1
        child = self.scheduler.moves.fork(parent, index)
        if child is not None:
            said = self.tokens[name, parent.index]
            self.tokens[name, index], self.chosen[name, index] = said.copy(), said.copy()
            self.token_steps[name, index] = self.token_steps[name, parent.index].copy()
        return child

    def truncate(self, seq: Sequence, length: int) -> None:
        """It says the rest again."""
        key, kept = (seq.request.request_id, seq.index), length - seq.request.num_prompt
        self.scheduler.moves.truncate(seq, length)
        for lists in (self.tokens, self.token_steps, self.chosen):
            del lists.get(key, [])[kept:]

    def replace_last(self, seq: Sequence, token: int) -> None:
        key = seq.request.request_id, seq.index
        self.scheduler.moves.replace_last(seq, token)
        self.tokens[key][-1] = token
        self.chosen[key] = self.tokens[key].copy()

    def preempt_last(self) -> None:
        """The last running sequence is preempted at the start of the next step."""
        every, self.scheduler.preempt_every = self.scheduler.preempt_every, 1
        self.executor.before_forward.append(lambda: setattr(self.scheduler, "preempt_every", every))

    def run(self, most_steps: int = 5000) -> int:
        """Step until nothing is left; how many steps that took."""
        for count in range(most_steps):
            if not self.core.has_work:
                return count
            self.step()
        raise AssertionError(f"still at work after {most_steps} steps: {self.scheduler.snapshot()}")

    # --- what came of it ---------------------------------------------------------------------------------------------

    def expected(self, name: str, index: int = 0) -> tuple[list[int], FinishReason]:
        """What a sample gives if nothing disturbs it."""
        message, request = self.asked[name]
        prompt, params = message.prompt_token_ids, message.params
        count = self.max_len - message.position_offset - len(prompt) if params.max_tokens is None else params.max_tokens
        chosen, key = self.chosen.get((name, index), []), request.noise(index)
        text = expected(
            prompt, count, request.root, key, VOCAB, request.end_ids, params.min_tokens, message.bad_words, chosen, message.position_offset
        )
        end = next((at for at, token in enumerate(text) if token in request.end_ids and at >= len(chosen)), None)
        return (text, "length") if end is None else (text[: end + 1], "stop")

    def _draft(self, seq: Sequence) -> list[int]:
        """Up to `drafts` ids; each is the one that comes next, or perhaps another one."""
        request, random = seq.request, self._random
        output = seq.token_ids[request.num_prompt :]
        message, _ = self.asked[request.request_id]
        key, known = request.noise(seq.index), len(output)
        count = known + self._most_drafts
        right = expected(
            message.prompt_token_ids, count, request.root, key, VOCAB, request.end_ids, message.params.min_tokens, message.bad_words,
            output, message.position_offset,
        )  # fmt: skip
        return [token if random.random() < 0.7 else random.randrange(VOCAB) for token in right[known : random.randint(known, count)]]

    def _beam_answers(self, name: str) -> list[tuple[list[int], FinishReason]]:
        message, request = self.asked[name]
        assert message.beams is not None
        longest = self.max_len - message.position_offset - len(message.prompt_token_ids)
        count = min(message.params.max_tokens or self.max_len, longest)
        return expected_beams(
            message.prompt_token_ids, count, request.root, VOCAB, message.beams, request.end_ids, message.position_offset
        )

    def reason(self, name: str, index: int = 0) -> FinishReason | None:
        return self.ends[name, index].finish_reason

    def assert_exact(self, disturbed: set[str] | None = None) -> None:
        """Every sample ended, with its whole text; those of `disturbed` requests perhaps early, with what they had."""
        answers = {name: self._beam_answers(name) for name, (message, _) in self.asked.items() if message.beams is not None}
        for (name, index), tokens in self.tokens.items():
            text, reason = answers[name][index] if name in answers else self.expected(name, index)
            if self.reason(name, index) in ("abort", "error"):
                assert disturbed is not None and name in disturbed, f"{name}/{index} ended with {self.ends[name, index]}"
                assert tokens == text[: len(tokens)], f"{name}/{index} is wrong"
            else:
                assert (tokens, self.reason(name, index)) == (text, reason), f"{name}/{index} is wrong"

    def assert_idle(self) -> None:
        """As after start, but for what is cached."""
        assert not self.pool.pinned
        assert not self.core.has_work and not self.scheduler.waiting and not self.scheduler.running
        assert self.pool.num_free == self.pool.num_blocks - 1 and not any(self.pool.ref)
        assert sorted(self.scheduler.rows.free) == list(range(self.scheduler.limits.max_num_seqs))
        assert not self.kv.pending and not self.scheduler._planned and not self.scheduler._updated and not self.scheduler.admission.unforked
        invariants.check(self.scheduler)

    def touched(self, plan: StepPlan) -> set[int]:
        """Sequences whose requests end where this plan is not carried out."""
        moved = {*(write.seq_id for write in plan.row_writes), *(fork.seq_id for fork in plan.row_forks)}
        return moved | {*plan.seq_id, *(seq.seq_id for seq in self.scheduler._updated.get(plan.step, ()))}

    @property
    def copies(self) -> int:
        return sum(len(plan.copies) for plan in self.executor.plans)

    def _record(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.index)
            assert key not in self.ends, f"news of {key} after its end: {delta}"
            self.tokens[key] += delta.token_ids
            self.token_steps[key] += [self.scheduler.step] * len(delta.token_ids)
            if delta.finish_reason is not None:
                self.ends[key] = delta

    # --- what must hold ----------------------------------------------------------------------------------------------

    def _check_writes(self, plan: StepPlan) -> None:
        """Just scheduled: each entry computes something, within the budget, into blocks its sequence has to itself."""
        if not self.check:
            return
        invariants.check(self.scheduler)
        running = {seq.seq_id: seq for seq in self.scheduler.running}
        assert sum(plan.num_query) <= self.scheduler.limits.max_num_batched_tokens
        assert len(set(plan.row)) == len(plan.row)
        assert all(plan.outputs[entry] == 1 + len(drafts) > 1 for entry, drafts in plan.drafts.items())
        for seq_id, row, start, count in zip(plan.seq_id, plan.row, plan.start, plan.num_query):
            seq = running[seq_id]
            assert seq.row == row and count > 0 and seq.num_planned == start + count
            for table, span in zip(seq.tables, self.kv.spans):
                for block in table[start // span : (start + count - 1) // span + 1]:
                    assert self.pool.writable(block), f"block {block} is written while shared or sealed"

    def _check_worker(self) -> None:
        """Between steps: the worker's rows are the scheduler's sequences, and sealed blocks hold what was sealed."""
        invariants.check(self.scheduler)
        for seq in self.scheduler.running:
            row = self.runner.rows[self.scheduler.rows.source(seq)]
            if self.scheduler.rows.is_sent(seq):
                assert row.tables == seq.tables, "scheduler and worker hold different tables"
                assert row.tokens[: seq.num_tokens] == seq.token_ids and len(row.tokens) >= seq.num_tokens + seq.in_flight
                assert seq.in_flight or len(row.tokens) == seq.num_tokens
        for key, block in self.pool.index.items():
            assert self._content(block, key) == self.sealed[key], f"sealed block {block} was written"

    def _content(self, block: int, key: BlockKey) -> list[Slot]:
        return self.runner.blocks[block][: self.kv.spans[key[0]]]

    def _on_event(self, event: Event, block: int, key: BlockKey | None) -> None:
        if event == "seal":
            assert key is not None
            content = self._content(block, key)
            assert None not in content, f"block {block} sealed with slots never written"
            assert self.sealed.setdefault(key, content) == content, "one key, two contents"
