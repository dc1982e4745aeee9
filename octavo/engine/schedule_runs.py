"""Runs requests alone, and under a schedule, and finds the first difference of their answers. `engine/verify.py` draws the schedules."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from math import lcm

from octavo.config import Debug, EngineConfig, ResolvedConfig, debug_from_environment
from octavo.engine.build import Started, assemble, started
from octavo.engine.core import EngineCore
from octavo.engine.schedules import BEAMS, CHUNKS, MOST_ANSWER, MOST_ROWS, POOLS, Schedule, Work
from octavo.errors import EngineError
from octavo.loading.resolve import ModelSource
from octavo.loading.shape import ModelShape
from octavo.messages import AddRequest, StepPlan, TokenLogprobs
from octavo.model_config import ModelConfig
from octavo.policy.cache_group import CacheGroup
from octavo.policy.cache_spec import CacheGeometry, blocks_for
from octavo.policy.scheduler import Scheduler
from octavo.worker.build import build_runner
from octavo.worker.compilers import Compilers
from octavo.worker.facts import Facts, settle
from octavo.worker.layer_states import StatesProgram, TextStates
from octavo.worker.model_runner import ModelRunner
from octavo.worker.native_program import NativeProgram
from octavo.worker.step_sharing import rows_together

CHECKPOINTS = 8  # states of recurrent layers that are kept: fewer than requests want to keep
Sample = tuple[str, int]  # a request, and which of its samples


@dataclass(slots=True)
class Answer:
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: dict[int, TokenLogprobs] = field(default_factory=dict)  # position -> of that token of the prompt
    ended: bool = False


Answers = dict[Sample, Answer]


@dataclass(slots=True)
class Counts:
    """What happened under a schedule."""

    hits: int = 0  # prompt tokens from the cache
    forks: int = 0
    chunks: int = 0  # parts of prompts that did not reach the end
    preemptions: int = 0
    evictions: int = 0
    together: int = 0  # rows that read keys with others
    searches: int = 0
    moved: int = 0  # requests that a lost engine had begun to answer
    steps: int = 0

    def add(self, other: "Counts") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class Tally:
    """Counts what happens in the steps of an engine (`engine/trace.py`)."""

    def __init__(self, program: NativeProgram, counts: Counts) -> None:
        self._program, self._counts = program, counts
        self._prompts: dict[int, int] = {}  # row -> tokens of its prompt

    def begin(self) -> None: ...

    def mark(self, name: str) -> None: ...

    def end(self, plan: StepPlan, scheduler: Scheduler) -> None:
        counts, prompts = self._counts, self._prompts
        prompts |= {fork.row: prompts[fork.source] for fork in plan.row_forks}
        prompts |= {write.row: write.num_prompt for write in plan.row_writes}
        counts.steps += bool(plan.row)
        counts.forks += sum(not fork.moves for fork in plan.row_forks)
        reached = zip(plan.row, plan.start, plan.num_query)
        counts.chunks += sum(start + count < prompts[row] - 1 for row, start, count in reached)  # samples begin before the last token
        if plan.num_query.count(1) > 1:
            counts.together += rows_together(self._program.keys)

    def rest(self, scheduler: Scheduler) -> None: ...

    def close(self) -> None: ...


class Bench:
    """A runner for one block size, on which schedules run one after the other."""

    def __init__(self, start: Started, facts: Facts, runner: ModelRunner, debug: Debug, longest: int) -> None:
        assert isinstance(runner.program, NativeProgram)
        self.facts, self.program = facts, runner.program
        self._start, self._runner, self._debug, self._longest = start, runner, debug, longest
        self.threads = self.program.library.threads

    def alone(self, requests: Sequence[AddRequest]) -> Answers:
        """Runs each sample or beam search as if there were no other. Greedy samples of a request are the same one."""
        answers: Answers = {}
        core = self._core(replace(self._start.config, enable_prefix_caching=False, pipeline_depth=1), self._start.geometry.num_blocks, 0)
        for request in requests:
            name, samples = request.request_id, range(request.params.n)
            parts = [replace(request, outputs={index: []}) for index in (samples[:1] if request.params.greedy else samples)]
            for part in [request] if request.beams is not None else parts:
                core.add(part)
                while core.has_work:
                    _collect(core, answers)
            answers |= {(name, index): answers[name, 0] for index in samples if (name, index) not in answers}
        return answers

    def run(self, schedule: Schedule, work: Work) -> tuple[list[Answers], Counts]:
        """Returns the answers of each round."""
        counts = Counts()
        config = replace(
            self._start.config,
            max_num_seqs=schedule.max_num_seqs,
            max_num_batched_tokens=schedule.max_num_batched_tokens,
            pipeline_depth=schedule.pipeline_depth,
            enable_prefix_caching=schedule.caching,
        )
        core, *lost = engines = self._engines(config, schedule)
        for engine in engines:
            engine.traces.append(Tally(self.program, counts))
        self.program.library.set_threads(schedule.threads)
        self.program.sharing.share_all(schedule.share_all)
        try:
            answers = [_run(core, lost if number == 0 else [], work, schedule, counts) for number in range(schedule.rounds)]
        finally:
            self.program.sharing.share_all(False)
            self.program.library.set_threads(self.threads)
        counts.searches = schedule.rounds * sum(request.beams is not None for request in work.requests)
        for scheduler in (engine.scheduler for engine in engines):
            counts.hits += scheduler.stats.prefix_hits
            counts.preemptions += scheduler.stats.preemptions
            counts.evictions += scheduler.kv.pool.counts.evicted
        return answers, counts

    @contextmanager
    def showing(self, states: TextStates) -> Iterator[None]:
        """Returns a context in which every step shows the states of a text, layer by layer."""
        self._runner.program = StatesProgram(self.program, self._runner.store, states)
        yield
        self._runner.program = self.program
        states.complete = True

    def _engines(self, config: ResolvedConfig, schedule: Schedule) -> list[EngineCore]:
        return [self._core(config, self._blocks(schedule), schedule.preempt_every) for _ in range(2 if schedule.lost_after else 1)]

    def _core(self, config: ResolvedConfig, num_blocks: int, preempt_every: int) -> EngineCore:
        geometry = with_checkpoints(replace(self._start.geometry, num_blocks=num_blocks), config.max_num_seqs)
        start = replace(self._start, config=config, geometry=geometry)
        return assemble(start, self.facts.whole, replace(self._debug, preempt_every=preempt_every))

    def _blocks(self, schedule: Schedule) -> int:
        geometry = self._start.geometry
        return pool_blocks(geometry.groups, geometry.block_size, self._longest, schedule.max_num_batched_tokens, schedule.pool)


@contextmanager
def opened(
    config: EngineConfig, source: ModelSource, model: ModelConfig, longest: int, refuse: Callable[[Facts], None], size: int
) -> Iterator[Bench]:
    """Opens a runner with room for every schedule with blocks of this size. `refuse` may raise before weights are loaded."""
    debug, tokens = debug_from_environment(), max(longest, *CHUNKS)
    groups = ModelShape(source.name, model).needs("float32").groups
    config = replace(
        config,
        block_size=size,
        max_model_len=longest,
        max_num_seqs=MOST_ROWS,
        max_num_batched_tokens=tokens,
        num_gpu_blocks_override=pool_blocks(groups, size, longest, tokens, max(POOLS)),
    )
    facts = settle(config, source, model, debug)
    refuse(facts)
    geometry = with_checkpoints(facts.plan_cache(), MOST_ROWS)
    runner = build_runner(facts, geometry, debug, Compilers())
    try:
        yield Bench(started(facts, geometry, runner), facts, runner, debug, longest)
    finally:
        runner.stop()


def with_checkpoints(geometry: CacheGeometry, rows: int) -> CacheGeometry:
    """Returns the geometry in which a recurrent model has few checkpoints. Of a small cache, their share might have no room for one."""
    return replace(geometry, num_states=1 + 2 * rows + CHECKPOINTS) if geometry.num_states else geometry


def pool_blocks(groups: Sequence[CacheGroup], block_size: int, longest: int, chunk: int, sequences: float) -> int:
    """Returns the blocks of a pool for so many sequences of the greatest length, and some more in which beams and samples differ."""
    span = block_size * lcm(*(group.links for group in groups))
    own = blocks_for(groups, block_size, MOST_ANSWER + span, chunk) + len(groups)
    return int(sequences * blocks_for(groups, block_size, longest, chunk)) + len(groups) + BEAMS.width * own + 1


def _run(core: EngineCore, lost: Sequence[EngineCore], work: Work, schedule: Schedule, counts: Counts) -> Answers:
    """Answers all requests. An engine in `lost` shares them with `core` until it is lost.

    Engines share nothing, so they run one after the other on the same rows and blocks: nothing that a lost engine left there is read.
    """
    answers, due = Answers(), [work.requests[index] for index in schedule.order]
    for engine in lost:
        own = {request.request_id for request in due[::2] if request.request_id not in work.after}
        mine = [request for request in due if work.after.get(request.request_id, request.request_id) in own]
        rest = _serve(engine, mine, work, schedule, answers, schedule.lost_after)
        core.scheduler.step = engine.scheduler.step  # so that a message about a step means one engine
        others = _serve(core, [request for request in due if request not in mine], work, schedule, answers, schedule.lost_after)
        moved = [_moved(request, answers) for request in mine if request.request_id in engine.scheduler.requests]
        counts.moved += sum(request.outputs is not None for request in moved)
        due = moved + rest + others
    _serve(core, due, work, schedule, answers)
    return answers


def _moved(request: AddRequest, answers: Answers) -> AddRequest:
    """Returns a request as it continues in another engine, as `engine/streams.py` does."""
    samples = {index: answers.get((request.request_id, index), Answer()) for index in range(request.params.n)}
    return request.resumed({index: answer.ids.copy() for index, answer in samples.items() if not answer.ended})


def _serve(
    core: EngineCore, due: list[AddRequest], work: Work, schedule: Schedule, answers: Answers, most: int | None = None
) -> list[AddRequest]:
    """Adds requests in bursts, each second turn when the first one has ended. Returns those that it did not add.

    `most`: returns in the middle of an answer, as soon as this many tokens have been answered
    """
    last, given = core.scheduler.step - schedule.gap, 0
    while (due or core.has_work) and (most is None or given < most or not _in_the_middle(core, answers)):
        if core.scheduler.step >= last + schedule.gap or not core.has_work:
            live = core.scheduler.requests.keys() | {request.request_id for request in due}
            burst = [request for request in due if work.after.get(request.request_id) not in live][: schedule.burst]
            for request in burst:
                core.add(request)
            due = [request for request in due if request not in burst]
            last = core.scheduler.step
        given += _collect(core, answers)
    return due


def _in_the_middle(core: EngineCore, answers: Answers) -> bool:
    """Whether a sample has some of its tokens."""
    return any(answer.ids and not answer.ended for (name, _), answer in answers.items() if name in core.scheduler.requests)


def _collect(core: EngineCore, answers: Answers) -> int:
    """Runs one step, and adds its results to the answers. Returns how many tokens they have."""
    deltas = core.step()
    for delta in deltas:
        if delta.finish_reason == "error":
            raise EngineError(str(delta.error))
        answer = answers.setdefault((delta.request_id, delta.index), Answer())
        answer.ids += delta.token_ids
        answer.logprobs += delta.logprobs or []
        answer.ended = delta.finish_reason is not None
        if delta.prompt_logprobs is not None:
            first, found = delta.prompt_logprobs
            answer.prompt |= dict(enumerate(found, first))
    return sum(len(delta.token_ids) for delta in deltas)


@dataclass(frozen=True, slots=True)
class Difference:
    request: AddRequest
    index: int  # of the sample
    what: str

    def __str__(self) -> str:
        return f"request {self.request.request_id}, sample {self.index}, {self.what}"


def differences(requests: Sequence[AddRequest], reference: Answers, answers: Answers) -> Iterator[Difference]:
    """Yields for each sample the first value that is not the same number in both."""
    for request in requests:
        for index in range(request.params.n):
            sample: Sample = (request.request_id, index)
            alone, other = reference[sample], answers[sample]
            for position in sorted(alone.prompt.keys() | other.prompt.keys()):
                if alone.prompt.get(position) != other.prompt.get(position):
                    yield Difference(request, index, f"the logprob of prompt token {position}")
                    break
            else:
                both = zip_longest(zip(alone.ids, alone.logprobs), zip(other.ids, other.logprobs))
                for place, (one, two) in enumerate(both):
                    if one != two:
                        yield Difference(request, index, f"token {place}: {_shown(one)} alone, {_shown(two)} under this schedule")
                        break


def _shown(token: tuple[int, TokenLogprobs] | None) -> str:
    return "none" if token is None else f"id {token[0]} with logprob {token[1].logprob!r}"
