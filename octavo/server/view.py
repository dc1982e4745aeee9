"""GET /v1/view: what the engine does, as lines of JSON while the client reads (docs/view.md).

    llm.view() ─► ViewHub: the state so far, the last lines ─► each watcher, from where it is

All watchers of this process share one subscription, which lasts as long as there is one. A watcher keeps nothing but its place: a new
one, and one that was left behind by the lines kept, starts from the state. While nobody watches the hub holds nothing.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.responses import Response

from octavo import __version__
from octavo.client.view import ViewState
from octavo.engine.view_frame import SequenceState, ViewFrame
from octavo.errors import UnavailableError
from octavo.log import logger
from octavo.server.events import EventStream
from octavo.server.view_lines import Pieces, delta, line

if TYPE_CHECKING:
    from octavo.server.state import Server

KEPT_LINES = 50  # some seconds
LIFE_SECONDS = 5.0  # without a line after which there is one that says nothing
LOOK_SECONDS = 0.25  # between two looks whether the server was told to stop
BLOCKS_A_LINE = 4096


class ViewHub:
    def __init__(self, server: "Server") -> None:
        self._server = server
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # set, and replaced, with every line
        self._note: dict[str, Any] | None = None  # what is being played, also for those who come later
        self._forget()

    def _forget(self) -> None:
        self._state = ViewState()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._number = 0  # of lines ever made, those of a new engine's head included
        self._offset = 0.0  # of the engine's time from ours

    async def lines(self) -> AsyncGenerator[str, None]:
        """Until the server is told to stop; what has come meanwhile in one piece."""
        self._join()
        try:
            seen, rest = -1, 0  # lines it has been told, blocks it has not been told from here on
            while not self._server.draining and self._task is not None and not self._task.done():
                if not self._number:
                    await self._news(LOOK_SECONDS)
                elif seen < self._number - len(self._lines):
                    seen, rest = self._number, BLOCKS_A_LINE
                    note = [{**self._note, "at": self._state.at}] if self._note else []
                    yield "".join(map(line, (self._state.head, self._full(), *note)))
                elif seen < self._number or rest < len(self._state.ref):
                    text = "".join(list(self._lines)[seen - self._number :] if seen < self._number else [])
                    seen = self._number
                    if rest < len(self._state.ref):
                        text += line({"kind": "delta", "at": self._state.at, "blocks": self._blocks(rest)})
                        rest += BLOCKS_A_LINE
                    yield text
                elif not await self._hears_in_time():
                    yield line({"kind": "delta", "at": self._at()})
            if seen < 0:
                raise UnavailableError("the engine cannot be watched now", retry_after=1)
        finally:
            self._leave()

    def note(self, scene: int, of: int, title: str, text: str) -> None:
        """The caption from here on; scene 0: there is none."""
        note = {"kind": "note", "at": self._at(), "scene": scene, "of": of, "title": title, "text": text}
        self._note = note if scene else None
        if self._number:  # somebody watches
            self._add(line(note))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    # --- one subscription --------------------------------------------------------------------------------------------

    def _join(self) -> None:
        self._watchers += 1
        if self._watchers == 1:
            self._task = asyncio.create_task(self._take_all(self._task))

    def _leave(self) -> None:
        self._watchers -= 1
        if not self._watchers and self._task is not None:
            self._task.cancel()
            self._forget()

    async def _take_all(self, before: "asyncio.Task[None] | None") -> None:
        """`before`: the subscription that is ending."""
        if before is not None:
            await asyncio.wait({before})
        pieces = Pieces(self._server.llm.text_tokenizer)
        try:
            async with aclosing(self._server.llm.view()) as frames:
                async for frame in frames:
                    self._take(frame, pieces)
        except Exception:
            logger.exception("the view ends, the server goes on")
        finally:
            self._wake()

    def _take(self, frame: ViewFrame, pieces: Pieces) -> None:
        if frame.full:
            self._state.apply(self._head(frame))
            self._lines.clear()
        told = delta(frame, pieces, self._name)
        self._state.apply(told)
        self._offset = time.monotonic() - frame.at
        self._add("" if frame.full else line(told))  # what a full one tells, the state tells

    def _add(self, text: str) -> None:
        self._number += 1
        if text:
            self._lines.append(text)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _news(self, seconds: float) -> bool:
        changed = self._changed
        with suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), seconds)
        return changed.is_set()

    async def _hears_in_time(self) -> bool:
        """Waits for a line, or for the end; False where neither came."""
        for _ in range(int(LIFE_SECONDS / LOOK_SECONDS)):
            if await self._news(LOOK_SECONDS) or self._server.draining:
                return True
        return False

    # --- what is told ------------------------------------------------------------------------------------------------

    def _at(self) -> float:
        return round(time.monotonic() - self._offset, 4)

    def _name(self, seq: SequenceState) -> str:
        known = self._state.seqs.get(seq.seq)
        return known["request"] if known else self._server.llm.label(seq.request)

    def _head(self, frame: ViewFrame) -> dict[str, Any]:
        facts = self._server.llm.facts
        return {
            "kind": "head",
            "version": 1,
            "model": self._server.model_name,
            "block_size": facts.limits.block_size,
            "num_blocks": facts.limits.num_blocks,
            "epoch": facts.epoch,
            "started": frame.started,
            "version_of": f"octavo {__version__}",
            "lesson": self._server.config.lesson,
        }

    def _full(self) -> dict[str, Any]:
        """The first blocks of it: a whole pool at once would keep others waiting."""
        state = self._state
        return {
            "kind": "full",
            "at": state.at,
            "blocks": self._blocks(0),
            "seqs": [*(seq for seq, _ in state.ended), *state.seqs.values()],
            "gone": [(seq["seq"], how) for seq, how in state.ended],
            "steps": list(state.steps),
            "events": list(state.events),
            "lost": state.lost,
        }

    def _blocks(self, first: int) -> list[list[Any]]:
        return self._state.blocks(range(first, min(first + BLOCKS_A_LINE, len(self._state.ref))))


def router(server: "Server") -> APIRouter:
    routes = APIRouter()
    if server.config.inspector:

        @routes.get("/v1/view")
        async def view() -> Response:
            if server.state != "ready":
                raise UnavailableError(f"the engine is {server.state}", retry_after=1)
            return EventStream(server.view.lines(), "application/x-ndjson")

    return routes
