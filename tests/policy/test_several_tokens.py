"""A step may sample several tokens for a row: all are counted and delivered, and what lies behind an end is dropped."""

import pytest

from octavo.sampling_params import SamplingParams
from octavo.worker.executor import Kept, Masks
from tests.support.fake import FakeEngine, sampling

PROMPT = [(11 * i + i * i // 5) % 50 for i in range(13)]
DEPTHS = pytest.mark.parametrize("depth", [1, 2])
MOST = 3


def _engine(depth: int, **more: object) -> FakeEngine:
    return FakeEngine(block_size=4, rows=4, budget=24, depth=depth, row_tokens=MOST, **more)  # type: ignore[arg-type]


def _sampled(engine: FakeEngine) -> list[int]:
    """How many tokens the runner gives, from now on."""
    counts: list[int] = []
    sample = engine.runner.sample

    def count(masks: Masks | None = None) -> Kept:
        made = sample(masks)
        counts.extend(map(len, made.result().tokens))
        return made

    engine.runner.sample = count  # type: ignore[method-assign]
    return counts


@DEPTHS
@pytest.mark.parametrize("preempt_every", [0, 3])
def test_texts_are_exact_and_come_in_fewer_steps(preempt_every: int, depth: int) -> None:
    engine = _engine(depth, preempt_every=preempt_every)
    for number in range(6):
        engine.add(str(number), PROMPT[number:], sampling(20 + number, n=1 + number % 2))
    engine.run()
    engine.assert_exact()
    engine.assert_idle()
    counts = [len(engine.tokens[key]) - len(set(steps)) for key, steps in engine.token_steps.items()]
    assert min(counts) > 4, "hardly any step gave several"
    stats = engine.scheduler.stats
    assert stats.generation_tokens == sum(map(len, engine.tokens.values()))
    if not preempt_every:
        assert sum(len(PROMPT) - number for number in range(6)) - stats.prefix_hits <= stats.prompt_tokens


@DEPTHS
def test_what_lies_behind_an_end_id_or_the_limit_is_dropped_and_min_tokens_holds_in_between(depth: int) -> None:
    reasons, dropped = set(), 0
    for number in range(8):
        engine = _engine(depth, end_ids=tuple(range(0, 50, 6)))
        params = SamplingParams(max_tokens=9 + number % 3, min_tokens=number, logprobs=2)
        engine.add("r", PROMPT[number:], params)
        given = _sampled(engine)
        logprobs = [found for _ in range(40) for delta in engine.step() for found in delta.logprobs or ()]
        engine.assert_exact()
        engine.assert_idle()
        reasons.add(engine.reason("r"))
        assert len(logprobs) == len(engine.tokens["r", 0])
        dropped += sum(given) - len(logprobs)
    assert reasons == {"stop", "length"} and dropped > 0


@DEPTHS
def test_bad_words_are_barred_at_each_of_several_tokens(depth: int) -> None:
    engine = _engine(depth)
    engine.add("free", PROMPT, sampling(24, seed=1))
    engine.run()
    said = engine.tokens["free", 0]
    words = [[said[1]], said[3:5], said[6:9]]
    engine.add("r", PROMPT, sampling(24, seed=1), bad_words=words)
    engine.run()
    engine.assert_exact()
    text = engine.tokens["r", 0]
    assert text[0] == said[0] and text != said
    assert not any(text[at : at + len(word)] == word for word in words for at in range(len(text)))


def test_decode_is_not_starved_by_a_prefill_while_several_tokens_are_due() -> None:
    engine = FakeEngine(block_size=4, rows=3, budget=12, num_blocks=200, row_tokens=MOST)
    engine.add("long", [at % 50 for at in range(400)], sampling(1))
    engine.step()
    engine.add("decodes", PROMPT, sampling(20))
    engine.run()
    engine.assert_exact()
    steps = sorted(set(engine.token_steps["decodes", 0]))
    assert steps == list(range(steps[0], steps[-1] + 1)), "it got tokens in every step"
    assert max(sum(plan.num_query) for plan in engine.executor.plans) <= 12
