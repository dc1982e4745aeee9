"""A small HTTP server with a view that a test scripts, and the files of the page.

What a test sends, all watchers get, also those who come late. Or the test gives an answer for each request in turn (`Shown`): frames
with pauses before them, then the end of the stream or of the connection, or silence. `/` has only the pool and the timeline, `/page` the
whole page; nothing answers its chat.
"""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

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


@dataclass
class Shown:
    """The answer to one request for the view."""

    frames: Sequence[tuple[float, Any]] = ()  # the seconds before a frame, and the frame, or its bytes
    then: Literal["end", "cut", "silence"] = "silence"
    status: int = 200
    error: dict[str, Any] = field(default_factory=lambda: {"message": "no", "code": "no"})


class ViewHost:
    def __init__(self, answers: Sequence[Shown], key: str | None) -> None:
        self.answers = list(answers)  # the last one is given again and again; without any, watchers get what is sent
        self.key = key  # the only one that may watch
        self.lines: list[bytes] = []
        self.files: dict[str, bytes] = {}  # name -> a recording beside the page
        self.status = 200  # of the stream
        self.engines: dict[str, int] = {}  # what /health says of them
        self.asked: list[str] = []  # paths
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

    def answer(self, key: str | None) -> Shown:
        """Returns the next of the answers; without any, all that is sent from now on."""
        if self.key is not None and key != f"Bearer {self.key}":
            return Shown(status=401, error={"message": "a key is needed"})
        if not self.answers:
            return Shown(then="end", status=self.status)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def play(self, shown: Shown) -> Iterator[bytes]:
        begun = self.cut
        for pause, frame in shown.frames:
            time.sleep(pause)
            yield frame if isinstance(frame, bytes) else json.dumps(frame).encode() + b"\n"
        if not self.answers:
            yield from self.follow()
        with self.changed:
            while shown.then == "silence" and self.cut == begun:
                self.changed.wait()


def handler_of(host: ViewHost) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            host.asked.append(self.path)
            folder, _, name = self.path.partition("?")[0].removeprefix("/").rpartition("/")
            if (folder, name) == ("v1", "view"):
                self.stream()
            elif not folder and name in host.files:
                self.answer(host.files[name], "application/x-ndjson")
            elif not folder and not name:
                self.answer((FOLDERS["data"] / "harness.html").read_bytes(), TYPES[".html"])
            elif self.path == "/health" and host.engines:
                self.answer(json.dumps({"status": "ready", "engines": host.engines}).encode(), "application/json")
            elif self.path in WHOLE_PAGE:
                self.answer(*WHOLE_PAGE[self.path])
            elif folder in FOLDERS and (path := FOLDERS[folder] / name).is_file():
                self.answer(path.read_bytes(), TYPES[path.suffix])
            else:
                self.send_error(404)

        def answer(self, body: bytes, content_type: str, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(body)))
            self.send_header("content-security-policy", POLICY)
            self.end_headers()
            self.wfile.write(body)

        def stream(self) -> None:
            host.keys.append(self.headers["authorization"])
            shown = host.answer(self.headers["authorization"])
            if shown.status != 200:  # the connection stays open, as servers leave it
                return self.answer(json.dumps({"error": shown.error}).encode(), "application/json", shown.status)
            self.close_connection = True
            self.send_response(200)
            self.send_header("content-type", "application/x-ndjson")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            with suppress(OSError):  # the watcher left
                for part in host.play(shown):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                if shown.then == "end":
                    self.wfile.write(b"0\r\n\r\n")

    return Handler


@contextmanager
def view_host(*answers: Shown, key: str | None = None) -> Iterator[ViewHost]:
    host = ViewHost(answers, key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(host))
    server.daemon_threads = True
    host.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
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
