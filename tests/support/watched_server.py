"""`octavo serve` with one route more, GET /watch, open to all: what the server holds at this moment.

python -m tests.support.watched_server MODEL [flags of octavo serve]
"""

import sys

from fastapi import APIRouter

from octavo.cli.main import main
from octavo.server import app, guard, keys
from octavo.server.state import Server


def router(server: Server) -> APIRouter:
    routes = APIRouter()

    @routes.get("/watch", include_in_schema=False)
    async def watch() -> dict[str, int]:
        llm = server.llm
        stats = llm.stats
        return {
            "running": stats.running,
            "waiting": stats.waiting,
            "held_blocks": stats.num_blocks - 1 - stats.free_blocks,
            "streams": llm.num_open,
            "requests": len(llm._processor._requests),
            "answers": server.open_requests - 1,  # this one is open, too
            "engine_pid": llm.engine_pid or 0,
        }

    return routes


if __name__ == "__main__":
    app.ROUTERS = (*app.ROUTERS, router)
    keys.OPEN = guard.OPEN = keys.OPEN | {"/watch"}  # type: ignore[misc]
    raise SystemExit(main(["serve", *sys.argv[1:]]))
