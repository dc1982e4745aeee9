"""The input of a response as that of a chat: items become messages, functions become tools. Errors name the fields of the response."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from octavo.errors import RequestError
from octavo.server.request_bodies import ResponseBody
from octavo.text.conversation import check_count, check_medium, check_messages
from octavo.text.tools import ToolChoice, check_tool_choice, check_tools

TEXT_PARTS = ("input_text", "output_text", "text")


def messages_of(body: ResponseBody) -> list[dict[str, object]]:
    said: list[dict[str, object]] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if not body.input:
        raise RequestError("the input is empty", "input")
    if isinstance(body.input, str):
        return [*said, {"role": "user", "content": body.input}]
    check_count(body.input, "input")
    messages = [_message(item, f"input[{position}]") for position, item in enumerate(body.input)]
    with _in_other_words("messages", "input"):
        check_messages(messages)
    return said + _calls_joined(messages)


def tools_of(body: ResponseBody) -> tuple[list[dict[str, object]], ToolChoice]:
    """A tool here is flat: {"type": "function", "name": ..., "parameters": ...}."""
    tools: list[object] = []
    for position, tool in enumerate(body.tools or []):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise RequestError(f'tools[{position}] must have "type": "function"', f"tools[{position}]")
        tools.append({"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}})
    choice: object = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    with _in_other_words(".function", ""):
        checked = check_tools(tools or None)
        return checked, check_tool_choice(choice, checked)


@contextmanager
def _in_other_words(ours: str, theirs: str) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise RequestError(str(error).replace(ours, theirs, 1), (error.param or "").replace(ours, theirs, 1), error.code) from None


def _message(item: object, where: str) -> dict[str, object]:
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    check_medium(item, where)
    if not isinstance(item, Mapping) or kind not in ("message", "function_call", "function_call_output"):
        shown = str(kind)[:80] if isinstance(item, Mapping) else type(item).__name__
        raise RequestError(f"{where} must be a message, a function_call or a function_call_output, not {shown}", where)
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "type": "function", "function": function}]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"), f"{where}.output")}
    return {"role": item.get("role"), "content": _content(item.get("content"), f"{where}.content")}


def _content(content: object, where: str) -> object:
    return [_part(part, f"{where}[{position}]") for position, part in enumerate(content)] if isinstance(content, list) else content


def _part(part: object, where: str) -> dict[str, object]:
    check_medium(part, where)
    if not isinstance(part, Mapping) or part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
        raise RequestError(f'{where} must be {{"type": "input_text", "text": ...}}', where)
    return {"type": "text", "text": part["text"]}


def _calls_joined(messages: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Calls that follow a text of the assistant, or each other, are one message, as a template expects."""
    joined: list[dict[str, object]] = []
    for message in messages:
        before = joined[-1] if joined else {}
        calls, earlier = message.get("tool_calls"), before.get("tool_calls", [])
        if isinstance(calls, list) and isinstance(earlier, list) and before.get("role") == "assistant":
            joined[-1] = {**before, "tool_calls": [*earlier, *calls]}
        else:
            joined.append(message)
    return joined
