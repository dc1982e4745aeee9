"""An imitation of the hub on this machine: the few routes a download uses, and every way in which they can go wrong.

    GET  /api/models/OWNER/NAME[/revision/REV]     commit and files, with sizes and digests
    GET  /api/models?author=, ?search=             names
    HEAD, GET  /OWNER/NAME/resolve/REV/FILE        the bytes, also a range of them

A test sets the troubles it wants and reads `requests` afterwards.
"""

import hashlib
import json
import re
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".gguf", ".bin")


@dataclass
class Repo:
    files: dict[str, bytes]
    commit: str = "c" * 40
    tags: tuple[str, ...] = ()
    gated: bool = False
    token: str | None = None  # without it, a private repository is not there
    said_sizes: dict[str, int] = field(default_factory=dict)  # where the listing lies

    def revision(self, name: str) -> bool:
        return name in ("main", self.commit, *self.tags)


@dataclass
class Request:
    method: str
    path: str
    range: str | None
    token: str | None


def digest(name: str, content: bytes) -> str:
    if name.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


class FakeHub:
    """Serves `repos` in a thread of its own, from `with` on."""

    def __init__(self, repos: dict[str, Repo]) -> None:
        self.repos = repos
        self.requests: list[Request] = []
        self.cuts: dict[str, list[int]] = defaultdict(list)  # file -> bytes after which each of its next answers breaks off
        self.refusals: list[int] = []  # statuses of the next answers to requests for bytes
        self.status: int | None = None  # for all requests
        self.wait = ("", 0.0)  # part of a path, and the seconds before its answers
        self.pause: dict[str, float] = {}  # file -> seconds between pieces of it
        self.served: dict[str, bytes] = {}  # file -> bytes that come instead of its own
        self.ranges = True
        self.elsewhere: str | None = None  # another server, that requests for bytes are sent on to
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "FakeHub":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def downloads(self) -> list[tuple[str, str | None]]:
        """(file, range) of every request for bytes, in order."""
        found = [request for request in self.requests if request.method == "GET" and "/resolve/" in request.path]
        return [(request.path.split("/", 5)[5], request.range) for request in found]


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            address = urlsplit(self.path)
            path, token = unquote(address.path), (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            hub.requests.append(Request(self.command, path, self.headers.get("Range"), token))
            if hub.wait[0] in path:
                time.sleep(hub.wait[1])
            if hub.refusals and self.command == "GET" and "/resolve/" in path:
                return self.fail(hub.refusals.pop(0))
            if hub.status is not None:
                return self.fail(hub.status)
            if path == "/api/models":
                return self.send_json(self.search(parse_qs(address.query)))
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                return self.describe(match[1], match[2] or "main", token)
            if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                return self.send_file(match[1], match[2], match[3], token)
            self.fail(404)

        def search(self, query: dict[str, list[str]]) -> list[dict[str, str]]:
            author, word = query.get("author", [""])[0], query.get("search", [""])[0]
            return [{"id": name} for name in hub.repos if name.startswith(f"{author}/" if author else "") and word in name]

        def repo(self, name: str, revision: str, token: str | None) -> Repo | None:
            repo = hub.repos.get(name)
            if repo is None or (repo.token is not None and repo.token != token):
                self.fail(401 if token is None else 404, x_error_code="RepoNotFound")
            elif not repo.revision(revision):
                self.fail(404, x_error_code="RevisionNotFound")
            else:
                return repo
            return None

        def describe(self, name: str, revision: str, token: str | None) -> None:
            if (repo := self.repo(name, revision, token)) is None:
                return
            files = []
            for file, content in repo.files.items():
                size = repo.said_sizes.get(file, len(content))
                entry: dict[str, Any] = {"rfilename": file, "size": size, "blobId": hashlib.sha1(content).hexdigest()}
                if file.endswith(LARGE):
                    entry["lfs"] = {"sha256": digest(file, content), "size": size, "pointerSize": 134}
                else:
                    entry["blobId"] = digest(file, content)
                files.append(entry)
            self.send_json({"id": name, "sha": repo.commit, "siblings": files})

        def send_file(self, name: str, revision: str, file: str, token: str | None) -> None:
            if (repo := self.repo(name, revision, token)) is None:
                return
            if repo.gated:
                return self.fail(403, x_error_code="GatedRepo")
            if file not in repo.files:
                return self.fail(404, x_error_code="EntryNotFound")
            if hub.elsewhere is not None:
                there = {"Location": hub.elsewhere + self.path, "X-Linked-Etag": f'"{digest(file, repo.files[file])}"'}
                return self.fail(302, **there, X_Linked_Size=str(len(repo.files[file])), X_Repo_Commit=repo.commit)
            content = hub.served.get(file, repo.files[file])
            first, last = self.wanted(len(content))
            if first >= len(content) > 0:
                return self.fail(416)
            self.send_response(206 if self.headers.get("Range") and hub.ranges else 200)
            if self.headers.get("Range") and hub.ranges:
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            self.send_header("Content-Length", str(last + 1 - first))
            self.send_header("ETag", f'"{digest(file, repo.files[file])}"')
            self.send_header("X-Repo-Commit", repo.commit)
            self.end_headers()
            if self.command == "GET":
                self.send_pieces(file, content[first : last + 1])

        def wanted(self, size: int) -> tuple[int, int]:
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "") if hub.ranges else None
            if match is None:
                return 0, size - 1
            return int(match[1]), min(int(match[2]) if match[2] else size, size - 1)

        def send_pieces(self, file: str, content: bytes) -> None:
            cut = hub.cuts[file].pop(0) if hub.cuts[file] else None
            content, piece = content[:cut], 2**16
            for start in range(0, len(content), piece):
                try:
                    self.wfile.write(content[start : start + piece])
                except OSError:  # whoever asked has gone
                    break
                time.sleep(hub.pause.get(file, 0))
            if cut is not None:
                self.close_connection = True

        def send_json(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def fail(self, status: int, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler
