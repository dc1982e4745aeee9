"""A conversation to the one prompt its model was trained on.

The template is text out of the model's files, written in jinja2 and rendered as Hugging Face does (trimmed blocks, plain
JSON, `raise_exception`, `strftime_now`). It is not trusted: it runs in `TemplateSandbox` with a limit on time and on what
it makes, and whatever goes wrong in it is a TemplateError with one short line.
"""

import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jinja2 import TemplateSyntaxError

from octavo.errors import RequestError, TemplateError
from octavo.text.template_sandbox import TemplateSandbox

ROLES = ("system", "user", "assistant", "tool", "developer")
MAX_SECONDS = 2.0
MAX_UNITS = 8_000_000  # characters made, roughly; for a large conversation UNITS_PER_INPUT_UNIT adds to it
UNITS_PER_INPUT_UNIT = 32  # a template copies each message a handful of times
MAX_SOURCE_CHARS = 65_536  # twice the longest real template; jinja2 compiles some in quadratic time: here in a second
MAX_ERROR_CHARS = 300

_NO_VARIABLES: Mapping[str, object] = MappingProxyType({})


class ChatTemplate:
    def __init__(self, source: str, name: str, bos_token: str, eos_token: str) -> None:
        """`name` says where the template comes from, for errors."""
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError(f"chat template of {name} has {len(source):,} characters, at most {MAX_SOURCE_CHARS:,} are taken")
        self._name = name
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._sandbox = TemplateSandbox()
        self._lock = threading.Lock()  # the sandbox has one meter
        try:
            self._render = self._sandbox.build(source, name)
        except Exception as error:
            raise self._failure("is not valid", error) from None

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] = _NO_VARIABLES,
    ) -> str:
        """The prompt text. `variables` are extra names the template may read, such as enable_thinking."""
        given: dict[str, object] = {"messages": messages, "tools": tools, "documents": None}
        given |= {"add_generation_prompt": add_generation_prompt, **self._tokens}
        if clash := given.keys() & variables.keys():
            raise RequestError(f"chat template variable {min(clash)!r} is set by the engine and cannot be given", param=min(clash))
        with self._lock:
            self._sandbox.meter.start(MAX_UNITS + UNITS_PER_INPUT_UNIT * _units((messages, tools)), MAX_SECONDS)
            try:
                return self._render({**variables, **given})
            except Exception as error:  # templates raise anything: a missing key, a wrong type, too deep a recursion
                raise self._failure("failed", error) from None

    def _failure(self, what: str, error: Exception) -> TemplateError:
        place, reason = "", str(error)
        if isinstance(error, TemplateSyntaxError):
            place, reason = f" (line {error.lineno})", str(error.message)
        reason = " ".join(reason.split()) or type(error).__name__
        return TemplateError(f"chat template of {self._name} {what}{place}: {reason[:MAX_ERROR_CHARS]}")


def check_messages(messages: object) -> list[dict[str, object]]:
    """The conversation as plain messages, text parts joined; a RequestError names the message at fault."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages must be a list of at least one message", param="messages")
    return [_check_message(message, f"messages[{position}]") for position, message in enumerate(messages)]


def _check_message(message: object, where: str) -> dict[str, object]:
    if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
        raise RequestError(f"{where} must be an object with role and content, not {type(message).__name__}", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}.role is {_shown(role)}; it must be one of {', '.join(ROLES)}", param=f"{where}.role")
    return {**message, "content": _content(message.get("content"), f"{where}.content")}


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be text or a list of text parts, not {type(content).__name__}", param=where)
    texts = []
    for position, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(text := part.get("text"), str):
            raise RequestError(f'{where}[{position}] must be {{"type": "text", "text": ...}}', param=f"{where}[{position}]")
        texts.append(text)
    return "".join(texts)


def _shown(value: object) -> str:
    return repr(value)[:80] if isinstance(value, str) else type(value).__name__


def _units(value: object) -> int:
    """The size of the input: characters and items, counted without recursion."""
    units, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        units += len(item) if isinstance(item, str) else 1
        if isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            waiting += item
    return units
