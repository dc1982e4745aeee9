"""Threads for work that can take long: a small pool for each kind, so that no kind keeps another waiting.

    bodies         JSON of large bodies: parsed and checked
    short_texts    conversations of ordinary length, through their template to token ids
    long_texts     long prompts and conversations
    tokenize       /tokenize and /detokenize

The interpreter is shared with the event loop (see `run.SWITCH_SECONDS`), the tokenizer's library lets others run.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from starlette.requests import Request

from octavo.server.events import disconnect, unless

Kind = Literal["bodies", "short_texts", "long_texts", "tokenize"]
NUM_THREADS: dict[Kind, int] = {"bodies": 1, "short_texts": 4, "long_texts": 2, "tokenize": 1}

Result = TypeVar("Result")


class Threads:
    def __init__(self) -> None:
        self._pools = {kind: ThreadPoolExecutor(count, f"octavo-{kind}") for kind, count in NUM_THREADS.items()}

    async def run(self, kind: Kind, request: Request, work: Callable[[], Result]) -> Result:
        """`work`, for the client of `request`: when it leaves before its turn comes, nothing is done."""
        task = self._pools[kind].submit(contextvars.copy_context().run, work)
        return await unless(disconnect(request.receive), asyncio.wrap_future(task))

    def close(self) -> None:
        """What has not begun never does; what runs is not waited for here."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
