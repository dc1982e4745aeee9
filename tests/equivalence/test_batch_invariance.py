"""On a CPU with native kernels, the default model in its 4-bit form answers with the same bits under every schedule.

Texts and logprobs of a request that runs alone are compared with those of the same request among others, in chunks, found in the
cache, preempted and sampled several times. `make soak` runs many prompts, and other weights and caches.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, CompletionOutput, RequestOutput, SamplingParams
from tests.support.native import levels_here
from tests.support.native_weights import INVARIANT

QUESTIONS = [line for line in (Path(__file__).parents[1] / "data/prompts/questions.txt").read_text().splitlines() if line]
LEAD = "You are an assistant who answers briefly, in plain words, and never invents facts. " * 4
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
SEEDED = replace(PARAMS, temperature=1.0, top_p=0.9, seed=7)
LEVELS = [level for level in levels_here() if level in INVARIANT]
KINDS: dict[str, dict[str, Any]] = {
    "4 bits": {},
    "8 bits": {"quantization": "int8"},
    "float32": {"quantization": "none", "dtype": "float32"},
    "bfloat16": {"quantization": "none", "dtype": "bfloat16"},
    "float16 cache": {"kv_cache_dtype": "float16"},
    "int8 cache": {"kv_cache_dtype": "int8"},
}
Answer = list[tuple[list[int], list[dict[int, float]]]]


def answers(outputs: list[RequestOutput]) -> list[Answer]:
    """The ids and logprobs of every completion of every request."""
    return [[(list(one.token_ids), logprobs(one)) for one in output.outputs] for output in outputs]


def logprobs(one: CompletionOutput) -> list[dict[int, float]]:
    return [{token: choice.logprob for token, choice in choices.items()} for choices in one.logprobs or []]


class Schedules:
    """Runs prompts under different schedules, with the same settings of the numbers."""

    def __init__(self, level: str, monkeypatch: pytest.MonkeyPatch, prompts: list[str], params: SamplingParams, **kind: Any) -> None:
        self._level, self._monkeypatch, self._prompts, self._params, self._kind = level, monkeypatch, prompts, params, kind

    def alone(self) -> list[Answer]:
        with self._engine() as llm:
            outputs = []
            for prompt in self._prompts:
                outputs += llm.generate([prompt], self._params, use_tqdm=False)
                llm.reset_prefix_cache()
        return answers(outputs)

    def together(self, debug: str = "", rounds: int = 1, n: int = 1, **settings: Any) -> list[Answer]:
        """The answers of the last of some rounds."""
        with self._engine(debug, **settings) as llm:
            for _ in range(rounds):
                outputs = llm.generate(self._prompts, replace(self._params, n=n), use_tqdm=False)
        return answers(outputs)

    def _engine(self, debug: str = "", **settings: Any) -> LLM:
        self._monkeypatch.setenv("OCTAVO_DEBUG", ",".join(filter(None, (f"isa={self._level}", debug))))
        return LLM(None, **{"num_gpu_blocks_override": 700, "max_num_seqs": 32, **self._kind, **settings})


def check(schedules: Schedules) -> None:
    alone = schedules.alone()
    assert len({str(answer) for answer in alone}) == len(alone)
    assert schedules.together() == alone
    assert schedules.together(rounds=2) == alone  # prompts are found in the cache
    assert schedules.together(max_num_batched_tokens=32, max_num_seqs=16) == alone
    assert schedules.together("preempt.every=3", max_num_batched_tokens=100) == alone
    for answer, several in zip(alone, schedules.together(n=4, enable_prefix_caching=False), strict=True):
        assert several == answer * 4


# promise: x86-batch-invariance
@pytest.mark.parametrize("level", LEVELS[-1:])
def test_the_schedule_does_not_change_an_answer(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(Schedules(level, monkeypatch, [LEAD + question for question in QUESTIONS[:6]], PARAMS))


@pytest.mark.parametrize("level", LEVELS[-1:])
def test_the_schedule_does_not_change_a_seeded_answer(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedules = Schedules(level, monkeypatch, [LEAD + question for question in QUESTIONS[:6]], SEEDED)
    assert schedules.alone() == schedules.together("preempt.every=3", max_num_batched_tokens=48)


@pytest.mark.soak
@pytest.mark.parametrize("level", LEVELS)
def test_a_thousand_prompts(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = itertools.islice(itertools.permutations(QUESTIONS, 2), 1000)
    check(Schedules(level, monkeypatch, [LEAD + " ".join(pair) for pair in pairs], replace(PARAMS, max_tokens=32)))


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_other_weights_and_caches(level: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [LEAD + " ".join(pair) for pair in itertools.islice(itertools.permutations(QUESTIONS, 2), 100)]
    check(Schedules(level, monkeypatch, prompts, replace(PARAMS, max_tokens=32), **KINDS[kind]))
