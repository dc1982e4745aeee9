"""Messages are checked before a template sees them: text parts joined, calls with their arguments as objects."""

from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.text.conversation import check_messages

USER = {"role": "user", "content": "hi"}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def call(arguments: object) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_messages_become_plain() -> None:
    tool = {"role": "tool", "content": PARTS, "tool_call_id": "c1", "name": "f"}
    assert check_messages([tool]) == [{**tool, "content": "ab"}]
    for given, plain in (('{"x": [1]}', {"x": [1]}), ("", {}), ({"x": 1}, {"x": 1})):
        for content in ({}, {"content": None}, {"content": ""}):
            said = {"role": "assistant", "tool_calls": [call(given)], **content}
            assert check_messages([said]) == [{"role": "assistant", "tool_calls": [call(plain)], "content": ""}]
    assert check_messages([{"role": "assistant", "content": "x", "tool_calls": None}]) == [{"role": "assistant", "content": "x"}]


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([USER, {"role": "robot", "content": ""}], "messages[1].role"),
        ([USER, {"role": ["user"], "content": ""}], "messages[1].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
        ([{"role": "user", "content": [PARTS[0], {"type": "image"}]}], "messages[0].content[1]"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content[0]"),
        ([USER, {"role": "tool", "content": "x"}], "messages[1].tool_call_id"),
        ([USER, {"role": "tool", "content": "x", "tool_call_id": ""}], "messages[1].tool_call_id"),
        ([{"role": "assistant", "tool_calls": {"id": 1}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [call("{")]}], "messages[0].tool_calls[0].function.arguments"),
        ([{"role": "assistant", "tool_calls": [call("[" * 100_000)]}], "messages[0].tool_calls[0].function.arguments"),
        ([{"role": "assistant", "tool_calls": [call("[1]")]}], "messages[0].tool_calls[0].function.arguments"),
        ([{"role": "assistant", "tool_calls": [call(5)]}], "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_the_message_at_fault_is_named(messages: object, where: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_messages(messages)
    assert caught.value.param == where and str(caught.value).startswith(where)
    assert len(str(caught.value)) < 300
