"""Puts a server together: the tokenizer and HTTP in this process, the engine in another; and the same for further API processes."""

import asyncio
import socket
import sys
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import uvloop

from octavo import log
from octavo.config import EngineConfig, log_level
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.supervisor import Serving
from octavo.errors import EngineError, OctavoError
from octavo.loading.text_side import TextSide
from octavo.server.metrics import Numbers, shared_file
from octavo.server.observer import Observer
from octavo.server.recorder import Recorder
from octavo.server.records import open_spans
from octavo.server.run import ApiProcess
from octavo.server.siblings import Orders, Siblings, take_orders
from octavo.server.state import Server
from octavo.server_config import ServerConfig

SWITCH_SECONDS = 0.0005  # how long a thread that tokenises may keep the event loop waiting


def serve(engine: EngineConfig, config: ServerConfig, listener: socket.socket, text: TextSide) -> int:
    """The exit code."""
    return _run(_first(engine, config, listener, text))


def sibling(descriptor: int) -> None:
    """Where a further API process begins."""
    orders = take_orders()
    log.setup(log_level("INFO"), orders.server.log_format)
    try:
        code = _run(_further(orders, socket.socket(fileno=descriptor)))
    except OctavoError as error:
        log.logger.error("an API process cannot go on: %s", error)
        code = 1
    raise SystemExit(code)


async def _first(engine: EngineConfig, config: ServerConfig, listener: socket.socket, text: TextSide) -> int:
    llm = AsyncLLM(engine, _serving(config), lambda error: process.fail(EngineError(f"the engine stayed dead: {error}")), text=text)
    try:
        model_name = config.served_model_name or text.source.name
        observer = _observer(config, model_name, shared_file() if config.api_processes > 1 else None)
        server = Server(llm, config, model_name, observer)
        server.recorder = None if config.record is None else Recorder(config.record)
        found = replace(engine, model=str(text.source.path), revision=None)  # nobody has to look for it again
        orders = Orders(found, config, llm.address, server.model_name)
        process = ApiProcess(server, listener, siblings=Siblings(orders, listener, observer.numbers))
        return await process.run_to_end()
    finally:
        await llm.close()  # also where a signal came before there was anybody to hear it


async def _further(orders: Orders, listener: socket.socket) -> int:
    llm = AsyncLLM(orders.engine, _serving(orders.server), lambda error: process.fail(error), address=orders.address)
    observer = _observer(orders.server, orders.model_name, orders.shared, orders.row)
    process = ApiProcess(Server(llm, orders.server, orders.model_name, observer), listener)
    return await process.run_to_end()


def _observer(config: ServerConfig, model_name: str, shared: int | None, row: int = 0) -> Observer:
    """Several processes share their numbers, in a file that the first one made."""
    return Observer(Numbers(shared, row, config.api_processes), open_spans(model_name))


def _serving(config: ServerConfig) -> Serving:
    step_seconds = config.lesson_pace if config.lesson else 0.0
    return Serving(
        config.max_queue, config.queue_timeout, config.max_restarts,
        log_format=config.log_format, step_seconds=step_seconds, inspector=config.inspector,
    )  # fmt: skip


def _run(process: Coroutine[Any, Any, int]) -> int:
    sys.setswitchinterval(SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(process)
