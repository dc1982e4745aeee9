"""/v1/chat/completions through the openai client: answers, logprobs, errors by their classes."""

import math
from dataclasses import replace
from typing import Any

import openai
import pytest

from octavo import SamplingParams
from octavo.errors import DeadlineError, EngineError, OverloadError, UnavailableError
from tests.server.conftest import Served

HELLO: list[Any] = [{"role": "user", "content": "Once upon a time"}]


# promise: v1-chat-completions, usage-always-carries-completion, chat-max-tokens, max-completion-tokens
def test_an_answer_is_the_offline_answer(served: Served) -> None:
    wanted = served.offline.chat(HELLO, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0]
    answer = served.client.chat.completions.create(model="stories", messages=HELLO, temperature=0, max_completion_tokens=20, n=2)
    assert [choice.message.content for choice in answer.choices] == [wanted.outputs[0].text] * 2
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "stories"
    assert answer.usage and answer.usage.prompt_tokens == len(wanted.prompt_token_ids) and answer.usage.completion_tokens == 40
    assert answer.usage.prompt_tokens_details and answer.usage.completion_tokens_details
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    rest = served.server.post("/v1/chat/completions", {"messages": HELLO, "temperature": 0, "ignore_eos": True}).json()
    assert rest["usage"]["total_tokens"] == 256 and rest["choices"][0]["finish_reason"] == "length", "the rest of the context"


# promise: v1-chat-completions, extra-body-chat
def test_messages_of_text_parts_and_templates_with_options(served: Served) -> None:
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Once upon"}, {"type": "text", "text": " a time"}]}]
    create = served.client.chat.completions.create
    answers = [create(model="stories", messages=messages, temperature=0, max_tokens=5) for messages in (HELLO, parts)]
    assert answers[0].choices == answers[1].choices
    begun = [*HELLO, {"role": "assistant", "content": ", there was a"}]
    body = {"chat_template_kwargs": {"continue_final_message": True}}
    create(model="stories", messages=begun, temperature=0, max_tokens=1, extra_body=body)
    assert served.llm.prompt() == "<s> Once upon a time, there was a"


def test_conversations_name_the_ends_of_their_messages_to_a_model_that_keeps_states(served: Served) -> None:
    chat: list[Any] = [{"role": "system", "content": "Once upon a time"}, {"role": "user", "content": " there was"}]
    facts = served.llm.facts
    try:
        for served.llm.facts in (facts, replace(facts, keeps_states=True)):
            served.server.post("/v1/chat/completions", {"messages": chat, "max_tokens": 1})
            served.server.post("/v1/responses", {"input": chat, "max_output_tokens": 1})
    finally:
        served.llm.facts = facts
    plain, _, *named = served.llm.asked
    assert [request.checkpoints for request in served.llm.asked[:2]] == [[], []]
    assert [request.checkpoints for request in named] == [[5, len(plain.prompt_token_ids)]] * 2


# promise: chat-logprobs-content
def test_logprobs_of_chat(served: Served) -> None:
    for most in (0, 3):
        answer = served.client.chat.completions.create(
            model="stories", messages=HELLO, logprobs=True, top_logprobs=most, max_tokens=8, seed=3, temperature=2
        )
        choice = answer.choices[0]
        assert choice.logprobs and choice.logprobs.content and len(choice.logprobs.content) == 8
        assert b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content).decode() == choice.message.content
        for entry in choice.logprobs.content:
            tops = entry.top_logprobs
            assert len(tops) == most and [top.logprob for top in tops] == sorted((top.logprob for top in tops), reverse=True)
            assert entry.logprob <= 0 and entry.token.encode() == bytes(entry.bytes or []) and math.isfinite(entry.logprob)
            same = [top.logprob for top in tops if top.token == entry.token]
            assert same == [entry.logprob] or (not same and all(top.logprob >= entry.logprob for top in tops))


# promise: body-extra-timeout, sse-error-before, openai-python-works
@pytest.mark.parametrize(
    ("trouble", "kind", "status", "code"),
    [
        (OverloadError("the queue is full", 2.5), openai.RateLimitError, 429, "overloaded"),
        (UnavailableError("loading", 1), openai.InternalServerError, 503, "unavailable"),
        (DeadlineError("too late"), openai.InternalServerError, 504, "deadline_exceeded"),
        (EngineError("numbers", "numerical_error"), openai.InternalServerError, 500, "numerical_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_first_token_are_statuses(
    served: Served, trouble: Exception, kind: type[openai.APIStatusError], status: int, code: str, stream: bool
) -> None:
    served.llm.trouble = (0, trouble)
    with pytest.raises(kind) as caught:
        served.client.chat.completions.create(model="stories", messages=HELLO, stream=stream, extra_headers={"x-request-id": "mine-7"})
    assert (caught.value.status_code, caught.value.code, caught.value.request_id) == (status, code, "mine-7")
    assert ("retry-after" in caught.value.response.headers) == (status in (429, 503))


# promise: body-extra-timeout
def test_errors_of_requests_by_class(served: Served) -> None:
    client = served.client
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="stories", messages=HELLO, temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error") and bad.value.request_id
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="stories", messages=[{"role": "user", "content": "word " * 500}], stream=True)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-5", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.InternalServerError) as late:
        client.chat.completions.create(model="stories", messages=HELLO, extra_body={"timeout": 1e-9})
    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
