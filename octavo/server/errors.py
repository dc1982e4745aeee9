"""Every error of the server has one form:

    {"error": {"message": ..., "type": ..., "param": ... or null, "code": ... or null}}

Route code raises `RequestError` for what is wrong with a request, `ApiError` where the status matters; `answer_for` knows the rest.
Paths of files, addresses of objects and tracebacks go to the log, and never to a client.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from octavo.errors import DeadlineError, EngineError, OverloadError, RequestError, TemplateError, UnavailableError
from octavo.log import logger

MOST_CHARS = 1000
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
# All of an absolute path but its last name. A route of the API is no path of a file.
_PATH = re.compile(r"(?<![\w/:.])/(?!v1/)(?:[^\s/'\",;:()]+/)+(?=[^\s/'\",;:()])")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}")
_NO_HEADERS: Mapping[str, str] = {}


class ApiError(Exception):
    """An error with an HTTP status. `type` follows from `status` unless it is given."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _type_of(status)
        self.param = param
        self.code = code
        self.headers = headers


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: dict[str, object]  # has one key, "error"
    headers: dict[str, str]


def answer_for(error: BaseException) -> Answer:
    """Returns the answer for a client. An error of the server itself is logged with its traceback."""
    known = error if isinstance(error, ApiError) else _as_api_error(error)
    body = {"message": _sayable(known.message), "type": known.type, "param": known.param and _sayable(known.param), "code": known.code}
    return Answer(known.status, {"error": body}, dict(known.headers))


def error_response(error: BaseException) -> JSONResponse:
    answer = answer_for(error)
    return JSONResponse(answer.body, answer.status, answer.headers)


def _as_api_error(error: BaseException) -> ApiError:
    message = _without_places(str(error))
    if isinstance(error, RequestError):
        return ApiError(400, message, param=error.param, code=error.code)
    if isinstance(error, TemplateError):
        return ApiError(400, message, param="messages")
    if isinstance(error, OverloadError):
        return ApiError(429, message, code="overloaded", headers=_retry_after(error.retry_after))
    if isinstance(error, UnavailableError):
        return ApiError(503, message, code=error.code or "unavailable", headers=_retry_after(error.retry_after))
    if isinstance(error, DeadlineError):
        return ApiError(504, message, code="deadline_exceeded")
    if isinstance(error, HTTPException):  # raised by the router: no such route, no such method
        return ApiError(error.status_code, _router_message(error.status_code), headers=error.headers or {})
    if isinstance(error, EngineError):
        logger.error("a request failed in the engine: %s", error)
        return ApiError(500, message, code=error.code)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed on this request; see its log", code="internal_error")


def _type_of(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def _router_message(status: int) -> str:
    phrases = {404: "there is no such route", 405: "this route does not support that method"}
    return phrases.get(status, HTTPStatus(status).phrase.lower())


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}


def _without_places(text: str) -> str:
    return _ADDRESS.sub("an address", _PATH.sub("", text))


def _sayable(text: str) -> str:
    """Returns the text shortened, and valid in UTF-8: half a surrogate pair cannot be sent."""
    return text[:MOST_CHARS].encode("utf-8", "replace").decode()
