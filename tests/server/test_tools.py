"""Thinking and tool calls in answers, whole and streamed, through the openai client; with Qwen3's own template."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from octavo.text.prompt import PromptEncoder
from tests.server.conftest import Served
from tests.support.cut import CUTS, cut
from tests.support.tokenizers import DATA

ASKED: list[Any] = [{"role": "user", "content": "weather?"}]
WEATHER: Any = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOL: Any = {"type": "function", "function": WEATHER}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Par\\u00eds <x>"}}\n</tool_call>'
ANSWER = f"<think>\nI should look.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
ARGUMENTS = '{"city": "Par\\u00eds <x>"}'


@pytest.fixture
def qwen(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    encoder = PromptEncoder(served.llm.tokenizer, str(DATA / "templates" / "Qwen-Qwen3-0.6B.jinja"))
    monkeypatch.setattr(served.llm, "encoder", encoder)
    facts = served.llm.facts
    monkeypatch.setattr(served.llm, "facts", replace(facts, limits=replace(facts.limits, max_model_len=10_000)))
    served.llm.script = [ANSWER]
    yield served


# promise: tool-call-parser, reasoning-parser, finish-reason-stop, usage-always-carries-completion
def test_an_answer_is_taken_apart(qwen: Served) -> None:
    answer = qwen.client.chat.completions.create(model="stories", messages=ASKED, tools=[TOOL], n=2)
    for choice in answer.choices:
        message = choice.message
        assert (message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        assert message.model_extra and message.model_extra["reasoning_content"] == "I should look."
        assert [(call.type, call.function.name, call.function.arguments) for call in message.tool_calls or []] == [
            ("function", "weather", ARGUMENTS)
        ] * 2
    assert '"name": "weather"' in qwen.llm.prompt()
    thought = len(qwen.llm.tokenizer.encode("<think>\nI should look.\n</think>", add_special_tokens=False))
    usage = answer.usage
    assert usage and usage.completion_tokens_details and usage.completion_tokens_details.reasoning_tokens
    assert abs(usage.completion_tokens_details.reasoning_tokens - 2 * thought) <= 4


# promise: tool-choice-auto
def test_what_is_not_offered_is_no_call(qwen: Served) -> None:
    create = qwen.client.chat.completions.create
    for choice in (create(model="stories", messages=ASKED), create(model="stories", messages=ASKED, tools=[TOOL], tool_choice="none")):
        message = choice.choices[0].message
        assert message.tool_calls is None and CALL in (message.content or "") and choice.choices[0].finish_reason == "stop"
        assert "weather" not in qwen.llm.prompt().replace("weather?", "")
    qwen.llm.script = ["Half of a <tool_", "call"]
    assert create(model="stories", messages=ASKED, tools=[TOOL]).choices[0].message.content == "Half of a <tool_call"
    qwen.llm.script = [ANSWER]
    single = create(model="stories", messages=ASKED, tools=[TOOL], parallel_tool_calls=False)
    assert len(single.choices[0].message.tool_calls or []) == 1


def test_the_answer_to_a_call_goes_back_into_the_prompt(qwen: Served) -> None:
    first = qwen.client.chat.completions.create(model="stories", messages=ASKED, tools=[TOOL]).choices[0].message
    assert first.tool_calls
    said: list[Any] = [*ASKED, first.model_dump(), {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "22 C"}]
    qwen.client.chat.completions.create(model="stories", messages=said, tools=[TOOL])
    prompt = qwen.llm.prompt()
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "París <x>"}}\n</tool_call>' in prompt
    assert "<tool_response>\n22 C\n</tool_response>" in prompt


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=CUTS)
def test_a_stream_tells_the_same_however_the_text_is_cut(qwen: Served, cuts: list[int]) -> None:
    qwen.llm.script = cut(ANSWER, cuts)
    stream = qwen.client.chat.completions.create(
        model="stories", messages=ASKED, tools=[TOOL], stream=True, stream_options={"include_usage": True}
    )
    text, thought, calls, ends = "", "", dict[int, list[str]](), list[str]()
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            thought += (choice.delta.model_extra or {}).get("reasoning_content", "")
            ends += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or []:
                assert call.function and (call.index in calls) == (call.id is None) == (call.function.name is None)
                calls.setdefault(call.index, []).append(call.function.arguments or "")
    assert (text, thought, ends) == ("Let me see.", "I should look.", ["tool_calls"])
    assert ["".join(pieces) for pieces in calls.values()] == [ARGUMENTS] * 2
    assert json.loads(ARGUMENTS) == {"city": "París <x>"} and chunk.usage


def test_a_response_has_an_item_for_each_part(qwen: Served) -> None:
    tool: Any = {"type": "function", **WEATHER, "strict": None}
    create = qwen.client.responses.create
    answer = create(model="stories", input="weather?", tools=[tool])
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert answer.output_text == "Let me see." and answer.status == "completed" and answer.usage
    assert 5 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    call = answer.output[2]
    assert call.type == "function_call" and (call.name, call.arguments, call.status) == ("weather", ARGUMENTS, "completed")
    items: list[Any] = [{"role": "user", "content": "weather?"}, *[item.model_dump() for item in answer.output[1:]]]
    create(model="stories", input=[*items, {"type": "function_call_output", "call_id": call.call_id, "output": "22 C"}], tools=[tool])
    prompt = qwen.llm.prompt()
    assert "Let me see.\n<tool_call>" in prompt and prompt.count('{"city": "París <x>"}') == 2, "one turn of the assistant"
    assert "<tool_response>\n22 C\n</tool_response>" in prompt


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=CUTS)
def test_a_responses_events_tell_its_items(qwen: Served, cuts: list[int]) -> None:
    qwen.llm.script = cut(ANSWER, cuts)
    events: list[Any] = list(qwen.client.responses.create(model="stories", input="a", tools=[{"type": "function", **WEATHER}], stream=True))
    done = {event.output_index: event.item for event in events if event.type == "response.output_item.done"}
    assert events[-1].type == "response.completed" and [done[place] for place in range(4)] == events[-1].response.output
    grown = dict.fromkeys(done, "")
    for event in events:
        if event.type.endswith(".delta"):
            assert event.item_id == done[event.output_index].id
            grown[event.output_index] += event.delta
    assert [grown[place] for place in range(4)] == ["I should look.", "Let me see.", ARGUMENTS, ARGUMENTS]
    assert [event.sequence_number for event in events] == list(range(len(events)))
