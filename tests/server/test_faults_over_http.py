"""Planted faults behind a real server: the status tells whose fault it was, and the next answer is what it always was."""

import math
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo import LLM, SamplingParams
from tests.support.http_client import ask, choices_of
from tests.support.http_storm import WATCHED, held_at_rest, seconds_until_idle
from tests.support.open_streams import story, text
from tests.support.server_process import ServerProcess
from tests.support.soaked import rarely
from tests.support.watched_server import BROKEN

FLAGS = ("--num-gpu-blocks-override", "200")


@pytest.fixture(scope="module")
def offline(endless: str) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_DEBUG", "runner=fake")
        llm = LLM(endless, num_gpu_blocks_override=200)
    with llm:
        yield llm


@pytest.mark.parametrize(
    ("fault", "runner", "code"),
    [
        ("forward.raise@40", "fake", None),
        ("forward.nan@40", "fake", "numerical_error"),
        ("sample.bad_id@40", "model", "numerical_error"),
        ("ipc.drop@40", "fake", None),
        *rarely(("ipc.truncate@40", "fake", None), ("ipc.garbage@40", "fake", None)),
    ],
)
def test_a_fault_of_the_engine_is_a_500_and_the_next_answer_is_as_ever(endless: str, fault: str, runner: str, code: str | None) -> None:
    with ServerProcess(WATCHED, endless, *FLAGS, env={"OCTAVO_DEBUG": f"runner={runner},check=1,{fault}"}) as server:
        known = text(server)  # takes a dozen steps
        before = held_at_rest(server)
        reply = server.ask("POST", "/v1/completions", story(60, 9))
        assert (reply.status, reply.error["type"], reply.error["code"]) == (500, "server_error", code), reply
        seconds_until_idle(server, before)
        assert text(server) == known
        assert server.ask("GET", "/health").status == 200


@pytest.fixture(scope="module")
def server(endless: str) -> Iterator[ServerProcess]:
    with ServerProcess(WATCHED, endless, *FLAGS, env={"OCTAVO_DEBUG": "runner=fake", "OCTAVO_LOG_LEVEL": "ERROR"}) as server:
        yield server


def test_a_tokenizer_that_breaks_is_a_500_of_its_own_request(server: ServerProcess) -> None:
    known = text(server)
    for path, body in (
        ("/v1/completions", {"prompt": BROKEN}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": BROKEN}], "stream": True}),
        ("/tokenize", {"prompt": BROKEN}),
    ):
        reply = server.ask("POST", path, body)
        assert (reply.status, reply.error["code"]) == (500, "internal_error")
    assert text(server) == known


def test_fakekv_finds_every_token_of_a_prompt_as_likely_as_any_other(server: ServerProcess, offline: LLM) -> None:
    even = pytest.approx(-math.log(offline.get_tokenizer().vocab_size))
    body = story(3) | {"echo": True, "logprobs": 2}
    found = server.ask("POST", "/v1/completions", body).json["choices"][0]["logprobs"]
    assert found["token_logprobs"][:3] == [None, even, even] and all(logprob < 0 for logprob in found["token_logprobs"][3:])
    assert {len(tops) for tops in found["top_logprobs"][1:]} <= {2, 3}
    (output,) = offline.generate([[5, 6, 7]], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert [choices and [one.logprob for one in choices.values()] for choices in output.prompt_logprobs or []] == [None, [even], [even]]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "ignore_eos": True, "logprobs": True, "top_logprobs": 2}
    entries = server.ask("POST", "/v1/chat/completions", chat).json["choices"][0]["logprobs"]["content"]
    assert all(best["logprob"] > other["logprob"] for best, other in (entry["top_logprobs"] for entry in entries))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.lists(st.integers(300, 500), min_size=1, max_size=12),  # letters: the answer begins with a new character
    tokens=st.integers(1, 60),
    stop=st.lists(st.sampled_from(["e", "\ufffd", "th", "\n"]), max_size=2),
)
def test_streamed_pieces_joined_are_the_decoded_whole(
    server: ServerProcess, offline: LLM, prompt: list[int], tokens: int, stop: list[str]
) -> None:
    """FakeKV writes any ids in any order: halves of characters, bytes that are none, control tokens."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stop": stop}
    streamed = choices_of(ask(server, "/v1/completions", body | {"stream": True}))
    (output,) = offline.generate([prompt], SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, stop=stop), use_tqdm=False)
    (sample,) = output.outputs
    assert streamed == [(sample.text, sample.finish_reason)] == choices_of(server.ask("POST", "/v1/completions", body))
    if not stop:
        tokenizer = offline.get_tokenizer()
        assert tokenizer.decode(prompt + sample.token_ids) == tokenizer.decode(prompt) + streamed[0][0]
