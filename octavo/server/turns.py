"""How the work of many requests shares the event loop, so that no request keeps the others waiting.

    TurnQueue    spreads work over turns of the loop, in order of arrival
    Threads      a small pool of threads for each kind of work that can take long
    unless       ends the work for a client that goes away
"""

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from octavo.child import give_back_freed_memory

Kind = Literal["bodies", "short_texts", "long_texts", "tokenize"]
NUM_THREADS: dict[Kind, int] = {"bodies": 1, "short_texts": 4, "long_texts": 2, "tokenize": 1}
LARGE: frozenset[Kind] = frozenset({"bodies", "long_texts", "tokenize"})
GIVE_BACK_SECONDS = 1.0

Result = TypeVar("Result")


async def unless(gone: Coroutine[Any, Any, None], work: Awaitable[Result]) -> Result:
    """Returns the result of `work`. If `gone` ends first, cancels `work`, and with it its requests, and raises ClientDisconnect."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone)
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def disconnect(receive: Receive) -> None:
    """Waits until the client goes away. Its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Threads:
    """Pools of threads, so that no kind of work keeps another waiting:

        bodies         JSON of large bodies: parsed and checked
        short_texts    conversations of ordinary length, through their template to token ids
        long_texts     long prompts and conversations
        tokenize       /tokenize and /detokenize

    The threads share the interpreter with the event loop (see `run.SWITCH_SECONDS`); the tokenizer's library releases it while it
    works. The JSON parser does not: for 8 MB of numbers, the loop stops for a fifth of a second. So after a body its thread rests for as
    long as the body took, and small requests are served between two bodies.
    Each thread has its own heap, and the C library keeps freed memory there. So a second after large work, at most once a second, free
    memory is returned to the system.
    """

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


# -- turns

MOST_STARTS = 32
MOST_BYTES = 64 * 2**10
SMALL_BYTES = 16 * 2**10  # a body of at most this size does not wait


class TurnQueue:
    """Admits a certain amount of work in each turn of the loop.

        starts    requests that may have a body, before they are checked
        bodies    bytes of bodies that the loop parses. 100 KB, such as 16,000 token ids, take some milliseconds until they are on their
                  way to the engine. Small bodies do not wait behind large ones

    If hundreds of requests arrived together and each was handled at once, one turn of the loop would handle them all, and all other
    clients would wait for seconds.
    """

    def __init__(self, most: int) -> None:
        """`most`: admitted in one turn. The last one admitted may exceed it."""
        self._most = most
        self._admitted = 0  # in this turn
        self._is_due = False  # `_turn` will be called in the next turn
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()  # with the amount of each

    def enter(self, amount: int) -> asyncio.Future[None]:
        """Returns a future that is done when this much can be done: at once, or in a later turn."""
        admitted = asyncio.get_running_loop().create_future()
        self._call_soon()
        if self._waiting or self._admitted >= self._most:
            self._waiting.append((amount, admitted))
        else:
            self._admit(amount, admitted)
        return admitted

    def _admit(self, amount: int, admitted: asyncio.Future[None]) -> None:
        self._admitted += amount
        admitted.set_result(None)

    def _call_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_due, self._admitted = False, 0
        while self._waiting and self._admitted < self._most:
            amount, admitted = self._waiting.popleft()
            if not admitted.done():  # otherwise its request was cancelled
                self._admit(amount, admitted)
        if self._admitted:
            self._call_soon()
