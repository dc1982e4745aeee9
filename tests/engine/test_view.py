"""The view of an engine: whatever happens in it and whoever looks when, a reader of the frames sees the pool and the sequences as they are."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from octavo.engine import view as view_module
from octavo.engine import watcher
from octavo.engine.trace import NoTrace
from octavo.engine.view import EngineView
from octavo.policy.block_pool import Event
from tests.policy.machine_settings import machine_settings
from tests.policy.test_engine_machine import EngineMachine
from tests.support.fake import FakeEngine, sampling
from tests.support.watching import Reader

NAMES = st.sampled_from(["early", "late"])


class WatchedMachine(EngineMachine):
    """Watchers come, look as they like, and leave, beside all that can happen to an engine."""

    one_frame_is_enough = True

    @invariant()
    def begin(self) -> None:
        if not hasattr(self, "engine") or hasattr(self, "readers"):
            return
        self.readers: dict[str, Reader] = {}
        self.sealed_ids: dict[bytes, list[int]] = {}
        self._checks, self.engine.pool.on_event = self.engine.pool.on_event, self._on_event
        self.view = EngineView(self.engine.core)

    def _on_event(self, event: Event, block: int, digest: bytes | None) -> None:
        self._checks(event, block, digest)
        if event == "seal":
            assert digest is not None
            seq = next(seq for seq in self.engine.scheduler.running if block in seq.table)
            start, size = seq.table.index(block) * self.engine.kv.block_size, self.engine.kv.block_size
            self.sealed_ids[digest] = list(seq.token_ids[start : start + size])

    @rule(name=NAMES)
    def join(self, name: str) -> None:
        self.readers[name] = Reader(self.view, name, self.engine.scheduler)
        self._look(name)

    @rule(name=NAMES)
    def look(self, name: str) -> None:
        if name in self.readers:
            self._look(name)

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        if self.readers.pop(name, None) is not None:
            self.view.ask(name, "none")
        if not self.readers:
            assert self.engine.pool.on_event == self._on_event and isinstance(self.engine.core.trace, NoTrace)

    def _look(self, name: str) -> None:
        for other in self.readers.values():
            if other.name != name:
                self.view._watchers[other.name].wants = False
        self.view.ask(name, "delta")
        count = self.readers[name].look()
        assert count <= 1 or not self.one_frame_is_enough
        self.readers[name].assert_exact(self.sealed_ids)

    def teardown(self) -> None:
        super().teardown()
        for name in getattr(self, "readers", ()):
            self._look(name)
            assert not self.readers[name].state.seqs


class CrampedMachine(WatchedMachine):
    one_frame_is_enough = False


def test_a_reader_sees_the_engine_as_it_is() -> None:
    run_state_machine_as_test(WatchedMachine, settings=machine_settings(80, 30))


def test_and_so_it_does_when_frames_are_small_and_rings_lose_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in {"MOST_STEPS": 2, "MOST_EVENTS": 1, "BLOCKS_A_FRAME": 3, "TOKENS_A_FRAME": 2}.items():
        monkeypatch.setattr(watcher, name, most)
    run_state_machine_as_test(CrampedMachine, settings=machine_settings(40, 30))
