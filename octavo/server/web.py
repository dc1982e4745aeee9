"""The page: the files of octavo/web, read once at start, at `/` and `/web/*`.

No other file is ever opened, whatever the path. The headers allow the page to use its own files and its own server, and nothing else:
no other site can frame it, no other script runs, and nothing that a model writes can load anything.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.errors import ApiError
from octavo.server.state import Server

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


def router(server: Server) -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    files = found_files()

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return _answer(files["index.html"], request)

    @routes.api_route("/web/{path:path}", methods=["GET", "HEAD"])
    async def web_file(path: str, request: Request) -> Response:
        if path not in files:
            raise ApiError(404, "there is no such file")
        return _answer(files[path], request)

    return routes


def _answer(file: File, request: Request) -> Response:
    headers = {**HEADERS, "etag": file.etag}
    known = re.findall(r'"[^"]*"', request.headers.get("if-none-match", ""))
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.kind, headers=headers)  # for HEAD uvicorn sends only the headers
