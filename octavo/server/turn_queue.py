"""`TurnQueue`: spreads the work of many requests over turns of the event loop, in order of arrival.

If hundreds of requests arrive together and each is handled as soon as it is there, one turn of the loop handles them all, and all other
clients wait for seconds. A queue admits a certain amount of work in each turn:

    starts    requests that may have a body, before they are checked
    bodies    bytes of bodies that the loop parses. 100 KB, such as 16,000 token ids, take some milliseconds until they are on their way
              to the engine. Small bodies do not wait behind large ones
"""

import asyncio
from collections import deque

MOST_STARTS = 32
MOST_BYTES = 64 * 2**10
SMALL_BYTES = 16 * 2**10  # a body of at most this size does not wait


class TurnQueue:
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
