"""One API process from its start to its end: uvicorn on a socket that already listens, the ready line, and the signals.

    first SIGTERM or SIGINT    drain: /health says so, new requests are told to come back, open ones may end (`shutdown_timeout`)
    second                     stop at once
"""

import logging
import signal
import socket
import sys
import time
from functools import partial
from types import FrameType

import uvicorn

from octavo.log import logger
from octavo.server.app import build_app
from octavo.server.listen import url_of
from octavo.server.protocol import BoundedProtocol
from octavo.server.siblings import Siblings
from octavo.server.state import Server

KEEP_ALIVE_SECONDS = 75  # longer than clients and proxies keep an idle connection: they should be the ones to close it
LAST_WORDS_SECONDS = 2  # for answers that were told to end


class ApiProcess(uvicorn.Server):
    """uvicorn calls `handle_exit` with each signal, and `on_tick` ten times a second. The first of several has the others as `siblings`."""

    def __init__(self, server: Server, listener: socket.socket, announces: bool = True, siblings: Siblings | None = None) -> None:
        _route_logs()
        super().__init__(
            uvicorn.Config(
                build_app(server),
                http=partial(BoundedProtocol, read_timeout=server.config.read_timeout),  # type: ignore[arg-type]
                loop="uvloop",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=LAST_WORDS_SECONDS,
            )
        )
        self._server = server
        self._listener = listener
        self._announces = announces
        self._siblings = siblings
        self._stop_at = float("inf")
        self._failed = False

    async def run_to_end(self) -> int:
        """The exit code: 0 after draining, 1 where something was cut off or the engine stayed dead."""
        await self.serve([self._listener])
        return 1 if self._failed or self.force_exit else 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        again = self._server.draining
        if again:
            self.force_exit = self.should_exit = True
        else:
            self._server.draining = True
            self._stop_at = time.monotonic() + self._server.config.shutdown_timeout
            logger.info("%s: open requests have %g seconds to end", signal.Signals(sig).name, self._server.config.shutdown_timeout)
        if self._siblings is not None:
            self._siblings.pass_on(again)

    async def on_tick(self, counter: int) -> bool:
        server, state = self._server, self._server.llm.state
        if self._announces and state == "ready":
            self._announces = False
            print(f"Octavo is ready: {url_of(self._listener)}  model={server.model_name}", file=sys.stderr, flush=True)
        self._failed = state == "dead" or (self._siblings is not None and not self._siblings.check())
        if self._failed or (server.draining and (server.open_requests == 0 or time.monotonic() > self._stop_at)):
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._siblings is not None:
            await self._siblings.ended(0 if self.force_exit else self._server.config.shutdown_timeout + LAST_WORDS_SECONDS)
        if not self.force_exit:
            await self._server.llm.close()  # what is still open ends with an error
        await super().shutdown(sockets)


def _route_logs() -> None:
    """uvicorn's own lines, where they matter, go where ours go."""
    theirs = logging.getLogger("uvicorn")
    theirs.handlers, theirs.propagate = logger.handlers, False
    theirs.setLevel(logging.ERROR)
