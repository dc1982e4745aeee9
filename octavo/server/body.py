"""Reads bodies of requests: bytes to a checked object, or a 400 that names the field. fields.py describes the fields.

    @router.post("/ask", openapi_extra=takes(Question))
    async def ask(request: Request) -> ...:
        question = await read_body(request, Question, refused={})

The parser is pydantic's: strict UTF-8, at most 200 levels, the last of equal keys wins. NaN and infinity are refused anywhere in a body.
From the body of a route that generates text, the form of the answer or the beam search that it requests is read, too.
"""

import gc
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from octavo.errors import RequestError
from octavo.log import logger
from octavo.messages import Beams
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.server.errors import ApiError
from octavo.server.fields import ACCEPTED, REFUSED, ChatBody, CompletionBody, GenerationBody, Refusal
from octavo.server.state import Server
from octavo.server.turns import SMALL_BYTES, disconnect, unless
from octavo.structured_outputs import PARAM, StructuredOutputsParams, structured_outputs
from octavo.text.tools import ToolChoice

MOST_WARNINGS = 256
MOST_LABEL_CHARS = 65_536  # in user and metadata, which this server does not use
LARGE_BYTES = 256 * 2**10  # a larger body is parsed and checked in a thread, so that the event loop goes on
UNSUPPORTED = "unsupported_parameter"
MANY = 100  # items of a list that is checked as a whole first
SCHEMAS = "#/components/schemas/{model}"
_PLACES = frozenset({float, list, dict})  # where a number that is not finite can be

Model = TypeVar("Model", bound=BaseModel)
Generation = TypeVar("Generation", bound=GenerationBody)
_checking = threading.Lock()
_under_way: list[Callable[[], Any]] = []  # checks


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """Returns the `openapi_extra` of a route that reads `model`. app.py moves its definitions to where OpenAPI has them."""
    content = {"application/json": {"schema": model.model_json_schema(ref_template=SCHEMAS)}}
    return {"requestBody": {"required": True, "content": content}}


async def read_body(request: Request, model: type[Model], refused: Mapping[str, Refusal]) -> Model:
    """Returns the body as a `model`. Raises RequestError for one that is wrong, or has a field of `refused`."""
    data = await request.body()
    if not data:
        raise RequestError("the body is empty; it must be a JSON object")
    server: Server = request.app.state.server
    checked = partial(_without_collector, partial(_checked, data, model, refused, server))
    if len(data) > LARGE_BYTES:
        return await server.threads.run("bodies", request, checked)
    if len(data) > SMALL_BYTES and not (admitted := server.bodies.enter(len(data))).done():
        await unless(disconnect(request.receive), admitted)
    return checked()


def _checked(data: bytes, model: type[Model], refused: Mapping[str, Refusal], server: Server) -> Model:
    value = _parsed(data)
    _check_names(value, model, refused, server)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _first_mistake(error.errors(include_url=False, include_input=False, include_context=False), value) from None


def _without_collector(check: Callable[[], Model]) -> Model:
    """Runs a check while the garbage collector is off. A body can be a million objects: the collector would look at all of them, in
    the thread of the event loop as well. Checks may overlap.
    """
    with _checking:
        _under_way.append(check)
        gc.disable()
    try:
        return check()
    finally:
        with _checking:
            _under_way.remove(check)
            if not _under_way:
                gc.enable()


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        value = from_json(data, allow_inf_nan=True)
    except ValueError as error:  # its message says what and where, and repeats no text of the body
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {_kind(value)}")
    if place := _not_finite(value):
        raise RequestError(f"{place} is not a finite number", place)
    return value


def _not_finite(value: dict[str, Any] | list[Any], path: str = "") -> str:
    """Returns the path of the first NaN or infinity, or "". JSON does not have them, and an answer that repeats one would not be JSON."""
    if len(value) >= MANY and isinstance(value, list) and are_ids(value):
        return ""
    if _PLACES.isdisjoint(map(type, value.values() if isinstance(value, dict) else value)):
        return ""  # as in a list of texts; three times as fast as to look at each
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in pairs:
        kind = type(item)
        if kind is float and not math.isfinite(item):
            return _joined(path, key)
        if (kind is list or kind is dict) and (place := _not_finite(item, _joined(path, key))):
            return place
    return ""


def are_ids(values: list[Any]) -> bool:
    """Returns whether all items are integers. True and false are not."""
    try:
        msgspec.convert(values, list[int])  # three times as fast as to look at the type of each
    except msgspec.ValidationError:
        return False
    return True


def _check_names(value: dict[str, Any], model: type[BaseModel], refused: Mapping[str, Refusal], server: Server) -> None:
    known = {name for field, info in model.model_fields.items() for name in (field, info.alias)}
    for name in value.keys() - known - ACCEPTED:
        if name in refused:
            _check_field(name, value[name], refused[name])
        elif len(server.warned) < MOST_WARNINGS and name[:80] not in server.warned:
            server.warned.add(name[:80])
            logger.warning("the field %s of a request is unknown and ignored; this is said once", ascii(name[:80]))


def _check_field(name: str, value: object, refusal: Refusal) -> None:
    is_harmless = value is None or any(type(value) is type(one) and value == one for one in refusal.harmless)  # True is not 1
    if not is_harmless:
        raise RequestError(f"{name} is not supported" + (f"; {refusal.instead}" if refusal.instead else ""), name, UNSUPPORTED)


def _first_mistake(mistakes: Sequence[ErrorDetails], value: dict[str, Any]) -> RequestError:
    """Returns the error for the client. Each member of a union complains; the one that got deepest into the value fits best."""
    param, message = max(((_path(one, value), one["msg"].removeprefix("Value error, ")) for one in mistakes), key=lambda pair: len(pair[0]))
    return RequestError(f"{param}: {message}" if param else message, param or None)


def _path(mistake: ErrorDetails, value: Any) -> str:
    """Returns a path like messages[0].content: the steps of pydantic's path that exist in the value, and the name of a missing field."""
    path, loc = "", mistake["loc"]
    for number, part in enumerate(loc):
        missing = mistake["type"] == "missing" and number == len(loc) - 1
        if isinstance(part, int) and isinstance(value, list) and part < len(value):
            path, value = _joined(path, part), value[part]
        elif isinstance(part, str) and isinstance(value, dict) and (part in value or missing):
            path, value = _joined(path, part), value.get(part)
    return path


def _joined(path: str, part: str | int) -> str:
    if isinstance(part, int):
        return f"{path}[{part}]"
    return f"{path}.{part[:80]}" if path else part[:80]


def _kind(value: object) -> str:
    names: dict[type, str] = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Errors raised inside it name fields as the client does. `names`: our name -> the client's, like max_tokens -> max_output_tokens."""
    try:
        yield
    except RequestError as error:
        message, ours = str(error), error.param or ""
        theirs = names.get(ours, ours)
        error.param = theirs or None
        error.args = (theirs + message.removeprefix(ours) if message.startswith((f"{ours} ", f"{ours}:")) else message,)
        raise


def check_model(server: Server, name: str | None) -> None:
    """Raises ApiError for a model that this server does not have. A request may leave it out."""
    if name is not None and name != server.model_name:
        message = f"the model {name[:100]!r} does not exist; this server has {server.model_name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


# -- bodies of routes that generate text


async def read_generation_body(request: Request, kind: type[Generation], server: Server) -> Generation:
    """Returns the checked body of a route that generates. Raises for one that is wrong, or names another model."""
    body = await read_body(request, kind, REFUSED[kind])
    for name in ("user", "metadata"):
        if _is_longer(getattr(body, name), MOST_LABEL_CHARS):
            raise RequestError(f"{name} has more than {MOST_LABEL_CHARS:,} characters", name)
    if isinstance(body, CompletionBody | ChatBody) and body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is given, but stream is not true", "stream_options")
    check_model(server, body.model)
    return body


def _is_longer(value: object, most: int) -> bool:
    """Returns whether the texts in a value have more than `most` characters in all. Other values count as one. It stops at the limit."""
    waiting = [value]
    while waiting and most >= 0:
        one = waiting.pop()
        if isinstance(one, dict | list) and len(one) > most:
            return True
        if isinstance(one, dict):
            most -= sum(map(len, one))
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)
        else:
            most -= len(one) if isinstance(one, str) else 1
    return most < 0


# -- the form of an answer that a body asks for

TYPES = ("text", "json_object", "json_schema")


def structured_outputs_of(extra: object, response_format: object, param: str) -> StructuredOutputsParams | None:
    """Returns the form asked for by `structured_outputs` or by the response format, which this route calls `param`. Both are refused."""
    by_format = _of_format(response_format, param)
    if extra is None:
        return by_format
    if by_format is not None:
        raise RequestError(f"{PARAM} and {param} exclude each other", PARAM)
    return structured_outputs(extra)


def _of_format(value: object, param: str) -> StructuredOutputsParams | None:
    """Returns the form in a response format. A schema is in "json_schema" (chat) or beside the type (responses); `strict` has no effect."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or kind not in TYPES:
        raise RequestError(f'{param} must be an object with a "type" of {", ".join(TYPES)}', param)
    if kind != "json_schema":
        return StructuredOutputsParams(json_object=True) if kind == "json_object" else None
    inner = value.get("json_schema", value)
    if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping):
        raise RequestError(f'{param} has no schema: "schema" must be an object', param)
    if not isinstance(inner.get("name"), str | None) or not isinstance(inner.get("strict"), bool | None):
        raise RequestError(f'{param}: "name" must be text and "strict" true or false', param)
    with named({PARAM: param}):
        return structured_outputs({"json": inner["schema"]})


def param_of(extra: object, param: str, choice: ToolChoice | None = None) -> str:
    """Returns the field that an error about the grammar names."""
    return "tools" if choice is not None and choice.mode == "required" else PARAM if extra is not None else param


# -- beam search

# A search gives its answers when all are there, and ranks by the model's own logprobs: nothing may change these, or end a beam by its text.
_BESIDE = (
    "stream", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words",
    "stop", "stop_token_ids", "structured_outputs", "response_format",
)  # fmt: skip
_HARMLESS = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_tokens": 0}
_OWN = ("beam_width", "length_penalty", "early_stopping")


def beams_of(body: CompletionBody | ChatBody, most: int) -> Beams | None:
    """Returns the search that a body asks for, if it does. `most`: the widest that this server allows"""
    if not body.use_beam_search:
        for name in _OWN:
            if getattr(body, name) not in (None, False, *((1,) if name == "length_penalty" else ())):
                raise RequestError(f"{name} is given, but use_beam_search is not true", name)
        return None
    for name in _BESIDE:
        value = getattr(body, name)
        if value and value != _HARMLESS.get(name) and value != {"type": "text"}:
            raise RequestError(f"{name} cannot be used with beam search; leave it out, or use_beam_search", name)
    if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        raise RequestError("echo with logprobs cannot be used with beam search; leave one of them out, or use_beam_search", "echo")
    width = (body.n or 1) if body.beam_width is None else body.beam_width
    if width > most:
        raise RequestError(f"the beam width is {width}, at most {most} is allowed", "beam_width" if body.beam_width else "n")
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    checked = BeamSearchParams(width, 1, length_penalty=penalty, early_stopping=body.early_stopping or False)
    return Beams(checked.beam_width, checked.length_penalty, checked.early_stopping)


def for_beams(params: SamplingParams) -> SamplingParams:
    """Returns the same without what says how tokens are drawn, wherever it came from: beams are not drawn."""
    return replace(params, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None, repetition_penalty=1.0)
