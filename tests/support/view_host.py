"""A small host of the pool's files with a view that a test scripts: what it sends, watchers get, late ones too.

`/` has the pool and the timeline alone, `/page` the whole page; nothing answers its chat.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"web": ROOT / "octavo" / "web", "web/vendor": ROOT / "octavo" / "web" / "vendor", "data": ROOT / "tests" / "web" / "data"}
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html; charset=utf-8"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
WHOLE_PAGE = {  # the page itself, and what its chat asks of a server
    "/page": ((FOLDERS["web"] / "index.html").read_bytes(), TYPES[".html"]),
    "/health": (b'{"status":"ready"}', "application/json"),
    "/v1/models": (b'{"data":[{"id":"model","max_model_len":8192}]}', "application/json"),
}


class ViewHost:
    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.files: dict[str, bytes] = {}  # name -> a recording beside the page
        self.status = 200  # of the stream
        self.keys: list[str | None] = []  # what watchers brought
        self.changed = threading.Condition()
        self.cut = 0  # streams begun before this many cuts end
        self.url = ""

    def send(self, *frames: dict[str, Any]) -> None:
        with self.changed:
            self.lines += [json.dumps(frame).encode() + b"\n" for frame in frames]
            self.changed.notify_all()

    def start_again(self, *frames: dict[str, Any]) -> None:
        """Ends the streams that are open; those that come get these frames first."""
        with self.changed:
            self.lines = []
            self.cut += 1
        self.send(*frames)

    def follow(self) -> Iterator[bytes]:
        sent, begun = 0, self.cut
        while True:
            with self.changed:
                while self.cut == begun and len(self.lines) == sent:
                    self.changed.wait()
                if self.cut != begun:
                    return
                lines, sent = self.lines[sent:], len(self.lines)
            yield b"".join(lines)


def handler_of(host: ViewHost) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            folder, _, name = self.path.partition("?")[0].removeprefix("/").rpartition("/")
            if self.path == "/v1/view":
                self.stream()
            elif not folder and name in host.files:
                self.answer(host.files[name], "application/x-ndjson")
            elif not folder and not name:
                self.answer((FOLDERS["data"] / "harness.html").read_bytes(), TYPES[".html"])
            elif self.path in WHOLE_PAGE:
                self.answer(*WHOLE_PAGE[self.path])
            elif folder in FOLDERS and (path := FOLDERS[folder] / name).is_file():
                self.answer(path.read_bytes(), TYPES[path.suffix])
            else:
                self.send_error(404)

        def answer(self, body: bytes, content_type: str) -> None:
            self.send_response(200)
            self.send_header("content-type", content_type)
            self.send_header("content-security-policy", POLICY)
            self.end_headers()
            self.wfile.write(body)

        def stream(self) -> None:
            host.keys.append(self.headers["authorization"])
            if host.status != 200:
                return self.send_error(host.status)
            self.send_response(200)
            self.send_header("content-type", "application/x-ndjson")
            self.end_headers()
            try:
                for part in host.follow():
                    self.wfile.write(part)
            except OSError:
                pass  # the watcher left

    return Handler


@contextmanager
def view_host() -> Iterator[ViewHost]:
    host = ViewHost()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(host))
    server.daemon_threads = True
    host.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield host
    finally:
        with host.changed:
            host.cut += 1
            host.changed.notify_all()
        server.shutdown()
        server.server_close()
        thread.join()
