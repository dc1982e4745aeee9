"""/v1/responses through the openai client: whole and as events, without memory."""

from typing import Any

import openai
import pytest

from octavo import SamplingParams
from tests.server.conftest import Served

HELLO = "Once upon a time"


# promise: v1-responses, responses-stateless-store
def test_whole_answers(served: Served) -> None:
    wanted = served.offline.chat([{"role": "user", "content": HELLO}], SamplingParams(temperature=0, max_tokens=12), False)[0]
    answer = served.client.responses.create(model="stories", input=HELLO, temperature=0, max_output_tokens=12, store=True)
    assert answer.output_text == wanted.outputs[0].text and answer.id.startswith("resp_")
    assert answer.status == "incomplete" and answer.incomplete_details and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage and (answer.usage.input_tokens, answer.usage.output_tokens) == (len(wanted.prompt_token_ids), 12)
    assert answer.usage.total_tokens == answer.usage.input_tokens + 12
    assert (answer.usage.input_tokens_details.cached_tokens, answer.usage.output_tokens_details.reasoning_tokens) == (4, 0)
    stopped = served.server.post("/v1/responses", {"input": HELLO, "temperature": 0, "stop": " little", "include_timings": True}).json()
    assert (stopped["status"], stopped["incomplete_details"], stopped["store"]) == ("completed", None, False)
    assert stopped["output"][0]["content"][0]["text"] == ", there was a" and stopped["timings"]["cached_tokens"] == 4


def test_items_and_instructions_are_a_conversation(served: Served) -> None:
    items: list[Any] = [
        {"role": "user", "content": "a"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]},
    ]
    served.client.responses.create(model="stories", input=items, instructions="sys ", max_output_tokens=1)
    assert served.llm.prompt() == "<s> sys abcd"


# promise: responses-stateless-store
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 300}, "max_output_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[1]] * 2}, "input[0]"),
        ({"input": "word " * 500}, "input"),
        ({"input": [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "x"}]}, "input[1]"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "["}]}, "input[0].tool_calls[0].function.arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].tool_call_id"),
        ({"instructions": "s", "input": [{"role": "user", "content": "a"}, {"role": "robot", "content": "x"}]}, "input[1].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ],
)
def test_what_cannot_be_served_is_named(served: Served, body: dict[str, Any], param: str) -> None:
    answer = served.server.post("/v1/responses", {"input": HELLO} | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


# promise: v1-responses
def test_events_tell_the_same_answer(served: Served) -> None:
    asked: dict[str, Any] = {"model": "stories", "input": HELLO, "temperature": 0, "max_output_tokens": 6, "instructions": "x"}
    whole = served.client.responses.create(**asked)
    events = list(served.client.responses.create(**asked, stream=True))
    names = [event.type for event in events]
    before = ["created", "in_progress", "output_item.added", "content_part.added"]
    after = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert names == [f"response.{name}" for name in [*before, *["output_text.delta"] * (len(events) - 8), *after]]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.output_text == whole.output_text
    assert last.response.usage and whole.usage and last.response.usage.output_tokens == whole.usage.output_tokens
    with served.client.responses.stream(**asked | {"max_output_tokens": 50, "extra_body": {"stop": ["."]}}) as stream:
        assert stream.get_final_response().output_text.startswith(whole.output_text)


def test_a_stream_that_fails_says_so(served: Served) -> None:
    served.llm.trouble = (2, RuntimeError("at /secret/path"))
    with pytest.raises(openai.APIError, match="the server failed on this request"):
        list(served.client.responses.create(model="stories", input=HELLO, stream=True))
