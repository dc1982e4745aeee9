"""Puts a server together: the text side here, the engine in a process of its own, HTTP around it; and the same for a sibling."""

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
from octavo.errors import EngineError
from octavo.loading.text_side import TextSide
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
    raise SystemExit(_run(_further(orders, socket.socket(fileno=descriptor))))


async def _first(engine: EngineConfig, config: ServerConfig, listener: socket.socket, text: TextSide) -> int:
    llm = AsyncLLM(engine, _serving(config), lambda error: process.fail(EngineError(f"the engine stayed dead: {error}")), text=text)
    server = Server(llm, config, config.served_model_name or text.source.name)
    found = replace(engine, model=str(text.source.path), revision=None)  # nobody has to look for it again
    orders = Orders(found, config, llm.address, server.model_name)
    process = ApiProcess(server, listener, siblings=Siblings(orders, listener))
    return await process.run_to_end()


async def _further(orders: Orders, listener: socket.socket) -> int:
    llm = AsyncLLM(orders.engine, _serving(orders.server), address=orders.address)
    return await ApiProcess(Server(llm, orders.server, orders.model_name), listener).run_to_end()


def _serving(config: ServerConfig) -> Serving:
    return Serving(max_queue=config.max_queue, queue_timeout=config.queue_timeout, max_restarts=config.max_restarts)


def _run(process: Coroutine[Any, Any, int]) -> int:
    sys.setswitchinterval(SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(process)
