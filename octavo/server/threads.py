"""Threads for work that can take long: a small pool for each kind, so that no kind keeps another waiting.

    bodies         JSON of large bodies: parsed and checked
    short_texts    conversations of ordinary length, through their template to token ids
    long_texts     long prompts and conversations
    tokenize       /tokenize and /detokenize

The threads share the interpreter with the event loop (see `run.SWITCH_SECONDS`); the tokenizer's library releases it while it works.
The JSON parser does not: for 8 MB of numbers, the loop stops for a fifth of a second. So after a body its thread rests for as long as
the body took, and small requests are served between two bodies.
Each thread has its own heap, and the C library keeps freed memory there. So a second after large work, at most once a second, free
memory is returned to the system.
"""

import asyncio
import contextvars
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, TypeVar

from starlette.requests import Request

from octavo.child import give_back_freed_memory
from octavo.server.events import disconnect, unless

Kind = Literal["bodies", "short_texts", "long_texts", "tokenize"]
NUM_THREADS: dict[Kind, int] = {"bodies": 1, "short_texts": 4, "long_texts": 2, "tokenize": 1}
LARGE: frozenset[Kind] = frozenset({"bodies", "long_texts", "tokenize"})
GIVE_BACK_SECONDS = 1.0

Result = TypeVar("Result")


class Threads:
    def __init__(self) -> None:
        self._pools = {kind: ThreadPoolExecutor(count, f"octavo-{kind}") for kind, count in NUM_THREADS.items()}
        self._give_back: asyncio.TimerHandle | None = None
        self._rests_until = 0.0  # by the monotonic clock

    async def run(self, kind: Kind, request: Request, work: Callable[[], Result]) -> Result:
        """Returns the result of `work`. If the client of `request` leaves before its turn comes, `work` is not done."""
        paced = partial(self._with_rests, work) if kind == "bodies" else work
        task = self._pools[kind].submit(contextvars.copy_context().run, paced)
        try:
            return await unless(disconnect(request.receive), asyncio.wrap_future(task))
        finally:
            if kind in LARGE:
                self._give_back_soon()

    def _with_rests(self, work: Callable[[], Result]) -> Result:
        """Runs work after a rest as long as the previous work, counted from its end. There is one thread of this kind."""
        time.sleep(max(0.0, self._rests_until - time.monotonic()))
        start = time.monotonic()
        try:
            return work()
        finally:
            end = time.monotonic()
            self._rests_until = end + (end - start)

    def _give_back_soon(self) -> None:
        if self._give_back is None:
            self._give_back = asyncio.get_running_loop().call_later(GIVE_BACK_SECONDS, self._give_back_now)

    def _give_back_now(self) -> None:
        self._give_back = None
        self._pools["bodies"].submit(give_back_freed_memory)

    def close(self) -> None:
        """Drops work that has not begun, and does not wait for work that runs."""
        if self._give_back is not None:
            self._give_back.cancel()
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
