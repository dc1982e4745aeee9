"""`octavo serve` with more routes, for tests: `python -m tests.support.watched_server [--stand-in] [MODEL] [flags]`.

A real server has GET /watch, open to all, which tells what the API process holds and what the engine last said of itself. A prompt with
BROKEN in it makes the tokenizer fail, and no lag of the event loop stays unseen.

With --stand-in the engine is a `StandInLLM`, and the server is ready at once. POST /slow says as many words as it is asked for, 50 ms
apart, GET /large says 32 MiB at once and GET /endless says something for ever; GET /fail fails, GET /die is the engine's death, GET /spin
computes for half a second in the event loop.
"""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import uvloop
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from octavo import log
from octavo.cli.args import Parser, add_server_flags, server_configs
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.errors import EngineError
from octavo.messages import AddRequest
from octavo.sampling_params import SamplingParams
from octavo.server import app, guard
from octavo.server.body import read_body, takes
from octavo.server.fields import Body
from octavo.server.generation import EventStream
from octavo.server.listen import bind
from octavo.server.run import ApiProcess
from octavo.server.siblings import Siblings, SpawnConfig
from octavo.server.state import Server
from octavo.text.tokenizer import Tokenizer
from tests.support.busy import compute
from tests.support.stand_in_llm import StandInLLM

BROKEN = "the tokenizer breaks here"
TICK_SECONDS = 0.005
LARGE_BYTES = 32 * 2**20


def watching_routes(server: Server) -> APIRouter:
    routes = APIRouter()
    lags: list[float] = []

    async def measure_lag() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(TICK_SECONDS)
            lags.append(time.perf_counter() - start - TICK_SECONDS)

    @routes.get("/watch", include_in_schema=False)
    async def watch() -> dict[str, object]:
        if not hasattr(routes, "measuring"):
            routes.measuring = asyncio.create_task(measure_lag())  # type: ignore[attr-defined]
        stats, seen = server.llm.stats, sorted(lags)
        lags.clear()
        return {
            "engine_pid": server.llm.engine_pid or 0,
            "answers": server.open_requests - 1,  # less this one
            "requests": len(server.llm._outputs._requests),
            "streams": server.llm.num_open,
            "tasks": len(asyncio.all_tasks()),
            "running": stats.running,
            "waiting": stats.waiting,
            "held_blocks": stats.num_blocks - 1 - stats.free_blocks,
            "steps": sum(stats.steps),
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "preemptions": stats.preemptions,
            "cpu_seconds": time.process_time(),
            "lag_ms": 1000 * max(seen, default=0.0),
            "lag_p99_ms": 1000 * seen[int(len(seen) * 0.99)] if seen else 0.0,
        }

    return routes


def break_tokenizer() -> None:
    encode = Tokenizer.encode

    def encode_or_break(self: Tokenizer, text: str, *args: Any, **kwargs: Any) -> list[int]:
        if BROKEN in text:
            raise RuntimeError("the tokenizer broke")
        return encode(self, text, *args, **kwargs)

    Tokenizer.encode = encode_or_break  # type: ignore[method-assign]


class Inner(Body):
    number: int


class Slow(Body):
    words: int
    either: list[int] | dict[str, int] | None = None
    inner: Inner | None = None
    unbounded: float | None = None


def stand_in_routes(server: Server) -> APIRouter:
    routes = APIRouter()

    @routes.post("/slow", openapi_extra=takes(Slow))
    async def slow(request: Request) -> StreamingResponse:
        asked = await read_body(request, Slow, {})
        news = server.llm.generate(AddRequest("", [1], SamplingParams(max_tokens=asked.words)))

        async def pieces() -> AsyncIterator[str]:
            async for deltas in news:
                yield "".join(delta.text for delta in deltas)

        return StreamingResponse(pieces(), media_type="text/plain")

    @routes.get("/large")
    async def large() -> Response:
        return Response("large " * (LARGE_BYTES // 6), media_type="text/plain")

    @routes.get("/endless")
    async def endless() -> EventStream:
        async def events() -> AsyncGenerator[str, None]:
            while True:
                await asyncio.sleep(0.001)
                yield "data: " + "x" * 10_000 + "\n\n"

        return EventStream(events())

    @routes.get("/fail")
    async def fail() -> None:
        raise OSError(2, "no such thing", "/etc/secret/path")

    @routes.get("/spin")
    async def spin() -> None:
        compute(0.5)

    @routes.get("/die")
    async def die() -> None:
        server.llm.on_dead(EngineError("it died"))  # type: ignore[attr-defined]

    return routes


def serve(words: list[str]) -> int:
    app.ROUTERS = (*app.ROUTERS, watching_routes)
    break_tokenizer()
    guard.OPEN = guard.OPEN | {"/watch"}  # type: ignore[misc]
    return main(["serve", *words])


async def serve_stand_in(words: list[str]) -> int:
    parser = Parser(prog="stand-in", allow_abbrev=False)
    add_server_flags(parser)
    _, config = server_configs(parser.parse(words))
    log.setup("INFO", config.log_format)
    app.ROUTERS = (*app.ROUTERS, stand_in_routes)
    server = Server(StandInLLM(pause=0.05), config, config.served_model_name or "stand-in")  # type: ignore[arg-type]
    listener = bind(config.host, config.port)
    process = ApiProcess(server, listener, Siblings(SpawnConfig(EngineConfig(), config, "", ""), listener, server.observer.numbers))
    server.llm.on_dead = process.fail  # type: ignore[attr-defined]
    return await process.run_to_end()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--stand-in"]:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            raise SystemExit(runner.run(serve_stand_in(sys.argv[2:])))
    raise SystemExit(serve(sys.argv[1:]))
