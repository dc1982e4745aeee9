"""A server of `GET /v1/view` to a script: frames with pauses before them, then the end of the stream, of the connection, or silence."""

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal

HEAD: dict[str, Any] = {
    "kind": "head", "version": 1, "model": "m", "block_size": 16, "num_blocks": 41, "epoch": 1, "started": 0.0,
    "version_of": "octavo 0.1.0", "lesson": False,
}  # fmt: skip
EMPTY: dict[str, Any] = {"kind": "full", "at": 0.0, "blocks": [], "seqs": [], "gone": [], "steps": [], "events": [], "lost": 0}


def sequence(number: int, **changed: Any) -> dict[str, Any]:
    told = {
        "seq": number, "request": f"cmpl-{number}", "sample": 0, "state": "running", "prompt": 40, "tokens": 53, "computed": 52,
        "cached": 32, "reason": "differs", "preemptions": 0, "from": 0, "table": [1, 2, 3, 4],
    }  # fmt: skip
    return told | changed


@dataclass
class Shown:
    """The answer to one request."""

    frames: Sequence[tuple[float, Any]] = ()  # seconds before it, and a frame, or bytes as they are
    then: Literal["end", "cut", "silence"] = "silence"
    status: int = 200
    error: dict[str, Any] = field(default_factory=lambda: {"message": "no", "code": "no"})


class ViewServer:
    def __init__(self, *answers: Shown, key: str | None = None, port: int = 0) -> None:
        """The last answer is given again and again."""
        left, self.asked = list(answers), list[str]()
        over, asked = threading.Event(), self.asked

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                asked.append(self.path)
                answer = left.pop(0) if len(left) > 1 else left[0]
                if key is not None and self.headers.get("authorization") != f"Bearer {key}":
                    answer = Shown(status=401, error={"message": "a key is needed"})
                self.close_connection = answer.status == 200  # a refusal leaves it open, as servers do
                if answer.status != 200:
                    body = json.dumps({"error": answer.error}).encode()
                    self.send_response(answer.status)
                    self.send_header("content-length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                    return
                self.send_response(200)
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for pause, frame in answer.frames:
                    time.sleep(pause)
                    line = frame if isinstance(frame, bytes) else json.dumps(frame).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                if answer.then == "silence":
                    over.wait(60)
                elif answer.then == "end":
                    self.wfile.write(b"0\r\n\r\n")

            def log_message(self, format: str, *args: object) -> None:
                """Nobody reads it."""

        self._over = over
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> "ViewServer":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
