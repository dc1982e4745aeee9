"""`octavo verify --schedules`: the same requests, alone and under random schedules, must get the same ids and logprobs, bit for bit.

    reference     each sample, or beam search, alone: its whole prompt in one step, nothing cached
    schedules     drawn by `engine/schedules.py`; all that have the same block size run on one runner

After a difference both runs are repeated, and `worker/layer_states.py` finds the step, layer and position where they part. Schedules
that caused no hit, fork, chunk, preemption, eviction, shared read, beam search or moved request, all together, prove too little, and fail.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import partial
from itertools import groupby, zip_longest

from octavo.config import EngineConfig
from octavo.engine.schedule_runs import Answers, Bench, Counts, Sample, opened
from octavo.engine.schedules import LEAST, LONGEST, Schedule, Work, draw_requests, draw_schedules, draw_second_turns, with_second_turn
from octavo.errors import ConfigError, VerifyError
from octavo.loading.resolve import ModelSource
from octavo.messages import AddRequest, TokenLogprobs
from octavo.model_config import ModelConfig
from octavo.sizing.native_size import native_refusal
from octavo.worker.facts import Facts
from octavo.worker.layer_states import TextStates

NAMES = {"together": "shared reads", "searches": "beam searches", "moved": "requests moved to another engine"}
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


@dataclass(frozen=True, slots=True)
class Difference:
    request: AddRequest
    index: int  # of the sample
    what: str

    def __str__(self) -> str:
        return f"request {self.request.request_id}, sample {self.index}, {self.what}"


class Proof:
    """A model, and the requests that are compared."""

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
        names = ", ".join(NAMES.get(name, name) for name in missing)
        raise VerifyError(f"the schedules saw no {names}, so they prove too little: raise --schedules or --requests")
