"""The form an answer must have, in the words of a request: `response_format`, `text.format`, `structured_outputs`, a forced call.

    answer  ->  calls of tools            tool_choice required or named
                JSON, a regex, ...        a form
                one or the other          a form, and tools that may be called

Where the model thinks, the thought comes first and is free. What results is tried in a child process before the engine hears of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.server.answer_parts import AnswerForm
from octavo.server.sampling import named
from octavo.server.state import Server
from octavo.structured_outputs import PARAM, StructuredOutputs, structured_outputs
from octavo.text.grammar_limits import check_limits
from octavo.text.grammar_text import joined_grammars
from octavo.text.reasoning import behind_thought
from octavo.text.tool_calls import FAMILIES, forced_call
from octavo.text.tools import ToolChoice

TYPES = ("text", "json_object", "json_schema")


def asked_form(extra: object, response_format: object, param: str) -> StructuredOutputs | None:
    """Of `structured_outputs` and what the route calls a response format, `param`, at most one."""
    by_format = _of_format(response_format, param)
    if extra is None:
        return by_format
    if by_format is not None:
        raise RequestError(f"{PARAM} and {param} exclude each other", PARAM)
    return structured_outputs(extra)


def _of_format(value: object, param: str) -> StructuredOutputs | None:
    """A schema is in an object of its own, in chat, or beside the type, in responses; it is kept to whatever `strict` says."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or kind not in TYPES:
        raise RequestError(f'{param} must be an object with a "type" of {", ".join(TYPES)}', param)
    if kind != "json_schema":
        return StructuredOutputs(json_object=True) if kind == "json_object" else None
    inner = value.get("json_schema", value)
    if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping):
        raise RequestError(f'{param} has no schema: "schema" must be an object', param)
    if not isinstance(inner.get("name"), str | None) or not isinstance(inner.get("strict"), bool | None):
        raise RequestError(f'{param}: "name" must be text and "strict" true or false', param)
    with named({PARAM: param}):
        return structured_outputs({"json": inner["schema"]})


def param_of(extra: object, param: str, choice: ToolChoice | None = None) -> str:
    """What a complaint about the grammar is about."""
    return "tools" if choice is not None and choice.mode == "required" else PARAM if extra is not None else param


async def held_to(server: Server, params: SamplingParams, asked: StructuredOutputs | None) -> SamplingParams:
    """These, with the form, if it can be compiled."""
    if asked is None:
        return params
    params = replace(params, structured_outputs=asked)
    await server.grammars.check(asked)
    return params


def chat_grammar(
    asked: StructuredOutputs | None, form: AnswerForm, tools: Sequence[Mapping[str, object]], choice: ToolChoice, prompt: str
) -> StructuredOutputs | None:
    """What the answer to `prompt` is held to, if anything: the form asked for, calls of the tools offered, or either.

    A form that goes into a larger grammar, or is not needed, is checked for its limits here, because nobody sees it again.
    """
    forced = choice.mode == "required"
    parts: dict[str, StructuredOutputs] = {} if asked is None or forced else {"form": asked}
    if forced or (parts and tools and form.calls in FAMILIES):
        rules = forced_call(form.calls, tools, form.parallel and choice.name is None)
        parts["calls"] = StructuredOutputs(grammar=f"start: answer\n{rules}")
    if parts == {"form": asked} and form.reasoning == "none":
        return asked
    if asked is not None:
        check_limits(asked)
    frame = behind_thought(f"answer: {' | '.join(f'@{name}' for name in parts)}\n", form.reasoning, prompt)
    return StructuredOutputs(grammar=joined_grammars(frame, parts)) if parts else None
