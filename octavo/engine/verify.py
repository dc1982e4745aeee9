"""`octavo verify`: a stress schedule on a real model; the shadow compares every step bit for bit.

A tiny pool forces preemption and eviction. Prompts share prefixes, are repeated, fork into samples before, at and after the end of a
block, are answered by beam search, and are computed in chunks. At pipeline depth 1 sequences have drafts, which are mostly wrong, unless
the model is recurrent: then few states are kept, found and evicted. A run in which one of these did not happen fails: it proves too little.

With --schedules, the same requests, alone and under random schedules, must get the same ids and logprobs instead: see `Proof`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import groupby, pairwise
from random import Random

from octavo.config import Debug, EngineConfig, debug_from_environment
from octavo.engine.build import Started, assemble, open_ranks, started
from octavo.engine.core import EngineCore
from octavo.engine.schedule_runs import Answers, Bench, Counts, Difference, differences, opened, with_checkpoints
from octavo.engine.schedules import LEAST, LONGEST, Schedule, Work, draw_requests, draw_schedules, draw_second_turns, with_second_turn
from octavo.errors import ConfigError, EngineError, VerifyError
from octavo.loading.resolve import ModelSource
from octavo.loading.shape import ModelShape
from octavo.messages import AddRequest, Beams
from octavo.model_config import ModelConfig
from octavo.policy.block_pool import PoolCounts
from octavo.policy.cache_group import FULL, CacheGroup
from octavo.policy.cache_spec import blocks_for
from octavo.policy.drafts import Draft
from octavo.policy.state_pool import StateCounts
from octavo.sampling_params import SamplingParams
from octavo.sizing.native_size import native_refusal
from octavo.worker.build import build_proven
from octavo.worker.compilers import Compilers
from octavo.worker.device import compilers_for
from octavo.worker.facts import Facts, settle
from octavo.worker.layer_states import TextStates
from octavo.worker.shadow import Shadow, happened, state_happened
from octavo.worker.twice import Compared

BLOCKS_FOR_LONGEST = 8  # blocks that the longest request may fill
NUM_ROWS = 12  # on a GPU, rows read shared keys together in steps of more than 8
PREEMPT_EVERY = 7  # steps; the newest sequence is preempted, so that beams are among them
SAMPLES = (1, 3, None, 2, 1)  # of successive requests, in turn; None: beams
HAPPENINGS = ("tokens computed", "prefix hits", "forks", "copies on write", "preemptions", "evictions", "rejected drafts")
MOST_DRAFTS = 4


@dataclass(frozen=True, slots=True)
class Verified:
    depth: int
    compared: Compared
    pool: PoolCounts
    preemptions: int
    cached_tokens: int
    requests: int
    searches: int  # requests answered by beam search
    dtype: str
    kv_cache_dtype: str
    kernels: str  # kernels that were compared
    schedule: dict[str, list[int]]  # how often each event happened in each step
    states: StateCounts | None = None  # checkpoints of a recurrent model
    other_ranks: dict[int, int] = field(default_factory=dict)  # how many numbers each rank except the first has compared


def stress_config(config: EngineConfig, depth: int, groups: Sequence[CacheGroup] = (FULL,)) -> EngineConfig:
    """Returns settings with the user's model, dtype and block size, and tight limits otherwise: a pool of three long sequences."""
    size = config.block_tokens
    tokens = max(2 * size, NUM_ROWS)
    return replace(
        config,
        max_model_len=BLOCKS_FOR_LONGEST * size + 1,
        num_gpu_blocks_override=3 * blocks_for(groups, size, BLOCKS_FOR_LONGEST * size, tokens) + 1,
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=tokens,
        enable_prefix_caching=True,
        pipeline_depth=depth,
    )


def beam_width(groups: Sequence[CacheGroup]) -> int:
    """Returns how many beams always fit into the pool. If blocks differ in length, beams share fewer of them."""
    return 3 if all(group.links == 1 for group in groups) else 2


def stress_requests(count: int, block_size: int, vocab_size: int, seed: int, width: int) -> list[AddRequest]:
    """Returns prompts over a few shared prefixes. Some are repeated, some have several samples, and some have `width` beams."""
    rng = Random(seed)
    size = block_size
    prefixes = [[rng.randrange(vocab_size) for _ in range(3 * size)] for _ in range(3)]
    tails = [1, 2, size - 1, size, size + 1, 2 * size]  # a sample forks at the last token: at, after and before the end of a block
    requests: list[AddRequest] = []
    for number in range(count):
        if number % 5 == 4:
            prompt = requests[rng.randrange(len(requests))].prompt_token_ids  # repeated: a full hit
        else:
            tail = [rng.randrange(vocab_size) for _ in range(tails[number % len(tails)])]
            prompt = rng.choice(prefixes)[: rng.choice([size, 2 * size, 3 * size])] + tail
        samples, room = SAMPLES[number % len(SAMPLES)], BLOCKS_FOR_LONGEST * size + 1 - len(prompt)
        longest = min(room, 2 * size + 4 if samples else size + 2)  # beams share less than samples the longer they are
        params = SamplingParams(n=samples or width, seed=number, ignore_eos=True, max_tokens=rng.randint(1 if samples else 2, longest))
        requests.append(AddRequest(str(number), prompt, params, beams=None if samples else Beams(width)))
    return requests


def random_drafts(vocab_size: int, seed: int) -> Draft:
    """Returns a function that proposes some ids, or none."""
    rng = Random(seed)
    return lambda seq: [rng.randrange(vocab_size) for _ in range(rng.randint(0, MOST_DRAFTS))]


def verify(config: EngineConfig, source: ModelSource, model: ModelConfig, depth: int, num_requests: int) -> Verified:
    """Runs the stress schedule at one pipeline depth. Raises `VerifyError` at the first difference."""
    size = config.block_tokens
    longest = BLOCKS_FOR_LONGEST * size + 1
    if model.max_position < longest:
        raise ConfigError(
            f"octavo verify needs a context of {BLOCKS_FOR_LONGEST} blocks of {size} tokens ({longest} tokens), "
            f"but the model's maximum is {model.max_position}: lower --block-size"
        )
    ranks = config.tensor_parallel_size, config.decode_context_parallel_size, config.expert_ranks
    (shape, *_) = ModelShape(source.name, model).of_rank(*ranks).stages(config.pipeline_parallel_size)
    groups = shape.needs("float32").groups
    config = stress_config(config, depth, groups)
    debug = replace(debug_from_environment(), check=True, preempt_every=PREEMPT_EVERY)

    with compilers_for(config.device) as compilers:
        start, facts, shadow, others = _open(config, source, model, debug, compilers)
    core = assemble(start, model, debug)
    if depth == 1 and core.scheduler.kv.states is None:  # at depth 2 a sequence with drafts is never in two steps; states are not cut
        core.scheduler.drafts.source = random_drafts(model.vocab_size, config.seed)
    requests = stress_requests(num_requests, size, model.vocab_size, config.seed, beam_width(groups))
    try:
        cached, schedule = _run(core, requests, shadow.compared)
    finally:
        core.close()
    scheduler = core.scheduler
    idle = [rank for rank in range(1, config.num_ranks) if not others.get(rank)]
    if idle:
        raise VerifyError(f"rank {idle[0]} has compared nothing")
    verified = Verified(
        depth=depth,
        compared=shadow.compared,
        pool=scheduler.kv.pool.counts,
        preemptions=scheduler.stats.preemptions,
        cached_tokens=cached,
        requests=len(requests),
        searches=sum(request.beams is not None for request in requests),
        dtype=facts.dtype,
        kv_cache_dtype=facts.needs.kv_cache_dtype,
        kernels=facts.kernels,
        schedule=schedule,
        states=None if scheduler.kv.states is None else scheduler.kv.states.pool.counts,
        other_ranks=dict(sorted(others.items())),
    )
    _demand_stress(verified, size)
    return verified


def _open(
    config: EngineConfig, source: ModelSource, model: ModelConfig, debug: Debug, compilers: Compilers
) -> tuple[Started, Facts, Shadow, dict[int, int]]:
    """Returns a runner with a shadow, or all ranks with one each; the runtime config and shadow of the first rank; and a dict that holds,
    once the runner has stopped, how many numbers each other rank has compared.
    """
    if config.num_ranks > 1:
        facts, ranked = open_ranks(config, source, model, debug, compilers, verify=True)
        assert ranked.shadow is not None
        return started(facts, ranked.geometry, ranked, ranked.on_event), facts, ranked.shadow, ranked.ranks.compared
    facts = settle(config, source, model, debug)
    geometry = with_checkpoints(facts.plan_cache(), NUM_ROWS)
    runner, shadow = build_proven(facts, geometry, debug, compilers, verify=True)
    assert shadow is not None
    start = started(facts, geometry, runner, partial(happened, runner=runner, shadow=shadow))
    return replace(start, on_state_event=partial(state_happened, runner=runner, shadow=shadow)), facts, shadow, {}


def _run(core: EngineCore, requests: list[AddRequest], compared: Compared) -> tuple[int, dict[str, list[int]]]:
    """Adds requests in bursts. Returns the prompt tokens that came from the cache, and the events of each step."""
    queue, cached, so_far = list(reversed(requests)), 0, [(0,) * len(HAPPENINGS)]
    stats, pool = core.scheduler.stats, core.scheduler.kv.pool.counts
    while queue or core.has_work:
        if queue and core.scheduler.step % 4 == 0:
            for _ in range(min(4, len(queue))):
                core.add(queue.pop())
        for delta in core.step():
            if delta.finish_reason == "error":
                raise EngineError(str(delta.error))
            if delta.finish_reason is not None and delta.index == 0 and delta.life is not None:
                cached += delta.life.cached_tokens
        happened = compared.forks, compared.copies, stats.preemptions, pool.evicted, compared.rejected
        so_far.append((stats.step_tokens, stats.prefix_hits, *happened))
    steps = [[now - before for before, now in zip(*pair)] for pair in pairwise(so_far)]
    return cached, {name: [step[index] for step in steps] for index, name in enumerate(HAPPENINGS)}


def _demand_stress(verified: Verified, block_size: int) -> None:
    seen = {
        "prefix hits": verified.cached_tokens,
        "forks": verified.compared.forks,
        "copies on write": verified.compared.copies,
        "preemptions": verified.preemptions,
        "evictions": verified.pool.evicted,
        "beam searches": verified.searches,
        "rejected drafts": verified.compared.rejected,
    }
    if verified.states is not None:
        seen |= {"hits of a state": verified.compared.restored, "evictions of a state": verified.states.evicted}
    if verified.depth > 1 or verified.states is not None:
        del seen["rejected drafts"]
    if block_size == 1:
        del seen["copies on write"]  # a block of one token is never partially filled, so it is never copied
    missing = [name for name, count in seen.items() if count == 0]
    if missing:
        more = f"raise --requests above {verified.requests}"
        raise VerifyError(f"the stress schedule saw no {', '.join(missing)}, so it proves too little: {more}")


# -- random schedules
#
#     reference     each sample, or beam search, alone: its whole prompt in one step, nothing cached
#     schedules     drawn by `engine/schedules.py`; all that have the same block size run on one runner
#
# After a difference both runs are repeated, and `worker/layer_states.py` finds the step, layer and position where they part. Schedules
# that caused no hit, fork, chunk, preemption, eviction, shared read, beam search or moved request, all together, prove too little, and
# fail.

COUNT_NAMES = {"together": "shared reads", "searches": "beam searches", "moved": "requests moved to another engine"}
Passed = Callable[[int, Schedule, Counts], None]  # called after each schedule, with its number


@dataclass(frozen=True, slots=True)
class Invariance:
    """What was compared."""

    requests: int
    samples: int
    tokens: int  # generated under each schedule
    dtype: str
    kv_cache_dtype: str
    kernels: str
    schedules: list[tuple[Schedule, Counts]]

    @property
    def total(self) -> Counts:
        total = Counts()
        for _, counts in self.schedules:
            total.add(counts)
        return total


class Proof:
    """A model, and the requests whose answers are compared, alone and under random schedules."""

    def __init__(self, config: EngineConfig, source: ModelSource, model: ModelConfig, requests: Sequence[AddRequest] | None = None) -> None:
        """`requests`: for a test, instead of random ones"""
        _refuse_ranks(config)
        longest = min(LONGEST, model.max_position) if requests is None else with_second_turn(requests)
        if requests is None and longest < LEAST:
            raise ConfigError(f"octavo verify --schedules needs a context of {LEAST} tokens, but the model's maximum is {longest}")
        self._config, self._longest, self._vocab = config, longest, model.vocab_size
        self._first = requests
        self._open: Callable[[int], AbstractContextManager[Bench]] = partial(opened, config, source, model, longest, refuse_unpromised)
        self._work, self._reference = Work([], {}), Answers()

    def run(self, num_schedules: int, num_requests: int, passed: Passed = lambda number, schedule, counts: None) -> Invariance:
        """Compares all schedules. Raises `VerifyError` at the first difference."""
        done: list[tuple[Schedule, Counts]] = []
        size, seed = self._config.block_size, self._config.seed
        with self._open(size) as bench:
            self._answer_alone(bench, num_requests)
            schedules = draw_schedules(num_schedules, size, self._longest, bench.threads, len(self._work.requests), seed)
            facts = bench.facts
            found = self._compare(bench, [one for one in schedules if one.block_size == size], done, passed)
        for other, some in groupby([one for one in schedules if one.block_size != size], lambda one: one.block_size):
            if found is None:
                with self._open(other) as bench:
                    found = self._compare(bench, list(some), done, passed)
        if found is not None:
            schedule = schedules[len(done)]
            raise VerifyError(f"schedule {len(done) + 1} ({schedule}): {found}. {self._first_state(schedule, found)}")
        tokens = [len(answer.ids) for answer in self._reference.values()]
        kinds = facts.dtype, facts.needs.kv_cache_dtype, facts.kernels
        proven = Invariance(len(self._work.requests), len(tokens), sum(tokens), *kinds, done)
        _demand_all(proven)
        return proven

    def _answer_alone(self, bench: Bench, num_requests: int) -> None:
        seed = self._config.seed
        first = self._first or draw_requests(num_requests, self._longest, self._vocab, seed)
        self._reference = bench.alone(first)
        answers = {name: answer.ids for (name, index), answer in self._reference.items() if index == 0}
        self._work = draw_second_turns(first, answers, self._vocab, seed)
        self._reference |= bench.alone(self._work.requests[len(first) :])

    def _compare(self, bench: Bench, some: list[Schedule], done: list[tuple[Schedule, Counts]], passed: Passed) -> Difference | None:
        """Runs schedules up to the first difference, and adds those before it to `done`."""
        for schedule in some:
            rounds, counts = bench.run(schedule, self._work)
            difference = self._first_difference(rounds)
            if difference is not None:
                return difference
            done.append((schedule, counts))
            passed(len(done), schedule, counts)
        return None

    def _first_difference(self, rounds: list[Answers]) -> Difference | None:
        return next((one for answers in rounds for one in differences(self._work.requests, self._reference, answers)), None)

    def _first_state(self, schedule: Schedule, found: Difference) -> str:
        """Repeats both runs, and returns where their states begin to differ."""
        request, index = found.request, found.index
        states = TextStates(request.prompt_token_ids + self._reference[request.request_id, index].ids)
        try:
            with self._open(self._config.block_size) as bench, bench.showing(states):
                bench.alone([request])
            with self._open(schedule.block_size) as bench, bench.showing(states):
                rounds, _ = bench.run(schedule, self._work)
        except VerifyError as error:
            return f"The first difference in a repeated run: {error}"
        if self._first_difference(rounds) is None:
            return "It did not happen again when both runs were repeated, so it depends on the timing of threads"
        return "The states of all layers and the logits are equal: ids and logprobs are computed from them differently"


def refuse_unpromised(facts: Facts) -> None:
    """Raises an error if the kernels that would compute do not promise equal bits."""
    if facts.library is not None:
        return
    if facts.device.type == "cuda":
        why = "it runs with the native kernels only: set --device cpu"
    elif (refusal := native_refusal(facts.model)) is not None:
        why = f"torch kernels, which this model needs because {refusal}, do not promise them"
    elif not facts.config.native:
        why = "torch kernels do not promise them: leave out --no-native"
    else:
        why = "torch kernels do not promise them, and this machine has no native kernels: octavo doctor says why"
    raise ConfigError(f"octavo verify --schedules compares equal bits, and {why}")


def _refuse_ranks(config: EngineConfig) -> None:
    sizes = {
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "decode_context_parallel_size": config.decode_context_parallel_size,
    }
    for name, size in sizes.items():
        if size > 1:
            raise ConfigError(f"{name} is {size}, but octavo verify --schedules runs in one process: leave it at 1")


def _demand_all(proven: Invariance) -> None:
    total = proven.total
    missing = [each.name for each in fields(total) if getattr(total, each.name) == 0]
    if missing:
        names = ", ".join(COUNT_NAMES.get(name, name) for name in missing)
        raise VerifyError(f"the schedules saw no {names}, so they prove too little: raise --schedules or --requests")
