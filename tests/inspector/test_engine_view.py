"""The view of an engine: whatever happens in it and whoever looks when, a reader of frames sees pool and sequences as they are."""

import asyncio
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from octavo.errors import UnavailableError
from octavo.inspector import state as client_view
from octavo.inspector import watcher
from octavo.inspector.engine_view import FAILED
from octavo.inspector.frames import ViewFrame, ViewStream, without_text
from octavo.inspector.watcher import StepLog
from octavo.messages import Beams, Ending
from octavo.policy.block_pool import BlockKey, Event
from octavo.policy.request import Sequence
from tests.policy.machine_settings import machine_settings
from tests.policy.test_engine_machine import EngineMachine
from tests.support.fake import VOCAB, FakeEngine, sampling
from tests.support.watching import SEQUENCE, Reader, row_of, view_of

NAMES = st.sampled_from(["early", "late"])


class WatchedMachine(EngineMachine):
    """Watchers come, look as they like, and leave, beside all that can happen to an engine."""

    one_frame_is_enough = True
    no_end_is_lost = True

    @invariant()
    def look_always(self) -> None:
        if not hasattr(self, "engine"):
            return
        if not hasattr(self, "readers"):
            self._begin()
        self._look("always")

    def _begin(self) -> None:
        self.readers: dict[str, Reader] = {}
        self.sealed_ids: dict[BlockKey, list[int]] = {}
        self._checks, self.engine.pool.on_event = self.engine.pool.on_event, self._on_event
        self.ends: dict[int, tuple[list[Any], str, list[str]]] = {}  # how each sequence was before it left, and its sealed blocks
        self._let_go, self.engine.scheduler._remove = self.engine.scheduler._remove, self._remove  # type: ignore[method-assign]
        self.engine.scheduler.beams._remove = self._remove
        self.joined: dict[str, set[int]] = {"always": set()}  # whose ends a reader could not see
        self.view = view_of(self.engine.core)
        self.readers["always"] = Reader(self.view, "always", self.engine.scheduler)

    def _remove(self, seq: Sequence, reason: Ending) -> None:
        full = seq.num_sealed // self.engine.kv.groups[0].links  # a sequence that was cut may have a sealed block behind these
        keys = [self.engine.pool.key_of[block] if at < full else None for at, block in enumerate(seq.tables[0])]
        self.ends[seq.seq_id] = row_of(seq), reason, ["" if key is None else key[1][:8].hex() for key in keys]
        self._let_go(seq, reason)

    def _on_event(self, event: Event, block: int, key: BlockKey | None) -> None:
        self._checks(event, block, key)
        if event == "seal":
            assert key is not None
            seq = next(seq for seq in self.engine.scheduler.running if block in seq.tables[key[0]])
            span = self.engine.kv.spans[key[0]]
            start = seq.tables[key[0]].index(block) * span
            self.sealed_ids[key] = list(seq.token_ids[start : start + span])

    @rule(name=NAMES)
    def join(self, name: str) -> None:
        self.readers[name] = Reader(self.view, name, self.engine.scheduler)
        self.joined[name] = set(self.ends)
        self._look(name)

    @rule(name=NAMES)
    def look(self, name: str) -> None:
        if name in self.readers:
            self._look(name)

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        if self.readers.pop(name, None) is not None:
            self.view.request(name, "none")

    def _look(self, name: str) -> None:
        count = self.readers[name].look(self.sealed_ids)
        assert count <= 1 or not self.one_frame_is_enough
        self.readers[name].assert_exact(self.sealed_ids)
        self._check_ends(self.readers[name], self.ends.keys() - self.joined[name])

    def _check_ends(self, reader: Reader, wanted: set[int]) -> None:
        """Whoever ended since it came is told as it was, however short it was there."""
        assert reader.ended.keys() == wanted if self.no_end_is_lost else reader.ended.keys() <= wanted
        for seq_id, (told, how) in reader.ended.items():
            row, reason, sealed = self.ends[seq_id]
            assert how == reason
            if self.no_end_is_lost or "digests" in told:
                assert [told[name] for name in SEQUENCE] == row
                known = told["digests"] + [""] * (len(sealed) - len(told["digests"]))
                assert all(digest in ("", mine) for digest, mine in zip(sealed, known, strict=True))

    def teardown(self) -> None:
        super().teardown()
        for name in getattr(self, "readers", ()):
            self._look(name)
            assert not self.readers[name].state.seqs


class CrampedMachine(WatchedMachine):
    one_frame_is_enough = False
    no_end_is_lost = False


@pytest.fixture(autouse=True)
def readers_remember_all_who_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_view, "MOST_ENDED", None)


# promise: every-sequence-seen
def test_a_reader_sees_the_engine_as_it_is() -> None:
    run_state_machine_as_test(WatchedMachine, settings=machine_settings(80, 30))


def test_and_so_it_does_when_frames_are_small_and_rings_lose_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"MOST_STEPS": 2, "MOST_EVENTS": 1, "MOST_ENDED": 3, "ENDED_ENTRIES": 9, "BLOCKS_A_FRAME": 3, "TOKENS_A_FRAME": 2}
    for name, most in sizes.items():
        monkeypatch.setattr(watcher, name, most)
    run_state_machine_as_test(CrampedMachine, settings=machine_settings(40, 30))


def watched(**settings: Any) -> tuple[FakeEngine, Reader]:
    engine = FakeEngine(**settings)
    return engine, Reader(view_of(engine.core), "w", engine.scheduler)


def test_states_are_counted_and_a_sequence_says_after_which_tokens_they_are_kept() -> None:
    engine = FakeEngine(block_size=16, num_blocks=400, rows=4, budget=512, max_len=4000, states=40, check=False)
    reader = Reader(view_of(engine.core), "always", engine.scheduler)
    reader.look()
    assert reader.state.states == [48, 0, 0, 0] and reader.frames[0]["states"] == [48, 0, 0, 0]
    prompt = [(7 * i + i * i // 3) % VOCAB for i in range(900)]
    engine.pin("pin", prompt[:400])
    engine.run()
    engine.add("one", prompt, sampling(40), checkpoints=[700])
    for _ in range(4):
        engine.step()
        reader.look()
    (seq,) = reader.state.seqs.values()
    assert seq["checkpoints"] == [256, 384, 400, 512, 688, 768, 896]
    slots, live, kept, pinned = reader.state.states
    assert (slots, live, pinned) == (48, 2, 1) and kept == len(seq["checkpoints"]) - pinned
    engine.run()
    reader.look()
    last, _ = reader.ended[seq["seq"]]
    assert last["checkpoints"] == [*seq["checkpoints"], 928]
    plain = FakeEngine()
    plain.add("one", prompt[:20])
    reader = Reader(view_of(plain.core), "always", plain.scheduler)
    reader.look()
    assert "states" not in reader.frames[0] and all("checkpoints" not in seq for seq in reader.state.seqs.values())


def test_beams_are_samples_that_part_and_lose() -> None:
    engine, reader = watched(num_blocks=60, block_size=4, rows=4)
    engine.add("a", list(range(13)), sampling(12, n=2), beams=Beams(4))
    engine.run()
    reader.look()
    events = [event[2:] for frame in reader.frames for event in frame.get("events", [])]
    hows = [how for _, how in reader.ended.values()]
    forks = [event for event in events if event[0] == "fork"]
    assert hows.count("length") == 4 and len(forks) == 3 + hows.count("lost") > 3
    assert {child for _, _, child in forks} <= reader.ended.keys() and any(event[0] == "copy" for event in events)
    assert {(seq["sample"], seq["samples"]) for seq, _ in reader.ended.values()} == {(index, 4) for index in range(4)}


def test_what_happens_is_told_in_order_and_the_figures_add_up() -> None:
    engine, reader = watched(num_blocks=14, block_size=4, rows=4)
    engine.add("a", list(range(13)), sampling(4))
    engine.run()
    engine.add("b", list(range(12)) + [40], sampling(2))  # begins with blocks of the first
    engine.add("c", list(range(20, 26)), sampling(3, n=2, seed=1))  # two samples, from within a block on
    engine.run()
    engine.add("d", list(range(30, 50)), sampling(20))  # these two do not fit together
    engine.add("e", list(range(29, 5, -1)), sampling(20))
    engine.run()
    reader.look()
    events = list(reader.state.events)
    kinds = [event[2] for event in events]
    _, b, c, c1, _, e = range(6)
    assert [event[3] for event in events if event[2] == "admit"][:5] == [0, 1, 2, 4, 5]
    assert [event[3:] for event in events if event[2] == "hit"][:1] == [[b, 12, "end"]]
    assert [event[3:] for event in events if event[2] == "fork"] == [[c, c1]]
    copies = [event[3:] for event in events if event[2] == "copy"]
    assert len(copies) == engine.copies == 1 and copies[0][2] in (c, c1)
    assert [event[3] for event in events if event[2] == "preempt"] == [e] * engine.scheduler.stats.preemptions != []
    assert kinds.count("evict") == engine.pool.counts.evicted > 0
    assert [event[:2] for event in events] == sorted(event[:2] for event in events)
    steps, stats = list(reader.state.steps), engine.scheduler.stats
    assert [step[0] for step in steps] == list(range(1, engine.scheduler.step + 1))
    assert sum(step[3] + step[4] for step in steps) == stats.step_tokens
    assert sum(step[9] for step in steps) == stats.preemptions
    assert (sum(step[10] for step in steps), sum(step[11] for step in steps)) == (stats.prefix_hits, stats.prefix_queries)
    assert steps[-1][6:9] == [0, 0, 0] and max(step[5] for step in steps) == 3 and all(step[2] >= 0 for step in steps)


def test_the_end_of_a_prompt_is_told_while_it_waits_and_to_those_alone_who_read_text() -> None:
    engine, reader = watched(end_ids=(), rows=1)
    engine.add("runs", [1, 2, 3], sampling(9))
    engine.step()
    engine.add("waits", [number % VOCAB for number in range(70)], sampling(9))
    reader.look()
    told = {seq["request"]: seq.get("asked") for frame in reader.frames for seq in frame["seqs"]}
    assert told == {"runs": None, "waits": [f"{number % VOCAB} " for number in range(6, 70)]}
    assert all("asked" not in seq for frame in reader.frames for seq in without_text(frame)["seqs"])


def test_how_a_sequence_ended_is_told() -> None:
    engine, reader = watched(end_ids=(), rows=8)
    anything = tuple(range(VOCAB))
    for name, params in {"stop": sampling(9, stop=anything), "length": sampling(5), "abort": sampling(40), "error": sampling(40)}.items():
        engine.add(name, [1, 2, 3], params)
    reader.look()
    names = {seq_id: seq["request"] for seq_id, seq in reader.state.seqs.items()}
    for _ in range(12):
        engine.step()
    engine.abort("abort")
    engine.faults.raise_at = -1
    engine.step()
    reader.look()
    assert {names[seq]: how for frame in reader.frames for seq, how in frame.get("gone", ()) if seq in names} == {
        name: name for name in ("stop", "length", "abort", "error")
    }


def test_rings_that_are_full_say_how_much_was_lost() -> None:
    engine, reader = watched()
    reader.look()
    engine.add("a", [1], sampling(watcher.MOST_STEPS // 3 + 10))
    engine.run()
    for name in "bcd":
        engine.add(name, [1], sampling(watcher.MOST_STEPS // 3 - 60))
        engine.run()
    reader.look()
    assert reader.state.lost == engine.scheduler.step - watcher.MOST_STEPS > 0
    assert len(reader.state.steps) == watcher.MOST_STEPS and reader.state.steps[-1][0] == engine.scheduler.step


def test_of_many_that_came_and_went_the_last_ones_are_told_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for most, entries, told in ((3, 99, [2, 3, 4]), (9, 5, [3, 4]), (9, 1, [4])):  # tables of two blocks each
        monkeypatch.setattr(watcher, "MOST_ENDED", most)
        monkeypatch.setattr(watcher, "ENDED_ENTRIES", entries)
        engine, reader = watched(block_size=4)
        reader.look()
        for turn in (1, 2):
            for number in range(5):
                engine.add(f"{turn}.{number}", [number, 1, 2, 3, 4], sampling(2))
                engine.run()
            reader.look()
            assert [seq["request"] for seq, _ in reader.state.ended][-len(told) :] == [f"{turn}.{number}" for number in told]
            assert reader.state.lost == turn * (5 - len(told))


def test_cached_blocks_are_known_that_were_filled_before_anybody_watched() -> None:
    engine = FakeEngine()
    view = view_of(engine.core)
    engine.add("a", list(range(17)), sampling(2))
    engine.run()
    assert not view._watchers and engine.pool.on_event == engine._on_event
    reader = Reader(view, "w", engine.scheduler)
    reader.look()
    found = [(tokens, since) for tokens, since in zip(reader.state.tokens, reader.state.since) if tokens is not None]
    assert sorted(tokens for tokens, _ in found) == sorted([f"{token} " for token in range(at, at + 4)] for at in range(0, 16, 4))
    assert all(since is not None and 0 <= since <= reader.state.at for _, since in found)


# promise: timeline-of-before
def test_the_steps_of_the_last_minutes_are_known_to_whoever_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest one by one, older ones in sums, and what they say together is the same."""
    monkeypatch.setattr(watcher, "LATEST_STEPS", 20)
    engine, now = FakeEngine(num_blocks=14, block_size=4, rows=4), 0.0
    view = view_of(engine.core, clock=lambda: now)
    for number in range(8):
        engine.add(f"r{number}", [*range(13), number], sampling(9, n=2))
        while engine.core.has_work:
            now += 0.03125
            engine.step()
    early = Reader(view, "early", engine.scheduler)
    early.look()
    steps, stats, made = early.frames[0]["steps"], engine.scheduler.stats, engine.scheduler.step
    assert [step[0] for step in steps[-20:]] == list(range(made - 19, made + 1))
    assert len(steps) - 20 == -(-(made - 20) // 8), "eight steps in a quarter of a second"
    assert [step[:2] for step in steps] == sorted(step[:2] for step in steps)
    assert sum(step[3] + step[4] for step in steps) == stats.step_tokens
    assert [sum(step[at] for step in steps) for at in (9, 10, 11)] == [stats.preemptions, stats.prefix_hits, stats.prefix_queries]
    assert list(map(list, StepLog(map(tuple, steps)).rows(now))) == steps, "who passes them on passes on the same"
    now += watcher.KEPT_SECONDS - 1
    late = Reader(view, "late", engine.scheduler)
    late.look()
    told = late.frames[0]["steps"]
    assert 0 < len(told) < len(steps) and told == steps[-len(told) :], "those of ten minutes"


def test_steps_of_hours_are_few_rows() -> None:
    log = StepLog()
    for step in range(1, 50_001):
        log.add((step, step / 50, 1.5, 0, 1, 1, 1, 0, 3, 0, 0, 0))
    rows = log.rows(1000.0)
    assert len(rows) <= watcher.KEPT_SECONDS * watcher.ROWS_A_SECOND + watcher.LATEST_STEPS and rows[0][1] >= 400
    assert sum(row[4] for row in rows) == pytest.approx(50 * watcher.KEPT_SECONDS, abs=25)


def test_a_large_pool_is_told_in_parts_none_of_which_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(num_blocks=20_000, block_size=4, rows=4, budget=8192, check=False, max_len=60_000)
    view = view_of(engine.core)
    engine.add("a", [token % 50 for token in range(50_000)], sampling(2))
    engine.run()
    reader = Reader(view, "w", engine.scheduler)
    count = reader.look()
    sizes = [len(frame["blocks"]) for frame in reader.frames]
    assert count == -(-12_500 // watcher.TOKENS_A_FRAME) and max(sizes) == watcher.BLOCKS_A_FRAME
    assert all(sum(bool(block[4]) for block in frame["blocks"]) <= watcher.TOKENS_A_FRAME for frame in reader.frames)
    assert sum(reader.state.sealed) == 12_500 and sum(tokens is not None for tokens in reader.state.tokens) == 12_500


def test_a_busy_engine_works_a_hundred_times_as_long_as_it_takes_to_gather_a_frame() -> None:
    engine = FakeEngine()
    now = iter([float(at) for at in range(1000)])  # whoever asks for the time takes a second
    view = view_of(engine.core, clock=lambda: next(now) / 1000)
    view.request("w", "full")
    assert view.frames(busy=True), "the first is due"
    due = view._watchers["w"].due
    view.request("w", "delta")
    engine.add("a", [1, 2], sampling(3))
    engine.step()
    assert view.frames(busy=True) == []
    assert view._clock() < due
    assert view.frames(busy=False), "nothing follows: it is told now"
    while view._clock() < due + 0.2:
        pass
    view.request("w", "delta")
    engine.step()
    assert view.frames(busy=True)


@pytest.mark.parametrize(
    "spoiled",
    [f"Watcher.{name}" for name in ("__init__", "frame", "on_block", "on_end", "add_step", "add_event")]
    + ["Contents.remember", "StepLog.add"],
)
def test_whatever_fails_in_it_the_engine_goes_on_and_whoever_watches_is_told(
    spoiled: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(watched: bool) -> FakeEngine:
        engine = FakeEngine(num_blocks=12)
        view = view_of(engine.core) if watched else None
        told: list[str] = []
        for number in range(3):
            engine.add(f"r{number}", list(range(number, 14)), sampling(9, n=2))
        while engine.core.has_work:
            if view is not None:
                view.request("w", "delta" if told else "full")
            engine.step()
            told += [frame.error for _, frame in view.frames(busy=False)] if view is not None else []
        if view is not None:
            assert told[-1] == FAILED and set(told) <= {"", FAILED}
            view.request("late", "full")
            assert [(client, frame.error) for client, frame in view.frames(busy=False)] == [("late", FAILED)]
            assert view.frames(busy=False) == []
            assert engine.pool.on_event == engine._on_event and not view._watchers
        return engine

    whole = run(watched=False)
    owner, _, name = spoiled.partition(".")
    monkeypatch.setattr(getattr(watcher, owner), name, lambda *arguments: 1 / 0)
    broken = run(watched=True)
    assert broken.tokens == whole.tokens
    broken.assert_exact()
    broken.assert_idle()
    assert [record.message for record in caplog.records] == ["the inspector failed and is switched off; the engine goes on"]
    assert caplog.records[0].exc_info is not None


def test_a_stream_of_frames_ends_with_what_the_engine_says() -> None:
    async def main() -> None:
        stream = ViewStream(lambda wanted: None)
        asyncio.get_running_loop().call_later(0.01, lambda: stream.push(ViewFrame(True, 0.0, 0.0, error=FAILED)))
        with pytest.raises(UnavailableError, match="the inspector failed"):
            await anext(stream.frames())

    asyncio.run(asyncio.wait_for(main(), 60))
