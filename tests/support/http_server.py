"""The server's app under uvicorn on a free port, in a thread of this process."""

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import httpx2 as httpx
import uvicorn
from starlette.types import ASGIApp

from octavo.server.protocol import BoundedProtocol
from tests.support.engine_process import PATIENCE


class HttpServer:
    def __init__(self, app: ASGIApp, write_timeout: float = 30) -> None:
        protocol = partial(BoundedProtocol, read_timeout=30, write_timeout=write_timeout)
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, loop="uvloop", http=protocol, ws="none", log_level="warning"))  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> "HttpServer":
        self._thread.start()
        wait_for(lambda: self._server.started)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join()

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.http.post(path, json=body)


def wait_for(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happens():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


async def wait_for_async(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happens():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)
