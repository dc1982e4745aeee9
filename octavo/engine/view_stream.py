"""`ViewStream`: the frames of an engine, for one reader in an API process. Every frame is asked for, at most ten times a second, and
after an engine was started again or a message was lost the next one is a full one."""

import asyncio
from collections.abc import AsyncGenerator

from octavo.engine.link import Link
from octavo.engine.view_frame import ViewFrame, Wanted
from octavo.engine.wire import Watch
from octavo.errors import UnavailableError
from octavo.log import logger

PERIOD_SECONDS = 0.1
MOST_NAMES = 1024
RETRY_SECONDS = 30.0  # an engine that was started again can be watched


class ViewStream:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._wanted: Wanted = "full"
        self._answer: asyncio.Future[ViewFrame | None] | None = None
        self._names: dict[str, str] | None = None  # of requests that ended while somebody reads

    async def frames(self) -> AsyncGenerator[ViewFrame, None]:
        """For ever; leaving the iteration ends the watching. Raises where the engine can tell no more."""
        self._wanted, self._names = "full", {}
        try:
            while True:
                frame = await self._next()
                if frame is not None:
                    yield frame
                await asyncio.sleep(PERIOD_SECONDS)
        finally:
            self._names = None
            self._say("none")

    def remember(self, request_id: str, name: str) -> None:
        """What a request was called that is over here: the frame that tells of its end may be still to come."""
        if self._names is not None and name:
            self._names[request_id] = name
            if len(self._names) > MOST_NAMES:
                del self._names[next(iter(self._names))]

    def name(self, request_id: str) -> str | None:
        return (self._names or {}).get(request_id)

    def push(self, frame: ViewFrame) -> None:
        if self._answer is None or self._answer.done():
            return
        if frame.error:
            self._answer.set_exception(UnavailableError(frame.error, RETRY_SECONDS))
        elif frame.full == (self._wanted == "full"):
            self._wanted = "delta"
            self._answer.set_result(frame)

    def begin_again(self) -> None:
        """What was asked for will not come."""
        self._wanted = "full"
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    async def _next(self) -> ViewFrame | None:
        if not self._say(self._wanted):
            return None  # there may be another engine soon
        self._answer = self._loop.create_future()
        try:
            return await self._answer
        finally:
            self._answer = None

    def _say(self, wanted: Wanted) -> bool:
        try:
            self._link.send(Watch(wanted))
        except UnavailableError:
            logger.debug("the view cannot be asked for: the engine cannot be reached")
            return False
        return True
