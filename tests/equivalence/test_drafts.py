"""Drafts, right and wrong ones, change no token on a real model, whoever samples: the step itself, or the full sampler."""

from collections.abc import Callable
from random import Random

import pytest

from octavo import LLM, CompletionOutput, RequestOutput, SamplingParams
from octavo.policy.request import Sequence
from tests.support.models import tiny_model

COMMON = {"max_tokens": 24, "ignore_eos": True, "logprobs": 2}
PARAMS = [
    SamplingParams(temperature=0, **COMMON),  # type: ignore[arg-type]
    SamplingParams(temperature=1, seed=3, n=2, **COMMON),  # type: ignore[arg-type]
    SamplingParams(temperature=0.8, seed=4, top_k=20, top_p=0.9, **COMMON),  # type: ignore[arg-type]
    SamplingParams(temperature=0, repetition_penalty=1.5, presence_penalty=0.7, **COMMON),  # type: ignore[arg-type]
    SamplingParams(temperature=1, seed=5, frequency_penalty=1.0, logit_bias={7: 4.0}, **COMMON),  # type: ignore[arg-type]
    SamplingParams(temperature=0, max_tokens=24, min_tokens=9, stop_token_ids=list(range(0, 300, 3)), logprobs=2),
]
PROMPTS = [[(11 * number + place * number) % 300 for place in range(9 + 5 * number)] for number in range(len(PARAMS))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("tiny") / "model", "Qwen3ForCausalLM", seed=5))


def outputs(llm: LLM) -> list[CompletionOutput]:
    answers: list[RequestOutput] = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [sample for answer in answers for sample in answer.outputs]


def proposals(right: dict[tuple[int, int], list[int]], counts: list[int]) -> Callable[[Sequence], list[int]]:
    """Ids that come next, a fifth of them wrong. `counts` receives how many."""
    random = Random(1)

    def draft(seq: Sequence) -> list[int]:
        text, known = right[seq.request.num_prompt, seq.index], seq.num_tokens - seq.request.num_prompt
        drafts = [token if random.random() < 0.8 else random.randrange(300) for token in text[known:][: random.randint(0, 6)]]
        counts.append(len(drafts))
        return drafts

    return draft


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("way", ["native", "model", "device", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_texts_and_logprobs_are_those_without_drafts(folder: str, way: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    switches = {"native": "check=1", "model": "check=1,native=off", "device": "check=1,runner=device", "gpu": "check=1"}
    monkeypatch.setenv("OCTAVO_DEBUG", switches[way] + ",preempt.every=11")
    with LLM(
        folder, device="cuda" if way == "gpu" else "cpu", dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=60,
        max_num_seqs=40, max_num_batched_tokens=64, block_size=8, pipeline_depth=depth, enable_prefix_caching=depth == 1,
    ) as llm:  # fmt: skip
        plain = outputs(llm)
        numbers = [(len(prompt), index) for prompt, params in zip(PROMPTS, PARAMS) for index in range(params.n)]
        counts: list[int] = []
        engine = llm._engine
        assert engine is not None
        scheduler = engine.scheduler
        scheduler.drafts.source = proposals({key: list(one.token_ids) for key, one in zip(numbers, plain)}, counts)
        before, steps = scheduler.stats.generation_tokens, scheduler.step
        drafted = outputs(llm)
        assert scheduler.stats.generation_tokens - before == sum(len(one.token_ids) for one in plain)
        assert sum(counts) > 100 and scheduler.step - steps < 2 * steps
    for one, other in zip(plain, drafted, strict=True):
        assert other.token_ids == one.token_ids and other.finish_reason == one.finish_reason
        for token, again in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert {name: entry.logprob for name, entry in again.items()} == pytest.approx(
                {name: entry.logprob for name, entry in token.items()}, abs=1e-4
            )
