"""On a CPU with native kernels, the default model in its 4-bit form answers with the same bits under every schedule.

The text of each question is answered alone, and then under random schedules, as `octavo verify --schedules` does with random ids.
`make soak` runs many prompts, and other weights and caches.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.engine.schedules import BEAMS, KINDS, SEARCHES
from octavo.engine.verify import Invariance, Proof
from octavo.loading.text_side import open_text_side
from octavo.messages import AddRequest
from tests.support.native import levels_here

QUESTIONS = [line for line in (Path(__file__).parents[1] / "data/prompts/questions.txt").read_text().splitlines() if line]
LEAD = "You are an assistant who answers briefly, in plain words, and never invents facts. " * 4
LEVELS = levels_here()
WEIGHTS_AND_CACHES: dict[str, dict[str, Any]] = {
    "4 bits": {},
    "8 bits": {"quantization": "int8"},
    "float32": {"quantization": "none", "dtype": "float32"},
    "bfloat16": {"quantization": "none", "dtype": "bfloat16"},
    "float16 cache": {"kv_cache_dtype": "float16"},
    "int8 cache": {"kv_cache_dtype": "int8"},
}


def prove(level: str, prompts: list[str], max_tokens: int, schedules: int, **settings: Any) -> Invariance:
    """Raises an error at the first difference, and if nothing happened that could cause one."""
    config = EngineConfig(device="cpu", cpu_isa=level, **settings)
    text = open_text_side(config)
    requests = []
    for number, prompt in enumerate(prompts):
        kind = (SEARCHES[0], *KINDS)[number % (1 + len(KINDS))]
        params = replace(kind, seed=number, max_tokens=max_tokens, ignore_eos=True)
        beams = BEAMS if kind in SEARCHES else None
        requests.append(AddRequest(str(number), text.encoder.encode(prompt)[1], params, beams=beams))
    return Proof(config, text.source, text.model, requests).run(schedules, len(requests))


# promise: cpu-batch-invariance
@pytest.mark.parametrize("level", LEVELS[-1:])
def test_the_schedule_does_not_change_an_answer(level: str) -> None:
    proven = prove(level, [LEAD + question for question in QUESTIONS[:5]], max_tokens=8, schedules=1)
    assert (proven.requests, proven.samples) == (7, 14) and proven.kernels == f"native {level}"


@pytest.mark.soak
@pytest.mark.parametrize("level", LEVELS)
def test_a_thousand_prompts(level: str) -> None:
    pairs = itertools.islice(itertools.permutations(QUESTIONS, 2), 1000)
    prove(level, [LEAD + " ".join(pair) for pair in pairs], max_tokens=32, schedules=6)


@pytest.mark.soak
@pytest.mark.parametrize("kind", WEIGHTS_AND_CACHES)
@pytest.mark.parametrize("level", LEVELS)
def test_other_weights_and_caches(level: str, kind: str) -> None:
    prompts = [LEAD + " ".join(pair) for pair in itertools.islice(itertools.permutations(QUESTIONS, 2), 100)]
    prove(level, prompts, max_tokens=32, schedules=6, **WEIGHTS_AND_CACHES[kind])
