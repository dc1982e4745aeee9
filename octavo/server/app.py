"""The application: all routers, errors in one form, and the guard around them.

A module with routes has a function `router(server) -> APIRouter`; to add one, list it in ROUTERS.
"""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.errors import OctavoError, RequestError
from octavo.server import basic, chat, completions, lesson, metrics, records, responses, tokens, view, web
from octavo.server.errors import ApiError, error_response
from octavo.server.guard import Guard
from octavo.server.state import Server
from octavo.server.unsupported import missing_route

ROUTERS: tuple[Callable[[Server], APIRouter], ...] = (
    basic.router, tokens.router, completions.router, chat.router, responses.router, metrics.router, records.router,
    view.router, lesson.router, web.router,
)  # fmt: skip


def build_app(server: Server) -> FastAPI:
    app = FastAPI(
        title="Octavo",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=ERROR,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # it would record more than we want
    )
    app.state.server = server
    for kind in (OctavoError, ApiError, HTTPException):
        app.add_exception_handler(kind, _answer)
    app.add_exception_handler(RequestValidationError, _answer_validation)
    for router in ROUTERS:
        app.include_router(router(server))
    app.openapi = lambda: _schema(FastAPI.openapi(app))  # type: ignore[method-assign]
    app.add_middleware(Guard, server=server)
    return app


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 404:  # of the router
        error = ApiError(404, missing_route(request.scope["path"]))
    return error_response(error)


async def _answer_validation(request: Request, error: Exception) -> Response:
    """Of a path or a query; bodies are read by `read_body`."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return error_response(RequestError(f"{name}: {first['msg']}", name))


_TEXT, _TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}
_ERROR_FIELDS = {"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL}
_ERROR_OBJECT = {"type": "object", "required": list(_ERROR_FIELDS), "properties": _ERROR_FIELDS}
ERROR: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "An error",
        "content": {"application/json": {"schema": {"type": "object", "required": ["error"], "properties": {"error": _ERROR_OBJECT}}}},
    }
}


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    """What bodies refer to stands among the components."""
    shared = schema.setdefault("components", {}).setdefault("schemas", {})
    for operation in (operation for methods in schema["paths"].values() for operation in methods.values()):
        for content in operation.get("requestBody", {}).get("content", {}).values():
            shared |= content["schema"].pop("$defs", {})
    return schema
