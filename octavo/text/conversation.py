"""The messages of a conversation: checked and made plain, so that a chat template can rely on their form, and where they end in the prompt.

    system ... | earlier messages ... | last question | ... | generation prompt        | one of the ends

At an end, other conversations may continue. They have the system messages, another last question, another answer to it, or go on after
the last message. Other ends were the last ones of earlier turns. Templates write a message differently if others follow: some drop the
thoughts of earlier answers, some write a system message into a question. So the prompt is compared with the text of a conversation that
has other messages from there on. A rendering costs far more than a comparison, so there is one for each end, and at most four.
"""

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence

from octavo.errors import RequestError, TemplateError

ROLES = ("system", "user", "assistant", "tool", "developer")
MEDIA = {
    "image": "images are", "image_url": "images are", "input_image": "images are", "input_audio": "audio is", "audio_url": "audio is",
    "video_url": "video is", "input_video": "video is", "file": "files are", "input_file": "files are",
}  # fmt: skip
MOST_MESSAGES = 16_384  # each is copied, and a template goes through all of them

Rendered = Callable[[list[Mapping[str, object]]], str]


def check_count(messages: Sequence[object], param: str) -> None:
    if len(messages) > MOST_MESSAGES:
        raise RequestError(f"{param} has {len(messages):,} items, at most {MOST_MESSAGES:,} are allowed", param=param)


def check_messages(messages: object) -> list[dict[str, object]]:
    """Returns the conversation as plain messages, with text parts joined. A RequestError names the message at fault."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages must be a list of at least one message", param="messages")
    check_count(messages, "messages")
    return [_check_message(message, f"messages[{position}]") for position, message in enumerate(messages)]


def _check_message(message: object, where: str) -> dict[str, object]:
    if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
        raise RequestError(f"{where} must be an object with role and content, not {type(message).__name__}", param=where)
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role not in ROLES:
        raise RequestError(f"{where}.role is {_shown(role)}; it must be one of {', '.join(ROLES)}", param=f"{where}.role")
    if role == "tool" and not (isinstance(call_id := message.get("tool_call_id"), str) and call_id):
        raise RequestError(f"{where}.tool_call_id is missing: it says which call this answers", param=f"{where}.tool_call_id")
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    if role == "assistant" and calls:  # the calls may be all it said
        plain["tool_calls"] = _calls(calls, f"{where}.tool_calls")
        content = "" if content is None else content
    return {**plain, "content": _content(content, f"{where}.content")}


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be text or a list of text parts, not {type(content).__name__}", param=where)
    texts = []
    for position, part in enumerate(content):
        check_medium(part, f"{where}[{position}]")
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(text := part.get("text"), str):
            raise RequestError(f'{where}[{position}] must be {{"type": "text", "text": ...}}', param=f"{where}[{position}]")
        texts.append(text)
    return "".join(texts)


def check_medium(part: object, where: str) -> None:
    """Refuses a part of a message that is not text, such as an image."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind in MEDIA:
        message = f"{where} has the type {kind}: {MEDIA[kind]} not supported yet; send text"
        raise RequestError(message, where, "unsupported_parameter")


def _calls(calls: object, where: str) -> list[dict[str, object]]:
    """Returns tool calls with their arguments as objects. Templates write them as JSON, and would quote a text once more."""
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list, not {type(calls).__name__}", param=where)
    return [_call(call, f"{where}[{position}]") for position, call in enumerate(calls)]


def _call(call: object, where: str) -> dict[str, object]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f'{where} must be {{"id": ..., "type": "function", "function": {{"name": ..., "arguments": ...}}}}', param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        param = f"{where}.function.arguments"
        raise RequestError(f"{param} must be a JSON object, got {_shown(function.get('arguments'))}", param=param)
    return {**call, "function": {**function, "arguments": arguments}}


def _shown(value: object) -> str:
    return reprlib.repr(value) if isinstance(value, str) else type(value).__name__


# -- where messages end


def message_ends(
    messages: Sequence[Mapping[str, object]], text: str, ids: list[int], render: Rendered, encode: Callable[[str], list[int]]
) -> list[int]:
    """Returns lengths in tokens, in ascending order. `text`, `ids`: the prompt. An end that the template cannot render is left out."""
    found = {0: 0}  # characters -> tokens
    for end in _ends(messages):
        try:
            cut = common_length(text, render(_with_others(messages, end)))
            found[cut] = found[cut] if cut in found else _tokens_before(cut, text, ids, encode)
        except (TemplateError, RequestError):
            continue
    return sorted({*found.values()} - {0})


def _ends(messages: Sequence[Mapping[str, object]]) -> set[int]:
    """Returns how many messages there are before each end."""
    roles = [message["role"] for message in messages]
    instructions = next((at for at, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
    question = max((at for at, role in enumerate(roles) if role == "user"), default=0)
    return {instructions, question, question + 1, len(roles)} - {0}


def _with_others(messages: Sequence[Mapping[str, object]], end: int) -> list[Mapping[str, object]]:
    """Returns the messages before an end, and others instead of the rest."""
    replaced = str(messages[end]["content"]) if end < len(messages) else ""
    question = {"role": "user", "content": "1. No" if replaced.startswith("Y") else "Yes"}
    answer = {"role": "assistant", "content": "Yes"}
    others = {"user": [answer, question], "tool": [answer]}  # after a question, templates may drop the thoughts before the calls of tools
    return [*messages[:end], *others.get(str(messages[end - 1]["role"]), [question])]


def _tokens_before(cut: int, text: str, ids: list[int], encode: Callable[[str], list[int]]) -> int:
    """Returns how many tokens are in the first `cut` characters. Only the shorter side is encoded, unless a token is on both."""
    if 2 * cut > len(text):
        rest = encode(text[cut:]) if cut < len(text) else []
        if ids[len(ids) - len(rest) :] == rest:
            return len(ids) - len(rest)
    return common_length(ids, encode(text[:cut]))


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Returns how many items at the beginning are equal. Slices are compared, which is faster than item by item."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
