"""Rows 30 to 68 of the bad inputs: each is a 400 (or 404) that names its field, and leaves the server as it was."""

import json
import logging
from typing import Any

import pytest

from octavo.server import body as bodies
from octavo.server import completions
from tests.server.conftest import Served

HELLO = [{"role": "user", "content": "Once upon a time"}]
CHAT: dict[str, Any] = {"messages": HELLO, "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 2}

BOTH: list[tuple[str, list[Any]]] = [  # wrong in chat and in completions
    ("temperature", ["1", True, -0.1, 2.1, [1], {}]),
    ("repetition_penalty", [0, -1, "1"]),
    ("presence_penalty", [-2.1, 2.1, True]),
    ("frequency_penalty", [-2.1, 2.1, "0"]),
    ("top_p", [0, -1, 1.01]),
    ("top_k", [-2, 1.5, 2**63, True]),
    ("min_p", [-0.1, 1.1]),
    ("n", [0, -1, 2**31, 10**9, 129, 17, 1.0, True]),
    ("max_tokens", [0, -1, 2**63, "5", 1.5]),
    ("min_tokens", [-1, 3, 2**63]),
    ("stop", [["a"] * 5, "", [""], "x" * 2**20, 5, [5]]),
    ("stop_token_ids", [[-1], [512], [1.5], [True], 5, [1] * 300]),
    ("logit_bias", [{"abc": 1}, {"-1": 1}, {"1000000000": 1}, {"5": 1000}, {"5": -101}, {"5": "1"}, {"5": True}, [5]]),
    ("allowed_token_ids", [[], [512], [-1]]),
    ("bad_words", [["a"] * 10_000, [""], "word", ["a" * 2000]]),
    ("seed", [-1, 2**64, 1.5, "1"]),
    ("priority", [-1, 2**63, 1.5]),
    ("timeout", [0, -1, "5"]),
    ("stream", ["yes", 1]),
    ("stream_options", [{"include_usage": True}]),
    ("cache_salt", ["", "x" * 2**20, 5]),
    ("user", ["x" * 100_000]),
    ("metadata", [{"a": {"b": ["x" * 100_000]}}]),
    ("best_of", [10**9]),
    ("use_beam_search", [True]),
    ("ignore_eos", ["yes", 1]),
    ("prompt_embeds", ["gASV"]),
    ("structured_outputs", [5, {}, {"regex": "a", "choice": ["b"]}, {"json": None}, {"yaml": "a"}]),
]
IN_COMPLETIONS: list[tuple[str, list[Any]]] = [
    ("logprobs", [-2, 21, 10**6, "x", True]),
    ("prompt", ["", [], [[]], None, ["a", ""], [["a"]], [[1], "a"], [1, 2.0], [True], [[1, True]], [1, [2]], {"a": 1}, ["a"] * 1025]),
    ("prompt", [[-1], [512], [1, 513], [[1], [999_999]], [2**63], [-(2**31)]]),
    ("prompt", [[1] * 256, "word " * 400, "a" * 10_000_000, "\U0001f600" * 2_500_000]),
    ("suffix", ["end"]),
    ("echo", ["yes"]),
]
IN_CHAT: list[tuple[str, list[Any]]] = [
    ("logprobs", [5, "x"]),
    ("messages", [[], None, "hi", [{"role": "user", "content": "a" * 10_000_000}]]),
    ("messages[0].role", [[{"role": "robot", "content": "x"}], [{"content": "x"}]]),
    ("messages[0].content", [[{"role": "user"}], [{"role": "user", "content": 5}], [{"role": "assistant", "content": None}]]),
    ("messages[0].content[0]", [[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]]),
    ("messages[0].tool_call_id", [[{"role": "tool", "content": "x"}]]),
    ("messages[0].tool_calls[0]", [[{"role": "assistant", "tool_calls": [5]}]]),
    ("max_completion_tokens", [0, -1, "5", 2**63]),
    ("chat_template", ["{{ x }}"]),
    ("chat_template_kwargs", [{"tokenize": True}, {"messages": []}, {"__class__": 1}, {"enable_thinking": 1}, [], "x"]),
    ("tools", [5, [5], [{"type": "function"}], [{"type": "function", "function": {"name": "f" * 2**20}}]]),
    ("tool_choice", ["required", "sometimes", {"type": "function", "function": {"name": "f"}}]),
    ("response_format", [5, {}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": ""}}]),
    ("functions", [[{"name": "f"}]]),
    ("audio", [{"voice": "x"}]),
]


def check_refused(served: Served, path: str, body: dict[str, Any], param: str) -> dict[str, Any]:
    answer = served.server.post(path, body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error", error
    assert error["param"] == param or error["param"].startswith((f"{param}[", f"{param}.")), error
    assert error["message"] and len(error["message"]) < 500
    return error


def rows(table: list[tuple[str, list[Any]]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}-{json.dumps(value)[:20]}") for name, values in table for value in values]


@pytest.mark.parametrize(("name", "value"), rows(BOTH + IN_COMPLETIONS))
def test_completions_name_the_field_at_fault(served: Served, name: str, value: Any) -> None:
    check_refused(served, "/v1/completions", TEXT | {name: value}, name)
    assert not served.llm.asked or name in ("n", "stop_token_ids", "logit_bias", "allowed_token_ids", "prompt", "logprobs")


@pytest.mark.parametrize(("name", "value"), rows(BOTH + IN_CHAT))
def test_chat_names_the_field_at_fault(served: Served, name: str, value: Any) -> None:
    check_refused(served, "/v1/chat/completions", CHAT | {name.partition("[")[0]: value}, name)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_what_is_no_finite_number_is_refused(served: Served, number: str) -> None:
    for name in ("temperature", "top_p", "repetition_penalty", "timeout"):
        headers = {"content-type": "application/json"}
        answer = served.server.http.post("/v1/completions", content=f'{{"prompt": "a", "{name}": {number}}}', headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["param"] in (name, None)


def test_fields_that_belong_together_and_limits_by_number(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    check_refused(served, "/v1/chat/completions", CHAT | {"top_logprobs": 3}, "top_logprobs")
    for many in (-1, 21):
        error = check_refused(served, "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": many}, "top_logprobs")
        assert error["message"].startswith("top_logprobs ")
    error = check_refused(served, "/v1/completions", TEXT | {"prompt": [[1]] * 100, "n": 11}, "n")
    assert "100 prompts of 11 samples" in error["message"]
    monkeypatch.setattr(completions, "MOST_PROMPT_LOGPROBS", 10)
    check_refused(served, "/v1/completions", TEXT | {"prompt": [1] * 4, "echo": True, "logprobs": 2}, "logprobs")
    assert not served.llm.asked[1:], "only what the engine itself has to refuse reaches it"


def test_what_is_too_long_says_so(served: Served) -> None:
    for body in ({"prompt": [1] * 255, "max_tokens": 2}, {"prompt": [1] * 300}, {"prompt": "b" * 5000}):
        answer = served.server.post("/v1/completions", body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["message"].startswith("This model's maximum context length is 256 tokens. However, you requested ")
    assert served.server.post("/v1/completions", {"prompt": [1] * 255, "max_tokens": 1}).status_code == 200


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
    assert (ask.params.logprobs, ask.priority, ask.timeout, ask.cache_salt) == (3, 3, 50.5, "s")
    served.server.post("/v1/completions", {"prompt": "a"})
    served.server.post("/v1/chat/completions", {"messages": HELLO})
    served.server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 4, "top_k": 3})
    completion, chat, bounded = (ask.params for ask in served.llm.asked)
    assert (completion.temperature, completion.top_k, completion.max_tokens) == (0.5, 7, 16)
    assert (chat.temperature, chat.max_tokens) == (0.5, None)
    assert (bounded.max_tokens, bounded.top_k) == (4, 3)
    assert served.llm.asked[0].timeout == 3600
