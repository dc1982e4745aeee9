"""One API process from its start to its end: uvicorn on a socket that already listens, the ready line, and the signals.

    first SIGTERM or SIGINT    drain: /health says so, new requests are told to come back, open ones may end (`shutdown_timeout`)
    second                     stop at once
"""

import asyncio
import logging
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from types import FrameType

import uvicorn

from octavo.config import debug_from_environment
from octavo.engine.stall_watch import StallWatch
from octavo.errors import EngineError, OctavoError
from octavo.log import logger
from octavo.server.app import build_app
from octavo.server.listen import url_of
from octavo.server.privacy import recording_has_text
from octavo.server.protocol import BoundedProtocol
from octavo.server.siblings import Siblings
from octavo.server.state import Server

KEEP_ALIVE_SECONDS = 75  # longer than clients and proxies keep an idle connection: they should be the ones to close it
LAST_WORDS_SECONDS = 2  # for answers that were told to end, before their connections are cut off


class ApiProcess(uvicorn.Server):
    """uvicorn calls `handle_exit` with each signal, and `on_tick` ten times a second. The first one has the others as `siblings`."""

    def __init__(self, server: Server, listener: socket.socket, siblings: Siblings | None = None) -> None:
        _route_logs()
        super().__init__(
            uvicorn.Config(
                build_app(server),
                http=partial(  # type: ignore[arg-type]
                    BoundedProtocol, read_timeout=server.config.read_timeout, write_timeout=server.config.write_timeout
                ),
                loop="uvloop",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=2 * LAST_WORDS_SECONDS,
            )
        )
        self._server = server
        self._listener = listener
        self._siblings = siblings
        self._stop_at = float("inf")
        self._failure: OctavoError | None = None

    async def run_to_end(self) -> int:
        """The exit code: 0 after draining, 1 where a second signal cut it short. Raises what the engine or a sibling stayed dead of."""
        starting = asyncio.create_task(self._start())
        if self._siblings is None:
            await starting  # who is first tells clients to wait; here they would come for nothing
        await self.serve([self._listener])
        starting.cancel()
        if self._failure is not None:
            raise self._failure
        return 1 if self.force_exit else 0

    def fail(self, error: OctavoError) -> None:
        """There will be no engine any more."""
        self._failure, self.should_exit = error, True

    async def _start(self) -> None:
        """Whatever keeps it from starting ends the server: nobody else would see it."""
        try:
            await self._server.llm.start()
            if milliseconds := debug_from_environment().loop_slow:
                StallWatch("the event loop", milliseconds).start(asyncio.get_running_loop())
            if self._server.recorder is not None:
                self._server.recorder.begin(self._server.view, recording_has_text(self._server.config))
            if self._siblings is not None:
                self._say_ready()
        except OctavoError as error:
            self.fail(error)
        except Exception as error:
            logger.exception("the server could not start")
            self.fail(EngineError(f"the server could not start: {type(error).__name__}: {error}"))

    def _say_ready(self) -> None:
        with suppress(OSError):  # nobody reads the log: clients are served all the same
            print(f"Octavo is ready: {url_of(self._listener)}  model={self._server.model_name}", file=sys.stderr, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        again = self._server.draining
        if again:
            self.force_exit = self.should_exit = True
        else:
            self._server.draining = True
            self._stop_at = time.monotonic() + self._server.config.shutdown_timeout
            seconds = self._server.config.shutdown_timeout
            logger.info("%s: draining, open requests have %g seconds to finish", signal.Signals(sig).name, seconds)
        if self._siblings is not None:
            self._siblings.pass_on(again)

    async def on_tick(self, counter: int) -> bool:
        server = self._server
        server.observer.tick()
        if self._siblings is not None and not self._siblings.check():
            self.fail(EngineError("an API process died more often than --max-restarts allows"))
        if server.draining and (self._is_drained or time.monotonic() > self._stop_at):
            self.should_exit = True
        return await super().on_tick(counter)

    @property
    def _is_drained(self) -> bool:
        return self._server.open_requests == 0 and not any(connection.is_unread for connection in self._connections)

    @property
    def _connections(self) -> list[BoundedProtocol]:
        return [connection for connection in self.server_state.connections if isinstance(connection, BoundedProtocol)]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._siblings is not None:
            await self._siblings.ended(0 if self.force_exit else self._server.config.shutdown_timeout + LAST_WORDS_SECONDS)
        await self._server.llm.close()  # what is still open ends with an error, and the engine ends
        asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self._cut_off)
        await super().shutdown(sockets)
        await self._server.close()

    def _cut_off(self) -> None:
        """Clients that do not read would be waited for without end."""
        for connection in self._connections:
            connection.cut_off()


def _route_logs() -> None:
    """uvicorn's own lines, where they matter, go where ours go."""
    theirs = logging.getLogger("uvicorn")
    theirs.handlers, theirs.propagate = logger.handlers, False
    theirs.setLevel(logging.ERROR)
