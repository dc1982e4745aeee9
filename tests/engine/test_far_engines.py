"""What engines on other hosts need, without other hosts: which node gets an engine, whose clock counts, who is gone, what is carried."""

import os
import queue
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import zmq

from octavo.config import EngineConfig, environment_with, passed_on
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.process import SpawnConfig
from octavo.engine.ray_engine import Begin, Carried, Carrier, EngineActor, _clock_ahead
from octavo.engine.router import CLIENT_SECONDS, Router
from octavo.engine.supervisor import Serving, Supervisor
from octavo.engine.wire import DownFrame, Heartbeat, Hello, Ping, decode_up, encode
from octavo.errors import LoadError
from octavo.worker.ray_cluster import SILENT_SECONDS, Marks, deal, taken_spots
from tests.engine.test_replicas import kill
from tests.support.engine_process import ask, engine_process, read, run, until


def test_engines_go_to_nodes_with_the_fewest_whoever_asks_first() -> None:
    assert deal(3, ["a", "b", "c"], {}) == ["a", "b", "c"]
    assert deal(5, ["a", "b"], {}) == ["a", "b", "a", "b", "a"]
    assert deal(4, ["a", "b"], {0: "a"}) == ["a", "b", "a", "b"]  # as engines 1 to 3 see it, at the same time
    assert deal(3, ["a", "b"], {0: "a", 2: "b"}) == ["a", "a", "b"]  # engine 1 has lost its node
    assert deal(3, ["a", "b", "c"], {0: "a", 1: "a"}) == ["a", "a", "b"]


def test_only_spots_of_this_server_on_nodes_that_live_are_taken() -> None:
    def group(name: str, node: str, state: str = "CREATED") -> dict[str, Any]:
        return {"name": name, "state": state, "bundles_to_node_id": {0: node}}

    groups = [group("one/0", "a"), group("one/1", "b"), group("two/2", "a"), group("one/3", "gone"), group("one/4", "a", "REMOVED")]
    groups.append(group("", "a"))
    assert taken_spots(groups, "one", {"a", "b"}) == {0: "a", 1: "b"}


def test_a_node_that_fell_silent_is_passed_over_for_a_while(tmp_path: Path) -> None:
    first, second = Marks(tmp_path, 0), Marks(tmp_path, 1)
    first.fell_silent()  # nothing was there before
    assert second.silent() == set()
    first.settle("a")
    second.settle("b")
    first.fell_silent()
    assert second.silent() == first.silent() == {"a"}
    before = time.time() - SILENT_SECONDS - 1
    os.utime(tmp_path / "silent-a", (before, before))
    assert second.silent() == set()


def test_the_next_engine_is_told_that_the_one_before_was_silent(endless: str) -> None:
    told: list[bool] = []

    async def main() -> None:
        async with engine_process(endless, "", Serving(engines=2, max_restarts=9)) as llm:
            for blow in (lambda: kill(llm, 1), lambda: kill(llm, 1, signal.SIGSTOP), lambda: replaced(llm, 1)):
                blow()
                await until(lambda: llm.replicas[1].state != "ready")
                await until(lambda: llm.replicas[1].state == "ready")

    live = Supervisor._live

    def noted(self: Supervisor, spawn: SpawnConfig) -> Any:
        if spawn.number == 1:
            told.append(spawn.silent)
        return live(self, spawn)

    with patch.object(Supervisor, "_live", noted):
        run(main())
    assert told == [False, False, True, False]  # at first, after it was killed, stopped and replaced


def replaced(llm: AsyncLLM, engine: int) -> None:
    supervisor = llm.replicas[engine]._supervisor
    assert supervisor is not None
    supervisor.replace()


class Clocks:
    """A Ray whose actor answers with its clock: after 2 s each time but once, when it is quick."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, behind: float) -> None:
        self.now, self._behind, self._asked = 100.0, behind, 0
        self.clock = self
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def remote(self) -> "Clocks":
        return self

    def get(self, asked: "Clocks", timeout: float) -> bytes:
        self._asked += 1
        way = 0.001 if self._asked == 3 else 1.0
        self.now += way
        told = msgspec.json.encode(self.now - self._behind)
        self.now += way if self._asked == 3 else 0.0
        return told


def test_the_quickest_answer_tells_how_far_clocks_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Clocks(monkeypatch, behind=5000.0)
    assert _clock_ahead(ray, ray) == pytest.approx(5000.0, abs=1e-6)


def with_orders(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    told = AsyncLLM._spawn_config
    monkeypatch.setattr(AsyncLLM, "_spawn_config", lambda *given: msgspec.structs.replace(told(*given), **changes))


@pytest.mark.parametrize("ahead", [0.0, 5000.0])
def test_records_of_an_engine_are_by_the_clock_of_its_clients(endless: str, monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
    async def main() -> None:
        async with engine_process(endless) as llm:
            asked = time.monotonic()
            life = (await read(llm, ask([1, 2, 3])))[-1].life
            assert life is not None and life.first_scheduled and life.first_token and life.finished
            times = life.queued, life.first_scheduled, life.first_token, life.finished
            assert asked + ahead <= times[0] <= times[1] <= times[2] <= times[3] <= time.monotonic() + ahead

    with_orders(monkeypatch, clock_ahead=ahead)
    run(main())


@pytest.mark.parametrize("far", [False, True])
def test_a_client_on_another_host_is_gone_when_it_is_silent_and_not_before(far: bool, tmp_path: Path) -> None:
    router = Router(f"ipc://{tmp_path}/engine", 1, 1, 1000, None, far=far)
    gone = 2**22 + 1  # no process of this host
    router._meet(b"abc", None, DownFrame(0, 1, Ping(gone)), Ping(gone))
    router._beat()
    assert (b"abc" in router._clients) == far
    if far:
        router._clients[b"abc"].seen -= CLIENT_SECONDS + 1
        router._beat()
        assert not router._clients


def test_an_engine_with_other_weights_than_the_first_is_refused(stories: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with engine_process(stories, runner="model") as llm:
            assert len(llm.facts.weights) == 32
            assert llm._spawn_config(llm.replicas[0]).weights == llm.facts.weights
        with_orders(monkeypatch, weights=b"other")
        with pytest.raises(LoadError, match="holds other weights than engine 0 found there"):
            async with engine_process(stories, runner="model"):
                pass

    run(main())


def test_a_variable_is_passed_on_or_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "check=1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    given = passed_on()
    assert given.pop("RAY_ADDRESS", None) == os.environ.get("RAY_ADDRESS")
    assert given == {"OCTAVO_DEBUG": "check=1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray sets it for an actor of one CPU
    monkeypatch.setenv("OCTAVO_DEBUG", "check=0")
    found = environment_with(given | {"PATH": "/nowhere"})
    assert found["OCTAVO_DEBUG"] == "check=1" and "OMP_NUM_THREADS" not in found
    assert found["PATH"] == os.environ["PATH"] and found["RAY_AUTH_TOKEN"] == "secret"


# --- the actor, called as Ray calls it --------------------------------------------------------------------------------


def begin_of(folder: str, **changes: Any) -> bytes:
    config = EngineConfig(model=folder, num_gpu_blocks_override=40)
    spawn = SpawnConfig(config, folder, "folder", "name", (), "", 1, 8, None, "ERROR", "text", 0.0, False, far=True)
    return msgspec.json.encode(Begin(msgspec.structs.replace(spawn, **changes), {"OCTAVO_DEBUG": "runner=fake"}))


def ping(number: int, epoch: int) -> bytes:
    return encode(DownFrame(epoch, number, Ping(1)))


def pulled(actor: EngineActor) -> Carried:
    """Returns what came. It does not wait for ever, as the actor does."""
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(actor.pull()), daemon=True).start()
    return msgspec.msgpack.decode(answers.get(timeout=30), type=Carried)


def test_frames_of_each_client_come_in_order_and_to_that_client(endless: str) -> None:
    actor = EngineActor()
    actor.begin(begin_of(endless))
    names = b"abc", b"def"
    actor.push(msgspec.msgpack.encode(Carried([(name, ping(1, 0)) for name in names])))
    told: dict[bytes, list[Any]] = {name: [] for name in names}
    sent = 1
    while any(len(frames) < 6 for frames in told.values()):
        sent += 1
        if all(told.values()):  # both know that the engine is ready
            actor.push(msgspec.msgpack.encode(Carried([(name, ping(sent, 1)) for name in names])))
        else:
            sent = 1
        carried = pulled(actor)
        assert carried.ended is None
        for name, frame in carried.frames:
            told[name].append(decode_up(frame))
    for frames in told.values():
        assert isinstance(frames[0].body, Hello) and any(isinstance(frame.body, Heartbeat) for frame in frames)
        assert [frame.number for frame in frames] == list(range(1, len(frames) + 1))
        assert not any(type(frame.body).__name__ == "Lost" for frame in frames)
    (child,) = _children(b"octavo.engine.process")
    os.kill(child, 9)
    while (carried := pulled(actor)).ended is None:
        pass
    assert (carried.ended.kind, carried.ended.message) == ("EngineError", "it was ended by SIGKILL")


def _children(word: bytes) -> list[int]:
    """Returns the children of this process whose command has the word in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields, line = path.read_text().rpartition(")")[2].split(), (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and word in line:
            found.append(int(path.parent.name))
    return found


def test_an_engine_that_cannot_start_says_why() -> None:
    actor = EngineActor()
    actor.begin(begin_of("/nowhere/model"))
    carried = pulled(actor)
    assert carried.ended is not None and carried.ended.kind == "LoadError" and carried.ended.message.startswith("/nowhere/model")
    assert str(carried.ended.error("engine 1 on a")).startswith("engine 1 on a: /nowhere/model")


def test_what_waits_for_several_clients_is_carried_in_order(tmp_path: Path) -> None:
    address, names = f"ipc://{tmp_path}/engine", (b"abc", b"def")
    carrier = Carrier(address)
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(address)
    router.setsockopt(zmq.RCVTIMEO, 30_000)
    for number in range(50):
        for name in names:
            carrier.send(name, b"%d" % number)
    heard = [tuple(router.recv_multipart()) for _ in range(100)]
    for name, frame in heard:
        router.send_multipart([name, b"to " + name + b" " + frame])
    time.sleep(0.2)  # so that several wait
    found: list[tuple[bytes, bytes]] = []
    while len(found) < 100:
        found += carrier.receive()
    for name in names:
        assert [frame for told, frame in heard if told == name] == [b"%d" % number for number in range(50)]
        assert [frame for told, frame in found if told == name] == [b"to %b %d" % (name, number) for number in range(50)]
    router.close()


def test_sockets_of_clients_that_are_silent_are_closed(tmp_path: Path) -> None:
    carrier = Carrier(f"ipc://{tmp_path}/engine")
    carrier.send(b"old", b"1")
    carrier._seen[b"old"] -= 61
    carrier.send(b"new", b"1")
    assert list(carrier._sockets) == list(carrier._seen) == [b"new"]
