"""A conversation to the one prompt its model was trained on.

The template is text out of the model's files, written in jinja2 and rendered as Hugging Face does (trimmed blocks, plain
JSON, `raise_exception`, `strftime_now`). It is not trusted: it runs in `TemplateSandbox` with a limit on time and on what
it makes, and whatever goes wrong in it is a TemplateError with one short line.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

from jinja2 import TemplateSyntaxError, nodes

from octavo.errors import RequestError, TemplateError
from octavo.text.template_sandbox import TemplateSandbox

MAX_SECONDS = 2.0
MAX_UNITS = 8_000_000  # characters made, roughly; for a large conversation UNITS_PER_INPUT_UNIT adds to it
UNITS_PER_INPUT_UNIT = 32  # a template copies each message a handful of times
MAX_SOURCE_CHARS = 65_536  # twice the longest real template; jinja2 compiles some in quadratic time: here in a second
MAX_ERROR_CHARS = 300

Renderer = tuple[TemplateSandbox, Callable[[dict[str, object]], str]]
_NO_VARIABLES: Mapping[str, object] = MappingProxyType({})


class ChatTemplate:
    def __init__(self, source: str, name: str, bos_token: str, eos_token: str) -> None:
        """`name` says where the template comes from, for errors."""
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError(f"chat template of {name} has {len(source):,} characters, at most {MAX_SOURCE_CHARS:,} are taken")
        self._name = name
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._source = source
        self._idle = [self._build()]  # a sandbox has one meter, so it renders for one thread at a time

    def _build(self) -> Renderer:
        sandbox = TemplateSandbox()
        try:
            return sandbox, sandbox.build(self._source, self._name)
        except Exception as error:
            raise self._failure("is not valid", error) from None

    @cached_property
    def reads_tools(self) -> bool:
        """Whether it can write tools into the prompt."""
        return any(name.name == "tools" for name in TemplateSandbox().parse(self._source).find_all(nodes.Name))

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
        try:
            renderer = self._idle.pop()
        except IndexError:  # all are at work in other threads
            renderer = self._build()
        sandbox, render = renderer
        sandbox.meter.start(MAX_UNITS + UNITS_PER_INPUT_UNIT * units_of((messages, tools)), MAX_SECONDS)
        try:
            return render({**variables, **given})
        except Exception as error:  # templates raise anything: a missing key, a wrong type, too deep a recursion
            raise self._failure("failed", error) from None
        finally:
            self._idle.append(renderer)

    def default_system_prompt(self) -> str | None:
        """What the template says as the system where the conversation has no system message; None if it says nothing or it cannot be told.

        The text in the place of a system message is cut out, and then given as a system message: it must make the same prompt.
        """
        user = {"role": "user", "content": "a question"}
        mark = "the system prompt stands here"
        try:
            without = self.render([user])
            before, *after = self.render([{"role": "system", "content": mark}, user]).split(mark)
            if len(after) != 1 or not (without.startswith(before) and without.endswith(after[0])):
                return None
            found = without[len(before) : len(without) - len(after[0])]
            return found if found and self.render([{"role": "system", "content": found}, user]) == without else None
        except TemplateError:  # it takes no system message, or wants something that is not there
            return None

    def _failure(self, what: str, error: Exception) -> TemplateError:
        place, reason = "", str(error)
        if isinstance(error, TemplateSyntaxError):
            place, reason = f" (line {error.lineno})", str(error.message)
        reason = " ".join(reason.split()) or type(error).__name__
        return TemplateError(f"chat template of {self._name} {what}{place}: {reason[:MAX_ERROR_CHARS]}")


def units_of(value: object) -> int:
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
