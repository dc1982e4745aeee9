"""Usage counts what a user would count: the same streamed or not, for n samples, after preemption, with cached tokens."""

from collections import Counter
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from tests.support.story_folder import story_folder

SIZE = 4
PROMPT = [3 + (5 * i) % 200 for i in range(23)]
STOPS = ("a", "e")  # single letters: FakeKV's tokens are random, and soon one has them
PARAMS = (
    SamplingParams(max_tokens=17, ignore_eos=True, seed=1),
    SamplingParams(n=3, max_tokens=12, ignore_eos=True, seed=2),
    SamplingParams(max_tokens=60, ignore_eos=True, seed=3, stop=STOPS),
)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preempt_every", [0, 2, 3])
def test_usage_is_that_of_the_text_whatever_happened_on_the_way(
    preempt_every: int, depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=fake")
    prompts = [{"prompt_token_ids": PROMPT}] * len(PARAMS)
    with LLM(str(story_folder(tmp_path)), block_size=SIZE, num_gpu_blocks_override=200, max_num_seqs=8, pipeline_depth=depth) as llm:
        llm.generate(prompts[:1], SamplingParams(max_tokens=1, ignore_eos=True))
        llm._core.scheduler.preempt_every = preempt_every  # from here on: the prompt is in the cache
        outputs = llm.generate(prompts, PARAMS)
        streamed = Counter[tuple[int, int]]()
        for number, delta in llm.stream_batch(prompts, PARAMS):
            streamed[number, delta.index] += len(delta.token_ids)
        tokenizer, stats = llm.get_tokenizer(), llm.stats()

    assert [len(output.prompt_token_ids) for output in outputs] == [len(PROMPT)] * 3
    cached = (len(PROMPT) - 1) // SIZE * SIZE
    assert {output.num_cached_tokens for output in outputs} == {cached}, "its own blocks do not count when it comes back"
    counts = [[len(sample.token_ids) for sample in output.outputs] for output in outputs]
    assert counts[:2] == [[17], [12] * 3] and 0 < counts[2][0] < 60
    assert streamed == {(number, index): count for number, samples in enumerate(counts) for index, count in enumerate(samples)}
    stopped = outputs[2].outputs[0]
    assert not any(stop in stopped.text for stop in STOPS)
    decoded = [tokenizer.decode(PROMPT[-1:] + ids) for ids in (stopped.token_ids, stopped.token_ids[:-1])]
    assert [any(stop in text for stop in STOPS) for text in decoded] == [True, False], "counted up to the token that completes the stop"
    assert (stats.preemptions > 2) == (preempt_every > 0)
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.num_blocks - 1)
