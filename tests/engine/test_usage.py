"""Usage counts what a user would count: the same streamed or not, for n samples, after preemption, with cached tokens."""

from collections import Counter

import pytest

from octavo.sampling_params import SamplingParams
from tests.support.serving import FakeService

SIZE = 4
PROMPT = [3 + (5 * i) % 200 for i in range(23)]
STOPS = ("a", "e")  # single letters: FakeKV's tokens are random, and soon one has them


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preempt_every", [0, 2, 3])
def test_usage_is_that_of_the_text_whatever_happened_on_the_way(preempt_every: int, depth: int) -> None:
    service = FakeService(block_size=SIZE, depth=depth)
    service.add("warm", PROMPT, SamplingParams(max_tokens=1, ignore_eos=True))
    service.run()
    service.scheduler.preempt_every = preempt_every
    params = {
        "one": SamplingParams(max_tokens=17, ignore_eos=True, seed=1),
        "three": SamplingParams(n=3, max_tokens=12, ignore_eos=True, seed=2),
        "stops": SamplingParams(max_tokens=60, ignore_eos=True, seed=3, stop=STOPS),
    }
    for name, asked in params.items():
        service.add(name, PROMPT, asked)
    deltas, finished = service.run()
    outputs = {output.request_id: output for output in finished}

    assert {name: len(output.prompt_token_ids) for name, output in outputs.items()} == dict.fromkeys(params, len(PROMPT))
    cached = (len(PROMPT) - 1) // SIZE * SIZE
    assert {output.num_cached_tokens for output in finished} == {cached}, "its own blocks do not count when it comes back"
    counts = {name: [len(sample.token_ids) for sample in output.outputs] for name, output in outputs.items()}
    assert counts["one"] == [17] and counts["three"] == [12] * 3 and 0 < counts["stops"][0] < 60
    streamed = Counter[tuple[str, int]]()
    for delta in deltas:
        streamed[delta.request_id, delta.index] += len(delta.token_ids)
    assert streamed == {(name, index): count for name, per_sample in counts.items() for index, count in enumerate(per_sample)}
    stopped = outputs["stops"].outputs[0]
    assert not any(stop in stopped.text for stop in STOPS)
    decoded = [service.tokenizer.decode(PROMPT[-1:] + ids) for ids in (stopped.token_ids, stopped.token_ids[:-1])]
    assert [any(stop in text for stop in STOPS) for text in decoded] == [True, False], "counted up to the token that completes the stop"
    assert (service.scheduler.stats.preemptions > 2) == (preempt_every > 0)
    assert service.is_idle()
