"""A reader of an `EngineView`: frames cross the wire and become lines as in a server, and `ViewState` reads them."""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from octavo.engine import wire
from octavo.engine.core import EngineCore
from octavo.engine.wire import UpFrame, View
from octavo.inspector.engine_view import EngineView
from octavo.inspector.frames import Pieces, ViewFrame, delta, line
from octavo.inspector.state import ViewState
from octavo.policy.block_pool import NULL_BLOCK, BlockKey
from octavo.policy.request import Sequence
from octavo.policy.scheduler import Scheduler

HEAD = {"kind": "head", "version": 1}
SEQUENCE = ("table", "request", "sample", "samples", "state", "prompt", "tokens", "limit", "computed", "cached", "preemptions")


def told(frame: ViewFrame) -> dict[str, Any]:
    """As a client reads it; ids are their own text."""
    arrived = wire.decode_up(wire.encode(UpFrame(1, 1, View(frame))))
    assert arrived is not None and isinstance(arrived.body, View) and arrived.body.frame == frame
    return json.loads(line(delta(frame, Pieces(None), lambda seq: seq.request)))


def row_of(seq: Sequence) -> list[Any]:
    """What is to be told of a sequence: the fields of SEQUENCE."""
    request = seq.request
    return [
        list(seq.tables[0]), request.request_id, seq.index, request.num_samples, seq.status.value, request.num_prompt, seq.num_tokens,
        seq.limit, seq.num_computed, request.life.cached_tokens, seq.preemptions,
    ]  # fmt: skip


def view_of(core: EngineCore, clock: Callable[[], float] = time.monotonic) -> EngineView:
    """A view of an engine, as in an engine process."""
    view = EngineView(core.scheduler, clock)
    core.traces.append(view)
    return view


class Reader:
    def __init__(self, view: EngineView, name: str, scheduler: Scheduler) -> None:
        self.view, self.name, self.scheduler = view, name, scheduler
        self.state = ViewState()
        self.state.apply({**HEAD, "num_blocks": scheduler.kv.pool.num_blocks})
        self.frames: list[dict[str, Any]] = []
        self.ended: dict[int, tuple[dict[str, Any], str]] = {}  # whoever was told to be gone: as last told, and how it ended
        view.request(name, "full")

    def look(self, sealed_ids: Mapping[BlockKey, list[int]] | None = None) -> int:
        """Everything that is new; how many frames that took. `sealed_ids`: what each key ever stood for, to check every frame by."""
        for count in range(10_000):
            self.view.request(self.name, "delta")
            found = dict(self.view.frames(busy=False))
            assert set(found) <= {self.name}, "nobody else has asked"
            if not found:
                self.view._watchers[self.name].wants = False  # takes its question back, which no client does
                return count
            self.frames.append(told(found[self.name]))
            self.state.apply(self.frames[-1])
            self.ended |= {seq["seq"]: (seq, how) for seq, how in self.state.ended}
            if sealed_ids is not None:
                self._assert_no_lies(self._ids(sealed_ids))
        raise AssertionError("there is no end of it")

    def assert_exact(self, sealed_ids: Mapping[BlockKey, list[int]]) -> None:
        """The state is the engine's. `sealed_ids`: what each key ever stood for."""
        state, scheduler = self.state, self.scheduler
        pool = scheduler.kv.pool
        assert state.ref == pool.ref
        assert state.digests == ["" if key is None else key[1][:8].hex() for key in pool.key_of]
        assert state.sealed == [0 if key is None else 1 + pool.pinned[block] for block, key in enumerate(pool.key_of)]
        live = {seq.seq_id: seq for seq in [*scheduler.running, *scheduler.waiting]}
        assert state.seqs.keys() == live.keys()
        for seq_id, seq in live.items():
            assert [state.seqs[seq_id][name] for name in SEQUENCE] == row_of(seq)
        ids = self._ids(sealed_ids)
        for block in range(pool.num_blocks):
            assert state.tokens[block] == ([f"{token} " for token in ids[block]] if block in ids else None), f"block {block}"

    def _assert_no_lies(self, ids: Mapping[int, list[int]]) -> None:
        """Of blocks in the newest frame less may be told than there is, and nothing else."""
        for block in [entry[0] for entry in self.frames[-1].get("blocks", ())]:
            told = self.state.tokens[block] or []
            assert told == [f"{token} " for token in ids.get(block, ())][: len(told)], f"block {block}"

    def _ids(self, sealed_ids: Mapping[BlockKey, list[int]]) -> dict[int, list[int]]:
        """Of every block that holds something."""
        kv = self.scheduler.kv
        ids = {block: sealed_ids[key] for key, block in kv.pool.index.items()}
        for seq in self.scheduler.running:
            for table, span in zip(seq.tables, kv.spans):
                for index, block in enumerate(table):
                    if block != NULL_BLOCK:
                        filled = list(seq.token_ids[index * span : min((index + 1) * span, seq.num_computed)])
                        ids[block] = max(ids.get(block, []), filled, key=len)  # a sample hears later than its sibling what they share
        return ids
