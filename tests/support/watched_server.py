"""`octavo serve` with windows into it: `python -m tests.support.watched_server MODEL [flags]`.

GET /watch, open to all, tells what the API process holds and what the engine last said of itself. A prompt with BROKEN in it makes
the tokenizer fail, and no lag of the event loop stays unseen.
"""

import asyncio
import sys
import time
from typing import Any

from fastapi import APIRouter

from octavo.cli.main import main
from octavo.server import access, app
from octavo.server.state import Server
from octavo.text.tokenizer import Tokenizer

BROKEN = "the tokenizer breaks here"
TICK_SECONDS = 0.005


def router(server: Server) -> APIRouter:
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
            "requests": len(server.llm._outputs._readers),
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


if __name__ == "__main__":
    app.ROUTERS = (*app.ROUTERS, router)
    break_tokenizer()
    access.OPEN = access.OPEN | {"/watch"}  # type: ignore[misc]
    raise SystemExit(main(["serve", *sys.argv[1:]]))
