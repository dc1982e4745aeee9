"""Turns at something that serves one at a time: they go round the clients, so that one with much to do keeps nobody else from theirs."""

import asyncio
from collections import OrderedDict, deque


class Turns:
    def __init__(self, most_waiting: int) -> None:
        """`most_waiting`: of one client."""
        self._most_waiting = most_waiting
        self._taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by client, the next one first

    async def take(self, client: str) -> bool:
        """Waits for a turn; whoever got one calls `release`. False, at once, where too many of this client wait already."""
        if not self._taken:
            self._taken = True
            return True
        queue = self._waiting.setdefault(client, deque())
        if len(queue) >= self._most_waiting:
            return False
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            self._leave(client, turn)
            raise
        return True

    def release(self) -> None:
        if not self._waiting:
            self._taken = False
            return
        client, queue = self._waiting.popitem(last=False)
        queue.popleft().set_result(None)
        if queue:
            self._waiting[client] = queue  # behind the others

    def _leave(self, client: str, turn: "asyncio.Future[None]") -> None:
        if not turn.cancelled():  # it came at the same time
            self.release()
            return
        queue = self._waiting[client]
        queue.remove(turn)
        if not queue:
            del self._waiting[client]
