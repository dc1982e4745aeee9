"""What the engine does, as lines of JSON for watchers: the data of GET /v1/view and of recordings (docs/view.md).

    llm.view() ─► frames ─► ViewHub: the state so far, the last lines ─► each watcher, from its own place

There is a hub for each engine. All its watchers share one subscription to the engine, which lasts as long as there is a watcher. Each
line is encoded once for all of them. A watcher keeps only its place. A new watcher starts from the state, and so does a slow one whose
next line is no longer kept. Without watchers, the hub holds nothing. Token ids become text here, and requests get the ids of their
answers.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from octavo import __version__
from octavo.errors import UnavailableError
from octavo.inspector.frames import Line, Pieces, SequenceState, ViewFrame, delta, line, rank_lines
from octavo.inspector.state import ViewState
from octavo.inspector.watcher import StepLog
from octavo.log import logger
from octavo.messages import EngineFacts, RankNumbers
from octavo.server_config import ServerConfig
from octavo.text.tokenizer import Tokenizer

MOST_WATCHERS = 64  # in this process, of all engines together: ten lines a second to each of them take a tenth of its time
KEPT_LINES = 50  # some seconds
YOUNG_LINES = KEPT_LINES // 2  # an opening followed by at most this many lines is used again: its reader can still catch up
LIFE_SECONDS = 5.0  # an empty line is sent after this long without updates
RANK_SECONDS = 1.0  # between two lines with the state of ranks
LOOK_SECONDS = 0.25  # how often a waiting watcher checks whether the server must stop
BLOCKS_A_LINE = 4096


@dataclass(slots=True)
class Opening:
    """What a watcher gets first: the state, in parts, because a whole pool at once would keep others waiting.

    A part is made when the first watcher reaches it. Every watcher gets it after the lines that existed by then.
    """

    with_text: bool
    parts: list[tuple[int, bytes]]  # how many lines come before it, and its text


class Engine(Protocol):
    """The part of an engine that the hub reads."""

    @property
    def state(self) -> str: ...

    @property
    def facts(self) -> EngineFacts | None: ...

    @property
    def ranks(self) -> Sequence[RankNumbers]: ...


class Engines(Protocol):
    @property
    def text_tokenizer(self) -> Tokenizer | None: ...

    @property
    def replicas(self) -> Sequence[Engine]: ...

    def view(self, engine: int) -> AsyncGenerator[ViewFrame, None]: ...

    def label(self, request_id: str) -> str: ...


class Watched(Protocol):
    """The part of the server that the hub reads."""

    @property
    def llm(self) -> Engines: ...

    config: ServerConfig
    model_name: str
    draining: bool

    @property
    def views(self) -> Sequence["ViewHub"]: ...


class ViewHub:
    def __init__(self, server: Watched, engine: int) -> None:
        self.watchers = 0
        self._server = server
        self._engine = engine
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # set, and replaced, with every line
        self._note: dict[str, Any] | None = None  # the current caption, also for watchers that connect later
        self._forget()

    def _forget(self) -> None:
        self._state = ViewState()
        self._steps = StepLog()
        self._lines: deque[Line] = deque(maxlen=KEPT_LINES)
        self._number = 0  # number of lines so far, including those of earlier engines
        self._openings: dict[bool, Opening] = {}  # with text, without
        self._trouble: UnavailableError | None = None  # why the engine cannot be watched
        self._offset = 0.0  # our clock minus the engine's

    async def lines(self, with_text: bool) -> AsyncGenerator[bytes, None]:
        """Yields lines until the server must stop, all new ones in one piece."""
        self._join()
        try:
            seen, num_sent = -1, 0  # how many lines, and parts of its opening, this watcher has received
            while not self._server.draining and self._task is not None and not self._task.done():
                if not self._number:
                    await self._news(LOOK_SECONDS)
                elif seen < self._number - len(self._lines):
                    opening = self._opening(with_text)
                    (seen, text), num_sent = opening.parts[0], 1
                    yield text
                elif num_sent < self._num_parts:
                    number, part = self._part(opening, num_sent)
                    text = self._between(seen, number, with_text) + part
                    seen, num_sent = number, num_sent + 1
                    yield text
                elif seen < self._number:
                    text, seen = self._between(seen, self._number, with_text), self._number
                    yield text
                elif not await self._hears_in_time():
                    yield line({"kind": "delta", "at": self._at()})
            if seen < 0:
                raise self._trouble or UnavailableError("the engine cannot be watched at the moment", retry_after=1)
        finally:
            self._leave()

    def note(self, scene: int, of: int, caption: dict[str, object]) -> None:
        """Sets the caption that watchers see from now on; scene 0: none."""
        note = {"kind": "note", "at": self._at(), "scene": scene, "of": of, **caption}
        self._note = note if scene else None
        self._openings.clear()  # a watcher that connects later gets the caption with its opening, not as an update
        if self._number:  # there are watchers
            self._add(Line(note))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    # --- one subscription --------------------------------------------------------------------------------------------

    def _join(self) -> None:
        if sum(hub.watchers for hub in self._server.views) >= MOST_WATCHERS:
            raise UnavailableError(f"{MOST_WATCHERS} clients are watching already, which is the maximum", retry_after=5)
        self.watchers += 1
        if self.watchers == 1:
            self._task = asyncio.create_task(self._take_all(self._task))

    def _leave(self) -> None:
        self.watchers -= 1
        if not self.watchers and self._task is not None:
            self._task.cancel()
            self._forget()

    async def _take_all(self, before: "asyncio.Task[None] | None") -> None:
        """Receives all frames of the engine. `before`: an earlier subscription, which must have ended first."""
        if before is not None:
            await asyncio.wait({before})
        pieces = Pieces(self._server.llm.text_tokenizer)
        ranks = asyncio.create_task(self._tell_ranks())
        try:
            async with aclosing(self._server.llm.view(self._engine)) as frames:
                async for frame in frames:
                    self._take(frame, pieces)
        except UnavailableError as error:
            self._trouble = error
        except Exception:
            logger.exception("the view failed; the server goes on")
        finally:
            ranks.cancel()
            self._wake()

    def _take(self, frame: ViewFrame, pieces: Pieces) -> None:
        if frame.full:
            self._state.apply(self._head(frame))
            self._steps = StepLog()
            self._lines.clear()
        changes = delta(frame, pieces, self._name)
        if frame.full and (ranks := self._ranks()):
            changes["ranks"] = ranks
        self._state.apply(changes)
        for step in frame.steps:
            self._steps.add(step)
        self._offset = time.monotonic() - frame.at
        self._add(None if frame.full else Line(changes))  # a full frame is not kept: watchers get it from the state

    async def _tell_ranks(self) -> None:
        """Sends the state of ranks every second if there are several, even while a long step keeps the engine from sending frames."""
        while True:
            await asyncio.sleep(RANK_SECONDS)
            if self._number and (ranks := self._ranks()):
                changes = {"kind": "delta", "at": self._at(), "ranks": ranks}
                self._state.apply(changes)
                self._add(Line(changes))

    def _ranks(self) -> list[list[float]]:
        """Returns what each rank did last, or nothing while the engine is not ready."""
        engine = self._server.llm.replicas[self._engine]
        found = engine.ranks if engine.state == "ready" else []
        return [[place, one.steps, round(one.share, 3), round(one.age, 1)] for place, one in enumerate(found)]

    def _add(self, line: Line | None) -> None:
        self._number += 1
        if line is not None:
            self._lines.append(line)
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
        """Waits for a line or for the end of the server. Returns False if neither came within LIFE_SECONDS."""
        for _ in range(int(LIFE_SECONDS / LOOK_SECONDS)):
            if await self._news(LOOK_SECONDS) or self._server.draining:
                return True
        return False

    # --- what is sent ------------------------------------------------------------------------------------------------

    def _at(self) -> float:
        return round(time.monotonic() - self._offset, 4)

    def _name(self, seq: SequenceState) -> str:
        known = self._state.seqs.get(seq.seq)
        return known["request"] if known else self._server.llm.label(seq.request)

    def _head(self, frame: ViewFrame) -> dict[str, Any]:
        engines = self._server.llm.replicas
        facts = engines[self._engine].facts
        assert facts is not None
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
            **({"engine": self._engine, "engines": len(engines)} if len(engines) > 1 else {}),
            **({"ranks": rank_lines(facts.ranks)} if facts.ranks else {}),
        }

    def _between(self, seen: int, number: int, with_text: bool) -> bytes:
        """Returns the lines after number `seen`, up to `number`."""
        first = self._number - len(self._lines)
        return b"".join(line.read(with_text) for line in islice(self._lines, seen - first, number - first))

    def _opening(self, with_text: bool) -> Opening:
        """Returns the opening of an earlier watcher if all lines after it are still kept; otherwise a new one."""
        known = self._openings.get(with_text)
        if known is None or known.parts[0][0] < self._number - min(len(self._lines), YOUNG_LINES):
            note = [{**self._note, "at": self._state.at}] if self._note else []
            for each in note:
                each.pop("engine", None)  # a new watcher has chosen its engine itself
            frames = ({**self._state.head, "text": with_text}, self._full(), *note)
            known = Opening(with_text, [(self._number, b"".join(Line(frame).read(with_text) for frame in frames))])
            self._openings[with_text] = known
        return known

    @property
    def _num_parts(self) -> int:
        return max(1, -(-len(self._state.ref) // BLOCKS_A_LINE))

    def _part(self, opening: Opening, index: int) -> tuple[int, bytes]:
        if index == len(opening.parts):
            frame = {"kind": "delta", "at": self._state.at, "blocks": self._blocks(index * BLOCKS_A_LINE)}
            opening.parts.append((self._number, Line(frame).read(opening.with_text)))
        return opening.parts[index]

    def _full(self) -> dict[str, Any]:
        """Returns the state as a full frame, with the first part of its blocks."""
        state = self._state
        return {
            "kind": "full",
            "at": state.at,
            "blocks": self._blocks(0),
            "seqs": [*(seq for seq, _ in state.ended), *state.seqs.values()],
            "gone": [(seq["seq"], how) for seq, how in state.ended],
            "steps": self._steps.rows(state.at),
            "events": list(state.events),
            "lost": state.lost,
            **({"states": state.states} if state.states else {}),
            **({"ranks": state.ranks} if state.ranks else {}),
        }

    def _blocks(self, first: int) -> list[list[Any]]:
        return self._state.blocks(range(first, min(first + BLOCKS_A_LINE, len(self._state.ref))))
