"""The application: all routers, errors in one form, the guard around them, and the files of the page.

A module with routes has a function `router(server) -> APIRouter`; to add one, list it in ROUTERS.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.errors import OctavoError, RequestError
from octavo.server import chat, completions, lesson, prefixes, responses, status, tokens
from octavo.server.errors import ApiError, error_response
from octavo.server.guard import Guard
from octavo.server.state import Server

# -- the page: the files of octavo/web, read once at start, at `/` and `/web/*`
#
# No other file is ever opened, whatever the path. The headers allow the page to use its own files and its own server, and nothing else:
# no other site can frame it, no other script runs, and nothing that a model writes can load anything.

FOLDER = Path(__file__).resolve().parents[1] / "web"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".ndjson": "application/x-ndjson",
    ".LICENSE": "text/plain; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "cache-control": "no-cache",  # browsers ask every time, so that a page and its scripts have the same version
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True, slots=True)
class File:
    kind: str
    body: bytes
    etag: str


def found_files(folder: Path = FOLDER) -> dict[str, File]:
    """Returns the files by their path below the folder."""
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix in KINDS and path.is_file()]
    return {path.relative_to(folder).as_posix(): _read(path) for path in paths}


def _read(path: Path) -> File:
    body = path.read_bytes()
    return File(KINDS[path.suffix], body, f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def web_files(server: Server) -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    files = found_files()

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return _file_answer(files["index.html"], request)

    @routes.api_route("/web/{path:path}", methods=["GET", "HEAD"])
    async def web_file(path: str, request: Request) -> Response:
        if path not in files:
            raise ApiError(404, "there is no such file")
        return _file_answer(files[path], request)

    return routes


def _file_answer(file: File, request: Request) -> Response:
    headers = {**HEADERS, "etag": file.etag}
    known = re.findall(r'"[^"]*"', request.headers.get("if-none-match", ""))
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.kind, headers=headers)  # for HEAD uvicorn sends only the headers


# -- the application

ROUTERS: tuple[Callable[[Server], APIRouter], ...] = (  # a request is compared with one route after the other: the busiest come first
    chat.router, completions.router, responses.router, tokens.router, status.router, prefixes.router, lesson.router, web_files,
)  # fmt: skip


def build_app(server: Server) -> FastAPI:
    app = FastAPI(
        title="Octavo",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=ERROR,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # FastAPI would record more than we want
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
    if isinstance(error, HTTPException) and error.status_code == 404:  # raised by the router
        error = ApiError(404, _missing_route(request.scope["path"]))
    return error_response(error)


async def _answer_validation(request: Request, error: Exception) -> Response:
    """Answers a wrong value in a path or a query. Bodies are checked by `read_body`."""
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
    """Returns the schema with the definitions that bodies refer to moved among the components."""
    shared = schema.setdefault("components", {}).setdefault("schemas", {})
    for operation in (operation for methods in schema["paths"].values() for operation in methods.values()):
        for content in operation.get("requestBody", {}).get("content", {}).values():
            shared |= content["schema"].pop("$defs", {})
    return schema


# Routes of other servers: how the path begins -> what is not supported.
_ROUTES: dict[str, str] = {
    "/v1/embeddings": "embeddings are",
    "/embeddings": "embeddings are",
    "/pooling": "pooling is",
    "/classify": "classification is",
    "/rerank": "reranking is",
    "/v1/rerank": "reranking is",
    "/v2/rerank": "reranking is",
    "/score": "scoring is",
    "/v1/score": "scoring is",
    "/v1/moderations": "moderation is",
    "/v1/audio": "audio is",
    "/v1/realtime": "audio is",
    "/v1/images": "image generation is",
    "/v1/videos": "video generation is",
    "/v1/files": "files are",
    "/v1/uploads": "files are",
    "/v1/batches": "batches are",
    "/v1/fine_tuning": "fine-tuning is",
    "/v1/assistants": "the Assistants API is",
    "/v1/threads": "the Assistants API is",
    "/v1/vector_stores": "vector stores are",
    "/v1/conversations": "conversations are",
    "/v1/messages": "Anthropic's API is",
    "/api": "Ollama's API is",
}
SUPPORTED = "this server answers /v1/chat/completions, /v1/completions and /v1/responses"


def _missing_route(path: str) -> str:
    """Returns the message for a path that has no route."""
    for start, what in _ROUTES.items():
        if path == start or path.startswith(f"{start}/"):
            return f"{what} not supported; {SUPPORTED}"
    return "there is no such route"
