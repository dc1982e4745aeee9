"""`ViewState` is the view of an engine that frames have built up so far (docs/view.md). Frames come from a server or a recording."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

MOST_STEPS = 600
MOST_EVENTS = 2048
MOST_ENDED = 32


class ViewState:
    def __init__(self) -> None:
        self.head: dict[str, Any] = {}
        self.note: dict[str, Any] | None = None
        self._forget(0)

    def _forget(self, num_blocks: int) -> None:
        self.at = 0.0
        self.ref = [0] * num_blocks
        self.sealed = [0] * num_blocks
        self.digests = [""] * num_blocks
        self.tokens: list[list[str] | None] = [None] * num_blocks  # None: not known yet
        self.since: list[float | None] = [None] * num_blocks
        self.seqs: dict[int, dict[str, Any]] = {}
        self.ended: deque[tuple[dict[str, Any], str]] = deque(maxlen=MOST_ENDED)  # a sequence's last state, how it ended
        self.steps: deque[list[Any]] = deque(maxlen=MOST_STEPS)
        self.events: deque[list[Any]] = deque(maxlen=MOST_EVENTS)
        self.lost = 0
        self.states: list[int] = []  # state slots of a recurrent model: all, live, checkpoints, pinned checkpoints
        self.ranks: list[list[Any]] = []  # what each rank did last, where there are several

    def apply(self, frame: Mapping[str, Any]) -> None:
        """Changes the state as the frame says."""
        kind = frame["kind"]
        if kind == "head":
            self.head, self.note = dict(frame), None
        if kind in ("head", "full"):
            self._forget(self.head["num_blocks"])
        if kind in ("full", "delta"):
            self._change(frame)
        elif kind == "note":
            self.at, self.note = frame["at"], dict(frame) if frame["scene"] else None

    def _change(self, frame: Mapping[str, Any]) -> None:
        self.at = frame["at"]
        for block, ref, sealed, digest, tokens, since in frame.get("blocks", ()):
            self.ref[block], self.sealed[block], self.digests[block] = ref, sealed, digest
            if not (ref or sealed):
                self.tokens[block], self.since[block] = None, None
                continue
            if tokens is not None:
                self.tokens[block] = tokens
            if since is not None:
                self.since[block] = since
        for seq in frame.get("seqs", ()):
            before = self.seqs.get(seq["seq"], {"table": []})
            self.seqs[seq["seq"]] = {**seq, "from": 0, "table": before["table"][: seq["from"]] + seq["table"]}
        for seq_id, how in frame.get("gone", ()):
            if (last := self.seqs.pop(seq_id, None)) is not None:
                self.ended.append((last, how))
        self.steps.extend(frame.get("steps", ()))
        self.events.extend(frame.get("events", ()))
        self.lost += frame.get("lost", 0)
        if "states" in frame:
            slots, live, kept, pinned = map(int, frame["states"])
            self.states = [slots, live, kept, pinned]
        self.ranks = frame.get("ranks", self.ranks)

    def blocks(self, numbers: Iterable[int]) -> list[list[Any]]:
        """Returns these blocks in the form they have in a frame, without free ones."""
        return [
            [block, self.ref[block], self.sealed[block], self.digests[block], self.tokens[block], self.since[block]]
            for block in numbers
            if self.ref[block] or self.sealed[block]
        ]
