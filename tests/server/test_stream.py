"""Streams: joined, they are the whole answer; they end as promised; and a client that leaves takes its request along."""

import asyncio
import json
import socket
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.conftest import Served
from tests.support.http_server import wait_for

HELLO: list[Any] = [{"role": "user", "content": "Once upon a time"}]


def chunks(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = served.server.post(path, body | {"stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream; charset=utf-8", answer.text
    assert answer.content.isascii()
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def joined(found: list[dict[str, Any]], chat: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The last chunk, and the choices as a whole answer would have them."""
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in found}) == 1
    assert found[-1]["choices"] == [] and all(chunk["usage"] is None for chunk in found[:-1])
    choices: dict[int, dict[str, Any]] = {}
    for (piece,) in (chunk["choices"] for chunk in found[:-1]):
        choice = choices.setdefault(piece["index"], {"text": "", "logprobs": None, "finish_reason": None})
        assert choice["finish_reason"] is None, "nothing comes after the end"
        text = piece["text"] if not chat else piece["delta"].get("content", "")
        assert not chat or ("role" in piece["delta"]) == ("begun" not in choice), "the role comes first, and once"
        choice |= {"text": choice["text"] + text, "begun": True}
        choice |= {"finish_reason": piece["finish_reason"], "stop_reason": piece.get("stop_reason")}
        for name, values in (piece["logprobs"] or {}).items():
            choice["logprobs"] = choice["logprobs"] or {}
            choice["logprobs"].setdefault(name, []).extend(values)
    return found[-1], [choices[index] for index in sorted(choices)]


PARAMS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 24), "seed": st.integers(0, 99), "n": st.integers(1, 3)},
    optional={
        "temperature": st.sampled_from([0, 0.7, 2]),
        "top_p": st.sampled_from([0.3, 1]),
        "stop": st.lists(st.sampled_from(["e", " a", ". ", "the", "zz"]), min_size=1, max_size=4),
        "include_stop_str_in_output": st.booleans(),
        "min_tokens": st.just(1),
        "logit_bias": st.just({"13": 5.0, "230": 8}),  # halves of characters
    },
)


# promise: sse-data-json, sse-first-chat, sse-same-id, sse-stream-options
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(params=PARAMS, chat=st.booleans(), logprobs=st.sampled_from([None, 0, 2]), echo=st.booleans(), several=st.booleans())
def test_a_stream_joined_is_the_whole_answer(
    served: Served, params: dict[str, Any], chat: bool, logprobs: int | None, echo: bool, several: bool
) -> None:
    if chat:
        path, body = "/v1/chat/completions", params | {"messages": HELLO}
        body |= {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
    else:
        path, body = "/v1/completions", params | {"prompt": ["Once\u2028upon é", "a"] if several else "The dog", "echo": echo}
        body |= {} if logprobs is None else {"logprobs": logprobs}
    last, choices = joined(chunks(served, path, body | {"stream_options": {"include_usage": True}}), chat)
    whole = served.server.post(path, body).json()
    assert [choice["text"] for choice in choices] == [c["message"]["content"] if chat else c["text"] for c in whole["choices"]]
    for name in ("finish_reason", "stop_reason", "logprobs"):
        assert [choice[name] for choice in choices] == [choice[name] for choice in whole["choices"]], name
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][count] == whole["usage"][count]


# promise: body-extra-include, sse-stream-options, langchain-works-context, guidellm-works-health, aiperf-works-metrics
# promise: cached-tokens-always-every
def test_usage_and_timings_come_where_asked_for(served: Served) -> None:
    body = {"messages": HELLO, "max_tokens": 4, "temperature": 0}
    plain = chunks(served, "/v1/chat/completions", body)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in plain)
    timed = chunks(served, "/v1/chat/completions", body | {"include_timings": True})
    assert timed[-1]["choices"] == [] and timed[-1]["timings"]["cached_tokens"] == 4 and "usage" not in timed[-1]
    counted = chunks(served, "/v1/completions", {"prompt": "a", "max_tokens": 4, "stream_options": {
        "include_usage": True, "continuous_usage_stats": True}})  # fmt: skip
    tokens = [chunk["usage"]["completion_tokens"] for chunk in counted]
    assert tokens == sorted(tokens) and 1 <= tokens[0] and tokens[-1] == 4


# promise: openai-python-works
def test_the_openai_client_streams(served: Served) -> None:
    with served.client.chat.completions.create(model="stories", messages=HELLO, max_tokens=9, temperature=0, stream=True) as stream:
        found = list(stream)
    assert found[0].choices[0].delta.role == "assistant" and found[-1].choices[0].finish_reason == "length"

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{served.server.url}/v1", api_key="none") as client:
            asked = await client.chat.completions.create(model="stories", messages=HELLO, max_tokens=9, temperature=0, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in asked])

    assert asyncio.run(ask()) == "".join(chunk.choices[0].delta.content or "" for chunk in found) != ""


# promise: sse-error-before
def test_an_error_after_the_first_token_is_an_event(served: Served) -> None:
    served.llm.trouble = (2, RuntimeError("at /secret/path"))
    answer = served.server.post("/v1/chat/completions", {"messages": HELLO, "stream": True})
    lines = answer.text.split("\n\n")
    assert answer.status_code == 200 and lines[-2:] == ["data: [DONE]", ""]
    error = json.loads(lines[-3].removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error") and "secret" not in error["message"]
    assert all(json.loads(line[6:])["choices"][0]["finish_reason"] is None for line in lines[:-3])
    with pytest.raises(openai.APIError):
        list(served.client.chat.completions.create(model="stories", messages=HELLO, stream=True))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [HELLO[0]["content"], ["a", "b", "c"]])
def test_a_client_that_leaves_ends_its_request(served: Served, stream: bool, prompt: Any) -> None:
    served.llm.pause = 0.02
    body = json.dumps({"prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    port = int(served.server.url.rpartition(":")[2])
    for bytes_read in (0, 1, 700) if stream else (0,):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head.encode() + body)
            wait_for(lambda: served.llm.stats.running > 0)
            while bytes_read > 0:
                bytes_read -= len(connection.recv(bytes_read))
            assert served.llm.stats.running > 0
        wait_for(lambda: served.llm.is_idle)
