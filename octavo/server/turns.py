"""Clients take turns at something that serves one request at a time, so that a busy client does not keep others waiting."""

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
            if turn.cancelled():
                self._leave(client, turn)
            else:  # it came at the same time
                self.release()
            raise
        return True

    def release(self) -> None:
        while self._waiting:
            client, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[client] = queue  # behind the others
            if not turn.done():  # else whoever waited is about to leave
                turn.set_result(None)
                return
        self._taken = False

    def _leave(self, client: str, turn: "asyncio.Future[None]") -> None:
        queue = self._waiting.get(client, deque())
        if turn in queue:
            queue.remove(turn)
        if not queue:
            self._waiting.pop(client, None)
