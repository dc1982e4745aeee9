"""Every exception has its answer, and what was written for an operator stays out of it."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.exceptions import HTTPException

from octavo.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    OverloadError,
    RequestError,
    TemplateError,
    UnavailableError,
)
from octavo.messages import AddRequest
from octavo.outputs import TextDelta
from octavo.sampling_params import SamplingParams
from octavo.server.errors import MOST_CHARS, ApiError, answer_for, error_response
from octavo.server.generation import all_updates
from octavo.server.records import Observer


# promise: error-types-invalid, code-string-null
@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code", "headers"),
    [
        (RequestError("wrong", "n", "c"), 400, "invalid_request_error", "n", "c", {}),
        (TemplateError("wrong"), 400, "invalid_request_error", "messages", None, {}),
        (OverloadError("full", 0.2), 429, "rate_limit_error", None, "overloaded", {"retry-after": "1"}),
        (UnavailableError("loading", 4.1), 503, "server_error", None, "unavailable", {"retry-after": "5"}),
        (UnavailableError("late", 1, "queue_timeout"), 503, "server_error", None, "queue_timeout", {"retry-after": "1"}),
        (DeadlineError("late"), 504, "server_error", None, "deadline_exceeded", {}),
        (EngineError("not finite", "numerical_error"), 500, "server_error", None, "numerical_error", {}),
        (ConfigError("ours"), 500, "server_error", None, "internal_error", {}),
        (KeyError("ours"), 500, "server_error", None, "internal_error", {}),
        (HTTPException(404), 404, "not_found_error", None, None, {}),
        (HTTPException(405, headers={"allow": "GET"}), 405, "invalid_request_error", None, None, {"allow": "GET"}),
        (ApiError(401, "who"), 401, "authentication_error", None, None, {}),
        (ApiError(403, "no"), 403, "permission_error", None, None, {}),
        (ApiError(418, "odd", "server_error", "p", "c", {"x": "y"}), 418, "server_error", "p", "c", {"x": "y"}),
    ],
    ids=repr,
)
def test_an_error_has_its_answer(
    error: Exception, status: int, kind: str, param: str | None, code: str | None, headers: dict[str, str]
) -> None:
    answer = answer_for(error)
    said = answer.body["error"]
    assert isinstance(said, dict) and set(said) == {"message", "type", "param", "code"} and said["message"]
    assert (answer.status, said["type"], said["param"], said["code"], answer.headers) == (status, kind, param, code, headers)
    if code == "internal_error":
        assert "ours" not in said["message"]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("the tokenizer of /srv/models/Qwen/tok.json failed", "the tokenizer of tok.json failed"),
        ("chat template of '/srv/models/x' failed at <object at 0x7f00aa11bb22>", "chat template of 'x' failed at <object at an address>"),
        ("prompt is 4,500 tokens, max_model_len is 4,096", "prompt is 4,500 tokens, max_model_len is 4,096"),
        ("either/or, 1/2, https://example.org/a/b stay", "either/or, 1/2, https://example.org/a/b stay"),
        ("use /v1/chat/completions for logprobs", "use /v1/chat/completions for logprobs"),
        ("half a pair: \ud83d", "half a pair: ?"),
        ("x" * 5000, "x" * MOST_CHARS),
    ],
)
def test_places_and_addresses_are_left_out_and_every_text_can_be_sent(said: str, told: str) -> None:
    answer = answer_for(RequestError(said, "prompt \ud83d"))
    assert answer.body["error"] == {"message": told, "type": "invalid_request_error", "param": "prompt ?", "code": None}
    assert error_response(RequestError(said)).status_code == 400


@pytest.mark.parametrize("prompts", [1, 2])
def test_a_request_fails_as_a_whole_if_the_engine_aborts_one_of_its_prompts(prompts: int) -> None:
    class Aborting:
        async def generate(self, request: AddRequest, timeout: float, label: str) -> AsyncIterator[list[TextDelta]]:
            last = request.prompt_token_ids[0] == prompts
            yield [TextDelta("r", 0, "", [], "abort" if last else "stop")]

    async def read() -> None:
        requests = [AddRequest("", [number + 1], SamplingParams()) for number in range(prompts)]
        watch = Observer().watch("cmpl-", requests)
        async for _ in all_updates(Aborting(), requests, 9.0, {}, watch):  # type: ignore[arg-type]
            pass

    with pytest.raises(EngineError, match="the request was aborted"):
        asyncio.run(read())
