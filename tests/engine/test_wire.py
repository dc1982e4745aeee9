"""What crosses between API and engine process arrives as it was sent, and what is not a message does nothing."""

from dataclasses import fields
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import EngineConfig
from octavo.engine import wire
from octavo.engine.process import SpawnConfig
from octavo.engine.wire import (
    Abort,
    Add,
    Down,
    DownFrame,
    Heartbeat,
    Hello,
    Lost,
    Ping,
    Refused,
    ResetPrefixCache,
    Up,
    Updates,
    UpFrame,
    Watch,
)
from octavo.messages import AddRequest, Delta, EngineFacts, LifeRecord, Limits, SchedulerStats, TokenLogprobs
from octavo.sampling_params import SamplingParams, is_unset

words = st.text(max_size=8)
ids = st.integers(0, 2**31 - 1)
counts = st.integers(0, 2**63 - 1)
numbers = st.floats(allow_nan=False)
ratios = st.floats(0.0625, 1.0)
stats = st.builds(SchedulerStats, **{each.name: st.lists(counts) if each.name == "steps" else counts for each in fields(SchedulerStats)})
lives = st.builds(LifeRecord, numbers, st.none() | numbers, preemptions=counts, hit_reason=st.sampled_from([None, "end", "evicted"]))
choices = st.builds(TokenLogprobs, numbers, ids, st.lists(ids, max_size=3).map(tuple), st.lists(numbers, max_size=3).map(tuple))
deltas = st.builds(
    Delta,
    words,
    ids,
    st.lists(ids, max_size=5),
    logprobs=st.none() | st.lists(choices, max_size=2),
    finish_reason=st.sampled_from([None, "stop", "length", "abort", "error"]),
    stop_reason=st.none() | ids | words,
    error=st.none() | words,
    life=st.none() | lives,
    prompt_logprobs=st.none() | st.tuples(ids, st.lists(choices, max_size=2)),
    code=st.none() | words,
)
full = st.text(min_size=1, max_size=8)
params = st.builds(
    SamplingParams,
    n=st.integers(1, 1000),
    temperature=st.floats(0, 1e6),
    top_p=ratios,
    top_k=st.integers(-1, 2**31 - 1),
    min_p=ratios,
    seed=st.none() | st.integers(0, 2**64 - 1),
    repetition_penalty=st.floats(0.1, 10),
    presence_penalty=st.floats(-2, 2),
    stop=st.lists(full, max_size=3),
    stop_token_ids=st.lists(ids, max_size=3),
    ignore_eos=st.booleans(),
    max_tokens=st.none() | st.integers(100, 1000),
    min_tokens=st.integers(0, 100),
    logit_bias=st.none() | st.dictionaries(ids, st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.none() | st.lists(ids, min_size=1, max_size=3),
    bad_words=st.lists(full, max_size=2),
    skip_special_tokens=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)
requests = st.builds(AddRequest, words, st.lists(ids, max_size=20), params, st.integers(-(2**31), 2**31), words, st.lists(st.lists(ids)))
facts = st.builds(EngineFacts, words, counts, st.builds(Limits, *[counts] * len(fields(Limits))))
down = st.one_of(
    st.builds(Ping, counts), st.builds(Add, requests), st.builds(Abort, words, st.none() | ids), st.just(ResetPrefixCache()),
    st.builds(Watch, st.sampled_from(["full", "delta", "none"])),
)  # fmt: skip
up = st.one_of(
    st.builds(Hello, facts),
    st.builds(Heartbeat, counts, numbers, stats),
    st.builds(Updates, st.lists(deltas, max_size=3), stats),
    st.builds(Refused, words, st.sampled_from(["request", "overload"]), words, st.none() | words, st.none() | words, numbers),
    st.just(Lost()),
)


@given(down, counts, counts)
def test_what_goes_down_arrives_as_it_was(body: Down, epoch: int, number: int) -> None:
    frame = DownFrame(epoch, number, body)
    assert wire.decode_down(wire.encode(frame)) == frame


@given(up, counts, counts)
def test_what_comes_up_arrives_as_it_was(body: Up, epoch: int, number: int) -> None:
    frame = UpFrame(epoch, number, body)
    assert wire.decode_up(wire.encode(frame)) == frame


def test_defaults_that_nobody_set_arrive_as_plain_numbers_and_tuples_as_tuples() -> None:
    sent = SamplingParams(stop=["a"], stop_token_ids=range(3))
    arrived = wire.decode_down(wire.encode(DownFrame(1, 1, Add(AddRequest("r", [1], sent)))))
    assert arrived is not None and isinstance(arrived.body, Add)
    got = arrived.body.request.params
    assert got == sent and hash(got.stop) == hash(("a",)) and got.stop_token_ids == (0, 1, 2)
    assert not [field.name for field in fields(got) if is_unset(getattr(got, field.name))]


@given(st.binary(max_size=200) | st.builds(lambda body, cut: wire.encode(DownFrame(1, 1, body))[:-cut], down, st.integers(1, 9)))
def test_what_is_no_frame_is_dropped(data: bytes) -> None:
    with patch.object(wire.logger, "warning"):  # which has a line for each
        found = wire.decode_down(data), wire.decode_up(data)
    assert found == (None, None) or isinstance(found[0] or found[1], DownFrame | UpFrame)


@pytest.mark.parametrize(
    "body",
    [
        ["add", {"request_id": "r", "prompt_token_ids": [1], "params": {"temperature": -1.0}}],  # what no door let through
        ["add", {"request_id": "r", "prompt_token_ids": ["1"], "params": {}}],
        ["abort", 7],
        ["shutdown"],
        {},
    ],
)
def test_a_frame_of_the_right_shape_with_wrong_contents_is_dropped_and_logged(body: object, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "octavo"):
        assert wire.decode_down(msgspec.msgpack.encode([1, 1, body])) is None
    assert "is not a message" in caplog.text


def test_deeply_nested_garbage_is_dropped() -> None:
    assert wire.decode_down(b"\x91" * 100_000) is None


def test_every_setting_reaches_the_engine_process() -> None:
    config = EngineConfig(model="m", max_model_len=99, enable_prefix_caching=False, gpu_memory_utilization=0.5, seed=2**64 - 1)
    spawn = SpawnConfig(config, "path", "gguf", "name", (1, 2), "ipc://x", 3, 7, None, "INFO", "json", 0.5, True)
    assert msgspec.json.decode(msgspec.json.encode(spawn), type=SpawnConfig) == spawn
