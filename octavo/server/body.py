"""Bodies of requests: bytes to a checked object, or a 400 that names the field.

    class Question(Body):            fields with their types; strict: "1" and true are not numbers, and no number is infinite
        prompt: str

    @router.post("/ask", openapi_extra=takes(Question))
    async def ask(request: Request) -> ...:
        question = await read_body(request, Question, refused={})

The parser is pydantic's: strict UTF-8, at most 200 levels, the last of equal keys wins. NaN and infinity are refused anywhere in a body.
A list stops at its first wrong item (`TokenIds`, `Texts`, `Numbers`), because a million errors would take seconds and gigabytes.
"""

import gc
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from octavo.errors import RequestError
from octavo.log import logger
from octavo.server.errors import ApiError
from octavo.server.state import Server
from octavo.server.turns import SMALL_BYTES, disconnect, unless

ACCEPTED = frozenset({"user", "metadata", "store", "service_tier"})  # accepted, and without effect here
MOST_WARNINGS = 256
LARGE_BYTES = 256 * 2**10  # a larger body is parsed and checked in a thread, so that the event loop goes on
UNSUPPORTED = "unsupported_parameter"
MANY = 100  # items of a list that is checked as a whole first
SCHEMAS = "#/components/schemas/{model}"
_PLACES = frozenset({float, list, dict})  # where a number that is not finite can be


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Refusal:
    """What to say about a field that this server does not support."""

    instead: str = ""  # what to use; "" if there is nothing
    harmless: tuple[object, ...] = ()  # values besides null that change nothing, and are accepted


def _first_that_is_wrong(value: object) -> object:
    """Returns only the first entry that is not a number, if there is one: pydantic has no `fail_fast` for dictionaries."""
    if not isinstance(value, dict):
        return value
    return next(({key: item} for key, item in value.items() if not _is_number(item)), value)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Numbers = Annotated[dict[str, float], BeforeValidator(_first_that_is_wrong)]  # by name
Model = TypeVar("Model", bound=BaseModel)
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
    param, said = max(((_path(one, value), one["msg"].removeprefix("Value error, ")) for one in mistakes), key=lambda pair: len(pair[0]))
    return RequestError(f"{param}: {said}" if param else said, param or None)


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
        said, ours = str(error), error.param or ""
        theirs = names.get(ours, ours)
        error.param = theirs or None
        error.args = (theirs + said.removeprefix(ours) if said.startswith((f"{ours} ", f"{ours}:")) else said,)
        raise


def check_model(server: Server, name: str | None) -> None:
    """Raises ApiError for a model that this server does not have. A request may leave it out."""
    if name is not None and name != server.model_name:
        message = f"the model {name[:100]!r} does not exist; this server has {server.model_name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
