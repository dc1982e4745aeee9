"""Fields of a request: what belongs together, what is too long, which model, what reaches the engine. Wrong values: test_bad_inputs.py."""

import asyncio
import logging
from typing import Any

import pytest

from octavo.server import body as bodies
from octavo.server import requests
from tests.server.conftest import Served

HELLO = [{"role": "user", "content": "Once upon a time"}]
CHAT: dict[str, Any] = {"messages": HELLO, "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 2}


def check_refused(served: Served, path: str, body: dict[str, Any], param: str) -> dict[str, Any]:
    answer = served.server.post(path, body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error", error
    assert error["param"] == param or error["param"].startswith((f"{param}[", f"{param}.")), error
    assert error["message"] and len(error["message"]) < 500
    return error


def test_fields_that_belong_together_and_limits_by_number(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    check_refused(served, "/v1/chat/completions", CHAT | {"top_logprobs": 3}, "top_logprobs")
    for many in (-1, 21):
        error = check_refused(served, "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": many}, "top_logprobs")
        assert error["message"].startswith("top_logprobs ")
    error = check_refused(served, "/v1/completions", TEXT | {"prompt": [[1]] * 100, "n": 11}, "n")
    assert "100 prompts of 11 samples" in error["message"]
    monkeypatch.setattr(requests, "MOST_NUMBERS", 10)
    check_refused(served, "/v1/completions", TEXT | {"prompt": [1] * 4, "echo": True, "logprobs": 2}, "logprobs")
    assert not served.llm.asked[1:], "only what the engine itself has to refuse reaches it"


def test_bad_words_are_spelled_once_for_all_prompts_and_beside_the_event_loop(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    spelled, spellings = list[tuple[str, ...]](), served.llm.encoder.spellings

    def watched(words: tuple[str, ...]) -> list[list[int]]:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        spelled.append(words)
        return spellings(words)

    monkeypatch.setattr(served.llm.encoder, "spellings", watched)
    answer = served.server.post("/v1/completions", TEXT | {"prompt": ["Once upon a time"] * 20, "bad_words": ["dog", "ball"]})
    assert answer.status_code == 200 and spelled == [("dog", "ball")]
    assert all(ask.bad_words == spellings(("dog", "ball")) for ask in served.llm.asked) and len(served.llm.asked) == 20
    assert served.server.post("/v1/chat/completions", CHAT | {"bad_words": ["cat"]}).status_code == 200
    assert served.llm.asked[-1].bad_words == spellings(("cat",)) and spelled[1:] == [("cat",)]


def test_totals_are_taken_up_to_their_limits_and_say_what_to_turn(served: Served) -> None:
    """One more of anything is refused; `test_bad_inputs.py` has one of each."""
    many = TEXT | {"prompt": "a", "n": 16, "max_tokens": 1}
    allowed = {"allowed_token_ids": [5] * 16_384}
    assert served.server.post("/v1/completions", many | allowed).status_code == 200
    error = check_refused(served, "/v1/completions", many | allowed | {"stop_token_ids": [5]}, "allowed_token_ids")
    assert "for each of 16 answers" in error["message"] and "262,144 in all" in error["message"] and "lower n" in error["message"]
    error = check_refused(served, "/v1/completions", TEXT | {"prompt": ["a"] * 100, "max_tokens": 120, "logprobs": 20}, "logprobs")
    assert "252,000 numbers, at most 250,000" in error["message"] and "lower max_tokens, n or logprobs" in error["message"]
    error = check_refused(served, "/v1/completions", TEXT | {"prompt": [[5] * 200] * 100, "n": 10, "echo": True, "logprobs": 1}, "logprobs")
    assert "404,000 numbers" in error["message"], "every sample repeats its prompt"
    body = CHAT | {"max_tokens": None, "n": 16, "logprobs": True, "top_logprobs": 20}
    assert served.server.post("/v1/chat/completions", body | {"stop": ["e"]}).status_code == 200, "what fits into the context counts"


# promise: too-long-400, langchain-works-context, context-length-exceeded-over
def test_what_is_too_long_says_so(served: Served) -> None:
    for body in ({"prompt": [1] * 255, "max_tokens": 2}, {"prompt": [1] * 300}, {"prompt": "b" * 5000}):
        answer = served.server.post("/v1/completions", body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].startswith("This model's maximum context length is 256 tokens. However, you requested ")
    assert served.server.post("/v1/completions", {"prompt": [1] * 255, "max_tokens": 1}).status_code == 200


# promise: model-may-absent
def test_models_by_name(served: Served) -> None:
    short: dict[str, Any] = {"input": "a", "max_output_tokens": 1}
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT), ("/v1/responses", short)):
        for name in ("", "../../etc/passwd", "x" * 2**20):
            answer = served.server.post(path, body | {"model": name})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert served.server.post(path, body | {"model": "stories"}).json()["model"] == "stories"
        assert served.server.post(path, body).json()["model"] == "stories"
        check_refused(served, path, body | {"model": 5}, "model")


def test_what_others_send_is_taken(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    labels = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    nothing = {"tools": [], "functions": None, "response_format": {"type": "text"}, "tool_choice": "auto", "temperature": None}
    with caplog.at_level(logging.WARNING, "octavo"):
        for _ in range(2):
            assert served.server.post("/v1/chat/completions", CHAT | labels | nothing | {"foo_bar": 1}).status_code == 200
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "foo_bar" in warnings[0], "once, and of nothing else"
    assert bodies.MOST_WARNINGS < 1000


# promise: server-takes-unset, body-extra-priority, chat-max-tokens, extra-body-top, extra-body-min
def test_parameters_reach_the_engine_and_those_left_open_are_the_models(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.llm, "sampling_defaults", {"temperature": 0.5, "top_k": 7})
    given = {
        "n": 2, "temperature": 0, "top_p": 0.5, "min_p": 0.25, "seed": 2**64 - 1, "presence_penalty": 1, "frequency_penalty": -1,
        "repetition_penalty": 1.5, "stop": "zzz", "stop_token_ids": [5], "ignore_eos": True, "min_tokens": 1, "logit_bias": {"7": -100},
        "bad_words": ["dog"], "skip_special_tokens": False, "include_stop_str_in_output": True, "max_tokens": 3, "top_k": 2**31 - 1,
    }  # fmt: skip
    served.server.post("/v1/completions", TEXT | given | {"priority": 3, "timeout": 50.5, "cache_salt": "s", "logprobs": 3})
    ask = served.llm.asked.pop()
    for name, value in given.items():
        wanted = {"stop": ("zzz",), "stop_token_ids": (5,), "logit_bias": {7: -100.0}, "bad_words": ("dog",)}.get(name, value)
        assert getattr(ask.params, name) == wanted, name
    assert (ask.params.logprobs, ask.priority, served.llm.timeouts.pop(), ask.cache_salt) == (3, 3, 50.5, "s")
    served.server.post("/v1/completions", {"prompt": "a"})
    served.server.post("/v1/chat/completions", {"messages": HELLO})
    served.server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 4, "top_k": 3})
    completion, chat, bounded = (ask.params for ask in served.llm.asked)
    assert (completion.temperature, completion.top_k, completion.max_tokens) == (0.5, 7, 16)
    assert (chat.temperature, chat.max_tokens) == (0.5, None)
    assert (bounded.max_tokens, bounded.top_k) == (4, 3)
    assert served.llm.timeouts[-1] == 3600
