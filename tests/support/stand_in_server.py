"""A real server process over the stand-in for the engine: `python -m tests.support.stand_in_server [flags of octavo serve]`.

It has some routes more: POST /slow says as many words as it is asked for, 50 ms apart, GET /large says 32 MiB at once and GET /endless says
something for ever; GET /fail fails, GET /die is the engine's death, GET /spin computes for half a second in the event loop.
"""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator

import uvloop
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from octavo import log
from octavo.cli.args import Parser, add_server_flags, server_configs
from octavo.config import EngineConfig
from octavo.engine.async_llm import Ask
from octavo.errors import EngineError
from octavo.sampling_params import SamplingParams
from octavo.server import app
from octavo.server.body import Body, read_body, takes
from octavo.server.events import EventStream
from octavo.server.listen import bind
from octavo.server.run import ApiProcess
from octavo.server.siblings import Orders, Siblings
from octavo.server.state import Server
from tests.support.stand_in_llm import StandInLLM

LARGE_BYTES = 32 * 2**20


class Inner(Body):
    number: int


class Slow(Body):
    words: int
    either: list[int] | dict[str, int] | None = None
    inner: Inner | None = None
    unbounded: float | None = None


def router(server: Server) -> APIRouter:
    routes = APIRouter()

    @routes.post("/slow", openapi_extra=takes(Slow))
    async def slow(request: Request) -> StreamingResponse:
        asked = await read_body(request, Slow, {})
        news = server.llm.generate(Ask(None, [1], SamplingParams(max_tokens=asked.words)))

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
        end = time.thread_time() + 0.5
        while time.thread_time() < end:
            pass

    @routes.get("/die")
    async def die() -> None:
        server.llm.on_dead(EngineError("it died"))  # type: ignore[attr-defined]

    return routes


async def main() -> int:
    parser = Parser(prog="stand-in", allow_abbrev=False)
    add_server_flags(parser)
    _, config = server_configs(parser.parse(sys.argv[1:]))
    log.setup("INFO", config.log_format)
    app.ROUTERS = (*app.ROUTERS, router)
    server = Server(StandInLLM(pause=0.05), config, config.served_model_name or "stand-in")  # type: ignore[arg-type]
    listener = bind(config.host, config.port)
    process = ApiProcess(server, listener, Siblings(Orders(EngineConfig(), config, "", ""), listener, server.observer.numbers))
    server.llm.on_dead = process.fail  # type: ignore[attr-defined]
    return await process.run_to_end()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        raise SystemExit(runner.run(main()))
