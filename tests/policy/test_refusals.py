"""What can never be served is refused at once, naming the number and the knob; what just fits is served."""

import pytest

from octavo.errors import RequestError
from octavo.messages import AddRequest, Limits
from octavo.policy.request import check_request
from tests.support.fake import VOCAB, FakeEngine, sampling

MAX = 32


# promise: context-length-exceeded
@pytest.mark.parametrize(
    ("length", "count", "served"),
    [
        (MAX - 2, 2, True),
        (MAX - 1, 1, True),
        (MAX - 1, 2, False),
        (MAX, 1, False),
        (MAX, 2, False),
        (MAX + 1, 1, False),
        (MAX + 1, 2, False),
    ],
)
def test_prompts_around_the_context_length(length: int, count: int, served: bool) -> None:
    engine = FakeEngine(max_len=MAX)
    if served:
        engine.add("r", [1] * length, sampling(count))
        engine.run()
        engine.assert_exact()
        assert engine.reason("r") == "length" and len(engine.tokens["r", 0]) == count
        return
    with pytest.raises(RequestError, match=f"maximum context length is {MAX} tokens.*{length} in the prompt and {count} in") as refusal:
        engine.add("r", [1] * length, sampling(count))
    assert refusal.value.code == "context_length_exceeded" and str(refusal.value).endswith("; shorten the prompt or lower max_tokens")
    assert refusal.value.param == ("max_tokens" if length < MAX else "prompt")
    engine.assert_idle()


def test_positions_must_be_those_of_the_model() -> None:
    engine = FakeEngine(max_len=MAX)
    for number, count in enumerate((3, None)):
        engine.add(f"r{number}", [1] * 9, sampling(count), position_offset=MAX - 12)
    for offset, count in ((MAX - 11, 3), (MAX - 9, None), (-1, 3)):
        most = MAX - 9 - (count or 1)
        with pytest.raises(RequestError, match=f"position_offset is {offset}, but it must be from 0 to {most}: ") as refusal:
            engine.add("r", [1] * 9, sampling(count), position_offset=offset)
        assert refusal.value.param == "position_offset"
    engine.run()
    engine.assert_exact()
    assert [len(tokens) for tokens in engine.tokens.values()] == [3, 3]


def test_without_max_tokens_a_request_runs_to_the_end_of_the_context() -> None:
    engine = FakeEngine(max_len=MAX)
    engine.add("r", [1] * (MAX - 5), sampling(None))
    with pytest.raises(RequestError, match=r"you requested 32 tokens in the prompt; shorten the prompt$"):
        engine.add("full", [1] * MAX, sampling(None))
    engine.run()
    engine.assert_exact()
    assert len(engine.tokens["r", 0]) == 5


# promise: advice-beyond-models
@pytest.mark.parametrize(("own", "advised"), [(MAX, False), (MAX + 1, True)])
def test_a_longer_context_is_advised_where_the_model_has_one(own: int, advised: bool) -> None:
    limits = Limits(8, 64, MAX, 100, 64, 4, model_max_len=own)
    with pytest.raises(RequestError) as refusal:
        check_request(AddRequest("r", [1] * MAX, sampling(1)), limits)
    said = f"raise --max-model-len (up to {own} tokens, the model's own maximum)"
    assert (said in str(refusal.value)) == advised and ("--max-model-len" in str(refusal.value)) == advised


@pytest.mark.parametrize("size", [1, 4])
def test_a_request_as_large_as_the_pool_is_served_and_a_larger_one_refused(size: int) -> None:
    most = 8 * size + 1  # the last token is never computed
    engine = FakeEngine(block_size=size, num_blocks=9, max_len=100, rows=2)
    with pytest.raises(RequestError, match=r"grow to 9 blocks.*the KV cache has 8.*--num-gpu-blocks-override") as refusal:
        engine.add("more", [1] * 3, sampling(most - 3 + 1))
    assert refusal.value.param == "max_tokens" and refusal.value.code == "context_length_exceeded"
    engine.add("most", [1] * 3, sampling(most - 3))
    engine.add("too", [2] * 3, sampling(most - 3))
    engine.run()
    engine.assert_exact()


@pytest.mark.parametrize("token", [-1, -(2**31), VOCAB, VOCAB + 1, 2**63])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    engine = FakeEngine()
    with pytest.raises(RequestError, match=f"token id {token} in prompt is out of vocabulary, which has {VOCAB} ids") as refusal:
        engine.add("r", [1, token], sampling())
    assert refusal.value.param == "prompt"
    if token >= 0:
        with pytest.raises(RequestError, match=f"token id {token} in stop_token_ids") as refusal:
            engine.add("r", [1], sampling(stop=(token,)))
        assert refusal.value.param == "stop_token_ids"
    engine.assert_idle()


def test_empty_prompts_and_doubled_ids_are_refused() -> None:
    engine = FakeEngine()
    with pytest.raises(RequestError, match="prompt is empty"):
        engine.add("r", [], sampling())
    engine.add("r", [VOCAB - 1], sampling())
    with pytest.raises(RequestError, match="'r' is already in use"):
        engine.add("r", [1], sampling())
    engine.run()
    engine.assert_exact()


def test_the_first_bad_id_names_where_it_stands() -> None:
    engine = FakeEngine()
    with pytest.raises(RequestError, match="token id 99 in prompt"):
        engine.add("r", [99], sampling(stop=(99,)))
