"""`prompt_logprobs`: what the model thought of every prompt token, whatever the schedule did to the prompt."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import RequestError
from octavo.outputs import RequestOutput
from octavo.worker import model_runner
from octavo.worker.program import Eager

if TYPE_CHECKING:  # seconds, for every process that collects tests
    import transformers

TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her friends and her dog. "
PROMPTS = [TEXT * 3, "The cat", TEXT + "It was a sunny day.", "x", "One day, Tom went to the big tree and saw a bird."]
COUNT = 3


@pytest.fixture(scope="module")
def reference(stories: str) -> "Iterator[transformers.PreTrainedModel]":
    import transformers

    yield transformers.AutoModelForCausalLM.from_pretrained(Path(stories), dtype=torch.float32).eval()


def asked(llm: LLM, n: int = 1, max_tokens: int = 4) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, n=n, max_tokens=max_tokens, prompt_logprobs=COUNT, ignore_eos=True)
    return llm.generate(PROMPTS, params, use_tqdm=False)


@torch.inference_mode()
def check(outputs: list[RequestOutput], reference: "transformers.PreTrainedModel") -> None:
    assert len(outputs) == len(PROMPTS)
    for output in outputs:
        ids, found = output.prompt_token_ids, output.prompt_logprobs
        assert found is not None and len(found) == len(ids) and found[0] is None
        expected = torch.log_softmax(reference(torch.tensor([ids])).logits[0, :-1], -1)  # [L - 1, vocab]
        for token, choices, row in zip(ids[1:], found[1:], expected, strict=True):
            assert choices is not None
            assert abs(choices[token].logprob - float(row[token])) < 1e-3
            assert choices[token].rank == int((row > row[token]).sum()) + 1
            best = row.topk(COUNT).indices.tolist()
            assert [other for other in choices if choices[other].rank <= COUNT and other != token] == [b for b in best if b != token]
            assert len(choices) == COUNT + (token not in best)


# promise: samplingparams-prompt-logprobs
@pytest.mark.parametrize("depth", [1, 2])
def test_they_are_those_of_transformers_in_chunks_with_a_warm_cache_and_for_several_samples(
    stories: str, reference: "transformers.PreTrainedModel", depth: int
) -> None:
    with LLM(stories, num_gpu_blocks_override=120, max_num_seqs=8, max_num_batched_tokens=24, pipeline_depth=depth) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=4), False)]
        outputs = asked(llm)
        check(outputs, reference)
        assert [output.outputs[0].token_ids for output in outputs] == plain
        assert [(output.num_cached_tokens, output.metrics.hit_reason) for output in outputs] == [(0, "off")] * len(PROMPTS)
        check(asked(llm, n=3), reference)
        again = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1), use_tqdm=False)[0]
        assert again.num_cached_tokens > 0, "what they computed is in the cache for others"
        assert again.prompt_logprobs is None


# promise: requestoutput-prompt-logprobs
def test_a_preempted_prompt_gives_them_all(
    stories: str, reference: "transformers.PreTrainedModel", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "preempt.every=3,check=1")
    with LLM(stories, num_gpu_blocks_override=120, max_num_seqs=8, max_num_batched_tokens=16, pipeline_depth=2) as llm:
        outputs = asked(llm, max_tokens=12)
    check(outputs, reference)
    assert sum(output.metrics.preemptions for output in outputs) > 3


def test_a_stream_tells_text_alone(stories: str) -> None:
    with LLM(stories, num_gpu_blocks_override=120, max_num_batched_tokens=256) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0)
        assert [len(delta.token_ids) for delta in llm.stream(TEXT * 3, params)] == [1, 1, 1]


# promise: samplingparams-prompt-logprobs
def test_logits_of_a_long_prompt_are_made_a_slice_at_a_time(stories: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = Eager.logits
    monkeypatch.setitem(model_runner.SLICE_LOGITS, "cpu", 512 * 10)
    with LLM(stories, native=False, num_gpu_blocks_override=120) as llm:
        monkeypatch.setattr(Eager, "logits", lambda program, hidden: seen.append(len(hidden)) or original(program, hidden))
        (output,) = llm.generate([[5] * 301], SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    assert output.prompt_logprobs is not None and None not in output.prompt_logprobs[1:]
    assert max(seen) == 10 and sum(seen) == 300


def test_more_than_the_engine_allows_is_refused_by_name(stories: str) -> None:
    with LLM(stories, num_gpu_blocks_override=20, max_logprobs=2) as llm, pytest.raises(RequestError, match="prompt_logprobs is 3, max"):
        asked(llm)
