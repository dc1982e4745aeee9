"""The view of an engine process: followed over its death, by several clients, at the pace of each, and left without a trace."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import aclosing

import pytest
import zmq

from octavo.engine import wire
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.process import Loop
from octavo.engine.supervisor import Serving
from octavo.engine.wire import Command, DownFrame, Gone, Ping, View, Watch, Watching
from octavo.inspector.frames import ViewFrame
from octavo.inspector.state import ViewState
from octavo.messages import AddRequest, Delta
from tests.engine.test_process import raw
from tests.support.engine_process import ask, engine_process, run, tokens, until
from tests.support.fake import FakeEngine, sampling
from tests.support.watching import HEAD, told, view_of

WATCHED = Serving(inspector=True)


class Follower:
    """Reads the view of `llm` until it is left."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.state = ViewState()
        self.frames: list[ViewFrame] = []
        self.times: list[float] = []
        self._llm = llm
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async with aclosing(self._llm.view()) as frames:
            async for frame in frames:
                self.frames.append(frame)
                self.times.append(frame.started + frame.at)
                if frame.full:
                    self.state.apply({**HEAD, "num_blocks": self._llm.facts.limits.num_blocks})
                self.state.apply(told(frame))

    @property
    def steps(self) -> list[int]:
        return [step[0] for step in self.state.steps]

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


def test_it_is_followed_over_the_engines_death_and_by_two_at_once(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, "forward.sleep=5", WATCHED) as llm:
            other = AsyncLLM(llm.config, Serving(inspector=True, beat_timeout=1.5), address=llm.address)
            await other.start()
            both = [Follower(llm), Follower(other)]
            for epoch in (1, 2):
                await until(lambda: all(len(each.frames) > 0 and each.frames[-1].full for each in both), "a full one")
                assert llm.facts.epoch == epoch
                await tokens(llm, ask(list(range(40)), 60))
                await until(lambda: all(each.steps[-1:] == [60] and not each.state.seqs for each in both))
                first, second = (each.state for each in both)
                assert first.steps == second.steps and first.ref == second.ref and first.tokens == second.tokens
                assert [step[0] for step in first.steps] == list(range(1, 61)) and not first.seqs and sum(first.sealed) == 6
                for each in both:
                    assert min(after - before for before, after in zip(each.times, each.times[1:])) > 0.09, "at most ten a second"
                if epoch == 1:
                    assert llm.engine_pid is not None
                    os.kill(llm.engine_pid, signal.SIGKILL)
                    await until(lambda: llm.facts.epoch == other.facts.epoch == 2 and other.state == llm.state == "ready")
            for each in both:
                await each.leave()
            await tokens(llm, ask([1], 5))
            again = Follower(llm)
            await until(lambda: bool(again.frames))
            assert again.frames[0].full and again.steps == list(range(1, 66)) and sum(again.state.sealed) == 6
            await again.leave()
            await other.close()

    run(main())


def views(client: "zmq.Socket[bytes]") -> list[ViewFrame]:
    found = []
    while client.poll(0):
        frame = wire.decode_up(client.recv())
        if frame is not None and isinstance(frame.body, View):
            found.append(frame.body.frame)
    return found


def test_a_client_that_does_not_ask_gets_nothing_and_one_that_is_gone_is_forgotten(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, "forward.sleep=2", WATCHED) as llm:
            client = raw(llm.address, b"slow")
            client.send(wire.encode(DownFrame(0, 1, Ping(os.getpid()))))
            client.send(wire.encode(DownFrame(1, 2, Watch("full"))))
            first = list[ViewFrame]()
            await until(lambda: bool(first.extend(views(client)) or first))
            await tokens(llm, ask(list(range(40)), 150))
            assert len(first) == 1 and first[0].full and views(client) == []
            client.send(wire.encode(DownFrame(1, 3, Watch("delta"))))
            later = list[ViewFrame]()
            await until(lambda: bool(later.extend(views(client)) or later))
            (second,) = later
            assert not second.full and len(second.steps) == 150 and second.lost == 0
            client.send(wire.encode(DownFrame(1, 4, Watch("delta"))))
            client.send(wire.encode(DownFrame(1, 5, Watch("none"))))
            await asyncio.sleep(0.1)
            await tokens(llm, ask([1], 5))
            await asyncio.sleep(0.1)
            assert views(client) == []
            client.close()

    run(main())


class Mute:
    """A router that nobody listens to."""

    def __init__(self, *commands: Command) -> None:
        self.shown: list[ViewFrame] = []
        self._commands = list(commands)

    def take(self, wait: bool, seconds: float | None) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands

    def show(self, views: list[tuple[str, ViewFrame]]) -> None:
        self.shown += [frame for _, frame in views]

    def publish(self, status: object) -> None:
        pass

    def give(self, deltas: object, refused: object, stats: object) -> None:
        pass


def test_a_request_to_an_idle_engine_is_shown_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may take long, and until its end the engine can tell nothing."""
    engine = FakeEngine()
    request = AddRequest("a", list(range(9)), sampling(6, n=2))
    router = Mute(Watching("page", "full"), request)
    loop = Loop(engine.core, router, None, view_of(engine.core), 0.0)  # type: ignore[arg-type]
    step, shown_before = engine.core.step, []

    def watched_step() -> list[Delta]:
        shown_before.append(list(router.shown))
        return step()

    monkeypatch.setattr(engine.core, "step", watched_step)
    loop.turn()
    ((frame,),) = shown_before
    (seq,) = frame.seqs
    assert (seq.request, seq.state, seq.prompt, seq.limit, seq.samples, seq.table) == ("a", "waiting", 9, 15, 2, [])


def test_a_client_that_is_given_up_stops_watching() -> None:
    engine, router = FakeEngine(), Mute()
    loop = Loop(engine.core, router, None, view_of(engine.core), 0.0)  # type: ignore[arg-type]
    for name in ("a", "b"):
        loop._obey(Watching(name, "full"))
    loop._obey(Gone("a"))
    assert engine.pool.on_event != engine._on_event
    loop._obey(Gone("b"))
    assert engine.pool.on_event == engine._on_event


# promise: inspector
def test_an_engine_that_may_not_be_watched_keeps_nothing_and_tells_nothing(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless) as llm:
            client = raw(llm.address, b"curious")
            client.send(wire.encode(DownFrame(0, 1, Ping(os.getpid()))))
            client.send(wire.encode(DownFrame(1, 2, Watch("full"))))
            await tokens(llm, ask(list(range(40)), 20))
            await asyncio.sleep(0.1)
            assert views(client) == [] and llm.facts.epoch == 1
            client.close()

    run(main())


def test_it_imports_no_web_server() -> None:
    code = "import octavo.inspector.state, sys; print([name for name in ('torch', 'zmq', 'fastapi') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
