"""Runs a server: the tokenizer and HTTP in this process, the engine in another one. Further API processes run the same way.

`ApiProcess` is one of them from its start to its end: uvicorn on a socket that already listens, the ready line, and the signals.

    first SIGTERM or SIGINT    the server drains: /health says so, new requests get 503, open ones have `shutdown_timeout` to end
    second                     it stops at once
"""

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
import uvloop

from octavo import log
from octavo.config import EngineConfig, debug_from_environment, log_level
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.pins import PinRegistry
from octavo.engine.stall_watch import StallWatch
from octavo.engine.supervisor import Serving
from octavo.errors import EngineError, OctavoError
from octavo.inspector.recorder import Recorder
from octavo.loading.text_side import TextSide
from octavo.log import logger
from octavo.server.answer_form import add_tool_template
from octavo.server.app import build_app
from octavo.server.listen import recording_has_text, url_of
from octavo.server.metrics import Numbers, shared_file
from octavo.server.protocol import BoundedProtocol
from octavo.server.records import Observer, open_spans
from octavo.server.siblings import Siblings, SpawnConfig, read_spawn_config
from octavo.server.state import Server
from octavo.server_config import ServerConfig
from octavo.text.prompt import TOOL_TEMPLATE

SWITCH_SECONDS = 0.0005  # how long a thread may keep the event loop waiting
KEEP_ALIVE_SECONDS = 75  # longer than clients and proxies keep an idle connection: they should close it first
NUMBERS = 2**26  # far apart: the numbers of requests that API processes had before they were started again
LAST_WORDS_SECONDS = 2  # answers have so long to end before their connections are reset
NEW_OBJECTS = 20_000  # between two runs of the garbage collector; the 700 of Python are a few requests


def serve(engine: EngineConfig, config: ServerConfig, listener: socket.socket, text: TextSide) -> int:
    """Runs the first API process, which starts the engine and the others. Returns the exit code."""
    return _run(_first(engine, config, listener, text))


def sibling(descriptor: int) -> None:
    """The entry point of a further API process."""
    spawn = read_spawn_config()
    log.setup(log_level("INFO"), spawn.server.log_format)
    try:
        code = _run(_further(spawn, socket.socket(fileno=descriptor)))
    except OctavoError as error:
        log.logger.error("an API process cannot go on: %s", error)
        code = 1
    raise SystemExit(code)


async def _first(engine: EngineConfig, config: ServerConfig, listener: socket.socket, text: TextSide) -> int:
    pins = shared_file() if config.api_processes > 1 else None
    llm = AsyncLLM(
        engine,
        _serving(config),
        lambda error: process.fail(EngineError(f"the engine stayed dead: {error}")),
        text=text,
        pins=PinRegistry(pins),
    )
    try:
        model_name = config.served_model_name or text.source.name
        observer = _observer(config, model_name, shared_file() if config.api_processes > 1 else None)
        server = Server(llm, config, model_name, observer)
        if add_tool_template(server):
            logger.info("The model's chat template has no place for tools: conversations with tools use Octavo's %s", TOOL_TEMPLATE.name)
        server.recorder = None if config.record is None else Recorder(config.record)
        found = replace(engine, model=str(text.source.path), revision=None)  # siblings do not look for the model again
        spawn = SpawnConfig(found, config, llm.address, server.model_name, pins=pins)
        process = ApiProcess(server, listener, siblings=Siblings(spawn, listener, observer.numbers))
        return await process.run_to_end()
    finally:
        await llm.close()  # also if a signal came before the server could handle it


async def _further(spawn: SpawnConfig, listener: socket.socket) -> int:
    serving = _serving(spawn.server, spawn.row + spawn.starts * NUMBERS)
    llm = AsyncLLM(spawn.engine, serving, lambda error: process.fail(error), address=spawn.address, pins=PinRegistry(spawn.pins))
    observer = _observer(spawn.server, spawn.model_name, spawn.shared, spawn.row)
    server = Server(llm, spawn.server, spawn.model_name, observer)
    add_tool_template(server)
    process = ApiProcess(server, listener)
    return await process.run_to_end()


def _observer(config: ServerConfig, model_name: str, shared: int | None, row: int = 0) -> Observer:
    """Returns the observer of this process. Several processes share their metrics in a file that the first one made."""
    return Observer(Numbers(shared, row, config.api_processes), open_spans(model_name))


def _serving(config: ServerConfig, first_number: int = 0) -> Serving:
    """`first_number`: of the requests of this API process, which no other one has"""
    step_seconds = config.lesson_pace if config.lesson else 0.0
    return Serving(
        config.max_queue, config.queue_timeout, config.max_restarts,
        log_format=config.log_format, step_seconds=step_seconds, inspector=config.inspector,
        engines=config.data_parallel_size, routing="first" if config.lesson else config.routing,
        first_number=first_number, number_step=config.api_processes,
    )  # fmt: skip


def _run(process: Coroutine[Any, Any, int]) -> int:
    sys.setswitchinterval(SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(process)


class ApiProcess(uvicorn.Server):
    """One API process. uvicorn calls `handle_exit` with each signal, and `on_tick` ten times a second. Only the first has `siblings`."""

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
        self._replacing: asyncio.Task[None] | None = None

    async def run_to_end(self) -> int:
        """Serves until it is told to stop. Returns 0 after draining, 1 after a second signal. Raises if a process stays dead."""
        starting = asyncio.create_task(self._start())
        if self._siblings is None:
            await starting  # a sibling accepts no connections until it is ready; the first process tells clients to wait
        await self.serve([self._listener])
        starting.cancel()
        if self._failure is not None:
            raise self._failure
        return 1 if self.force_exit else 0

    def fail(self, error: OctavoError) -> None:
        """Ends the server with this error."""
        self._failure, self.should_exit = error, True

    async def _start(self) -> None:
        """Waits for the engine, then begins the recording and prints the ready line. An error ends the server."""
        try:
            await self._server.llm.start()
            gc.freeze()  # what is here stays, and need not be looked at again
            gc.set_threshold(NEW_OBJECTS)
            if milliseconds := debug_from_environment().loop_slow:
                StallWatch("the event loop", milliseconds).start(asyncio.get_running_loop())
            if self._server.recorder is not None:
                self._server.recorder.begin(self._server.views[0], recording_has_text(self._server.config))
            if self._siblings is not None:
                self._say_ready()
        except OctavoError as error:
            self.fail(error)
        except Exception as error:
            logger.exception("the server could not start")
            self.fail(EngineError(f"the server could not start: {type(error).__name__}: {error}"))

    def _say_ready(self) -> None:
        with suppress(OSError):  # the log is closed; clients are served all the same
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
        if self._siblings is not None and server.engines_to_replace and self._replacing is None:
            self._replacing = asyncio.create_task(self._replace_engines())
        if server.draining and (self._is_drained or time.monotonic() > self._stop_at):
            self.should_exit = True
        return await super().on_tick(counter)

    async def _replace_engines(self) -> None:
        """Replaces all engines, as an admin has asked this process or another one."""
        try:
            await self._server.llm.restart(self._server.config.shutdown_timeout)
        except Exception:
            logger.exception("the engines could not be replaced; those that are there go on")
        finally:
            self._server.observer.numbers.restarts_done.add()
            self._replacing = None

    @property
    def _is_drained(self) -> bool:
        return self._server.open_requests == 0 and not any(connection.is_unread for connection in self._connections)

    @property
    def _connections(self) -> list[BoundedProtocol]:
        return [connection for connection in self.server_state.connections if isinstance(connection, BoundedProtocol)]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._siblings is not None:
            await self._siblings.ended(0 if self.force_exit else self._server.config.shutdown_timeout + LAST_WORDS_SECONDS)
        if self._replacing is not None:
            self._replacing.cancel()
        await self._server.llm.close()  # open requests end with an error, and the engine ends
        asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self._cut_off)
        await super().shutdown(sockets)
        await self._server.close()

    def _cut_off(self) -> None:
        """Resets all connections: uvicorn would wait for ever for clients that do not read."""
        for connection in self._connections:
            connection.cut_off()


def _route_logs() -> None:
    """Sends uvicorn's errors to our log."""
    theirs = logging.getLogger("uvicorn")
    theirs.handlers, theirs.propagate = logger.handlers, False
    theirs.setLevel(logging.ERROR)
