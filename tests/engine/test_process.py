"""The engine process among others: it starts or says why not, hears only messages, and never outlives who started it."""

import asyncio
import fcntl
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import zmq

from octavo.engine import router as router_module
from octavo.engine import supervisor, wire
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.process import StatsLog
from octavo.engine.router import LONGEST, RECENT, SHORTEST, LoopStatus, Pace, Router, stalled_for
from octavo.engine.supervisor import MOST_BYTES, SocketFolder
from octavo.engine.wire import LARGE, Abort, Add, Command, DownFrame, Gone, Met, Ping, sliced
from octavo.errors import ConfigError, LoadError
from octavo.messages import AddRequest, Delta, EngineFacts, Limits, SchedulerStats, TokenLogprobs
from octavo.sampling_params import SamplingParams
from tests.support.engine_process import PATIENCE, ask, engine_process, exists, is_idle, run, tokens, until

PARENT = """
import asyncio, os, sys, time
from octavo.config import EngineConfig
from octavo.engine.async_llm import AsyncLLM

async def main():
    llm = AsyncLLM(EngineConfig(model=sys.argv[1], num_gpu_blocks_override=50))
    await llm.start()
    if sys.argv[2] == "held" and not os.fork():
        time.sleep(5)
        os._exit(0)
    print(llm.engine_pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("how", "state"),
    [
        (signal.SIGKILL, "as it is"),
        (signal.SIGTERM, "stopped"),
        (signal.SIGKILL, "held"),  # somebody else has its pipes open: it sees no end of them
    ],
)
def test_it_dies_with_its_parent(endless: str, how: signal.Signals, state: str, tmp_path: Path) -> None:
    environment = os.environ | {"OCTAVO_DEBUG": "runner=fake", "OCTAVO_LOG_LEVEL": "ERROR", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", PARENT, endless, state]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as parent:
        assert parent.stdout is not None
        engine = int(parent.stdout.readline())
        assert exists(engine)
        if state == "stopped":
            os.kill(engine, signal.SIGSTOP)
        parent.send_signal(how)
        parent.wait()
    deadline = time.monotonic() + PATIENCE
    while exists(engine):
        assert time.monotonic() < deadline, "an orphan"
        time.sleep(0.01)


def test_what_a_killed_server_left_behind_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    owner = "import sys, octavo.engine.supervisor as s; folder = s.SocketFolder(); print(folder.address, flush=True); sys.stdin.read()"
    pipe, environment = subprocess.PIPE, os.environ | {"TMPDIR": str(tmp_path)}
    owners = [subprocess.Popen([sys.executable, "-c", owner], stdin=pipe, stdout=pipe, env=environment, text=True) for _ in range(3)]
    killed, living, _ = folders = [Path(each.stdout.readline().strip().removeprefix("ipc://")).parent for each in owners]  # type: ignore[union-attr]
    (killed / "numbers").write_text("left")
    others = tmp_path / "octavo-engine-of-nobody"
    others.symlink_to(tmp_path)
    owners[0].kill()
    owners[2].kill()
    for each in (owners[0], owners[2]):
        each.wait()
    with patch.object(os, "geteuid", return_value=os.geteuid() + 1):
        SocketFolder().remove()
    assert all(folder.exists() for folder in folders), "another user's folder"
    mine = SocketFolder()
    assert [folder.exists() for folder in folders] == [False, True, False] and others.is_symlink()
    SocketFolder().remove()
    assert set(tmp_path.iterdir()) == {living, others, Path(mine.address.removeprefix("ipc://")).parent}
    mine.remove()
    owners[1].communicate()


def test_a_folder_that_another_server_removes_before_it_is_locked_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    locked, swept = supervisor._locked, []

    def sweep_first(path: Path) -> int | None:
        if len(swept) < 2:
            swept.append(path)
            supervisor._sweep(str(tmp_path))
            assert not path.exists()
        return locked(path)

    monkeypatch.setattr(supervisor, "_locked", sweep_first)
    folder = SocketFolder()
    assert [f"ipc://{path / supervisor.NAME}" for path in tmp_path.iterdir()] == [folder.address] and len(swept) == 2
    supervisor._sweep(str(tmp_path))
    shutil.rmtree(*tmp_path.iterdir())
    swept.clear()
    for _ in range(3):
        folder.make_again()
    supervisor._sweep(str(tmp_path))
    assert [f"ipc://{path / supervisor.NAME}" for path in tmp_path.iterdir()] == [folder.address]
    folder.remove()


@pytest.fixture
def long_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Path]]:
    """Makes a temporary folder the path of which has so many bytes more than fit."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:

        def make(more: int) -> Path:
            path = Path(place) / ("x" * (MOST_BYTES + more - len(f"{place}/")))
            path.mkdir()
            monkeypatch.setattr(tempfile, "tempdir", str(path))
            return path

        yield make


@pytest.mark.parametrize("more", [0, 1])
def test_a_temporary_folder_with_a_long_name_is_no_reason_not_to_start(endless: str, more: int, long_place: Callable[[int], Path]) -> None:
    async def main() -> None:
        place = long_place(more)
        async with engine_process(endless) as llm:
            assert llm.address.startswith(f"ipc://{place}/") == (not more) and len(await tokens(llm, ask([1], 3))) == 3

    run(main())


def test_where_no_short_folder_can_be_written_the_limit_is_told(long_place: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    long_place(1)
    monkeypatch.setattr(supervisor, "SHORT_PLACE", "/no/such/folder")
    with pytest.raises(ConfigError, match=rf"TMPDIR is {MOST_BYTES + 1} bytes long, at most {MOST_BYTES} "):
        SocketFolder()


def test_a_socket_that_cannot_be_made_is_told_with_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"socket ipc:///proc/octavo/engine cannot be made: .+; set TMPDIR to another folder"):
        Router("ipc:///proc/octavo/engine", 1, 1, 1000, None)


@pytest.mark.soak
def test_a_folder_that_somebody_removed_is_made_again_for_those_who_join_and_for_the_next_engine(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, "forward.sleep=10") as llm:
            folder = Path(llm.address.removeprefix("ipc://")).parent
            whole = await tokens(llm, ask([1, 2], 60))
            running = asyncio.create_task(tokens(llm, ask([1, 2], 60)))
            await asyncio.sleep(0.1)
            shutil.rmtree(folder)
            other = AsyncLLM(llm.config, address=llm.address)
            await asyncio.wait_for(other.start(), PATIENCE)
            assert await running == whole == await tokens(other, ask([1, 2], 60)) and llm.facts.epoch == 1
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            descriptor = os.open(folder, os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(descriptor)
            assert llm.engine_pid is not None
            shutil.rmtree(folder)
            os.kill(llm.engine_pid, signal.SIGKILL)
            await until(lambda: llm.state == other.state == "ready" and llm.facts.epoch == other.facts.epoch == 2)
            assert await tokens(llm, ask([1, 2], 60)) == whole == await tokens(other, ask([1, 2], 60))
            await other.close()
        assert not folder.exists()

    run(main())


def test_who_finds_a_full_queue_is_told_when_it_will_have_moved() -> None:
    pace = Pace()
    assert pace.retry_after(1000, 5.0) == SHORTEST
    pace.begin(10.0)
    assert pace.retry_after(1000, 20.0) == SHORTEST, "nobody knows yet"
    for second in (12.0, 14.0, 16.0):
        pace.end(second)
    assert pace.retry_after(10, 16.0) == 20.0 and pace.retry_after(0, 16.0) == SHORTEST and pace.retry_after(1000, 16.0) == LONGEST
    assert pace.retry_after(10, 22.0) == 40.0, "nothing has ended for a while"
    for number in range(RECENT + 1):
        pace.end(22.0 + number / 10)
    assert pace.retry_after(100, 22.0 + RECENT / 10) == pytest.approx(10.0, rel=0.2), "what was slow long ago does not count"
    pace.begin(1000.0)
    pace.end(1001.0)
    assert pace.retry_after(3, 1001.0) == 3.0, "nor does a time with nothing to do"


def test_why_it_could_not_start_is_what_the_user_sees(endless: str, tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="the largest --max-model-len that fits"):
            async with engine_process(endless, num_gpu_blocks_override=None, kv_cache_memory_bytes=100_000, max_model_len=500):
                pass
        broken = tmp_path / "broken"
        broken.mkdir()
        for file in Path(endless).iterdir():
            (broken / file.name).write_bytes(file.read_bytes()[:1000] if file.suffix == ".safetensors" else file.read_bytes())
        with pytest.raises(LoadError, match=r"model\.safetensors"):
            async with engine_process(str(broken), runner="model", num_gpu_blocks_override=50):
                pass

    run(main())


def raw(address: str, name: bytes = b"") -> "zmq.Socket[bytes]":
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    if name:
        dealer.setsockopt(zmq.IDENTITY, name)
    dealer.connect(address)
    return dealer


def test_garbage_does_nothing_to_anybody(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, "forward.sleep=5") as llm:
            alone = await tokens(llm, ask([1, 2], 60))
            canary = asyncio.create_task(tokens(llm, ask([1, 2], 60)))
            path = Path(llm.address.removeprefix("ipc://"))
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            stranger = raw(llm.address)
            victim = f"{llm.name}-1"
            frames = [
                b"",
                secrets.token_bytes(500),
                b"\x80\x04\x95cos\nsystem\n",  # the head of a pickle
                b"\xdd\xff\xff\xff\xff",  # a list of 4 Gi items
                b"\xc6\xff\xff\xff\xff",  # as many bytes
                bytes(8 << 20),
                wire.encode(DownFrame(1, 1, Add(AddRequest("x-1", [1], SamplingParams())))),  # of one who never said who it is
                wire.encode(DownFrame(1, 1, wire.Abort(victim))),
                wire.encode(DownFrame(7, 1, wire.ResetPrefixCache())),
            ]
            for frame in frames:
                stranger.send(frame)
            stranger.send_multipart([b"two", b"parts"])
            binary = raw(llm.address)
            binary.send(wire.encode(DownFrame(0, 1, Ping(os.getpid()))))  # under a name that libzmq made, of any bytes
            binary.send(wire.encode(DownFrame(1, 2, wire.Abort(victim))))
            known = raw(llm.address, b"known")  # says hello properly, and then tells others' requests to end
            known.send(wire.encode(DownFrame(0, 1, Ping(os.getpid()))))
            known.send(wire.encode(DownFrame(1, 2, wire.Abort(f"{llm.name}-2"))))
            for data in (b"GET / HTTP/1.1\r\n\r\n", secrets.token_bytes(10_000), b"\xff" + b"\xff" * 8 + b"\x7f" + bytes(1000)):
                with socket.socket(socket.AF_UNIX) as plain:  # not even a peer
                    plain.connect(str(path))
                    plain.sendall(data)
            assert await canary == alone == await tokens(llm, ask([1, 2], 60))
            assert llm.facts.epoch == 1 and llm.state == "ready"
            await until(lambda: is_idle(llm))
            assert llm.stats.generation_tokens == 3 * 60, "a stranger was served"
            for each in (stranger, binary, known):
                each.close()
            pid = llm.engine_pid
            listening = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True).stdout if _has_ss() else ""
            assert f"pid={pid}," not in listening
        assert not path.parent.exists()

    run(main())


def _has_ss() -> bool:
    return any((Path(folder) / "ss").exists() for folder in os.environ["PATH"].split(":"))


def test_requests_of_a_process_that_is_gone_end(endless: str) -> None:
    """It is gone once its request runs: the engine may look for it at any moment."""

    async def main() -> None:
        async with engine_process(endless, "forward.sleep=20") as llm:
            client = raw(llm.address, b"ghost")
            with subprocess.Popen(["sleep", "60"]) as ghost:
                client.send(wire.encode(DownFrame(0, 1, Ping(ghost.pid))))
                params = SamplingParams(max_tokens=400, ignore_eos=True)
                client.send(wire.encode(DownFrame(1, 2, Add(AddRequest("ghost-1", [1, 2], params)))))
                await until(lambda: llm.stats.running == 1, "its request runs")
                ghost.kill()
            await until(lambda: is_idle(llm), "its request has ended")
            assert llm.stats.generation_tokens < 300
            client.close()

    run(main())


def test_it_leaves_ctrl_c_to_its_parent_and_reset_reaches_it(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless) as llm:
            assert llm.engine_pid is not None
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(llm.engine_pid, number)
            await asyncio.sleep(0.1)
            prompt = list(range(100))
            await tokens(llm, ask(prompt, 2))
            await tokens(llm, ask(prompt, 2))
            before = llm.stats.prefix_hits
            await llm.reset_prefix_cache()
            await tokens(llm, ask(prompt, 2))
            assert llm.facts.epoch == 1 and llm.stats.prefix_hits == before > 0

    run(main())


def test_logprobs_of_a_long_prompt_come_in_pieces_that_are_soon_read() -> None:
    logprobs = [TokenLogprobs(-float(at), 1, (), ()) for at in range(LARGE * 2 + 10)]
    news = [Delta("a-1", 0, [5]), Delta("a-2", 0, [], prompt_logprobs=(7, logprobs)), Delta("a-2", 0, [6])]
    frames = list(sliced(news))
    pieces = [delta.prompt_logprobs for frame in frames[:-1] for delta in frame]
    assert [piece and (piece[0], len(piece[1])) for piece in pieces] == [(7, LARGE), (7 + LARGE, LARGE), (7 + 2 * LARGE, 10)]
    assert [found for piece in pieces if piece for found in piece[1]] == logprobs
    assert frames[-1] == [news[0], news[2]], "and what is short in one"
    assert list(sliced(frames[-1])) == [frames[-1]]


def test_a_loop_that_slept_is_not_one_that_hangs() -> None:
    stats = SchedulerStats(0, 0, 0, 0, 0, 0, 0, 0, 0)
    idle, busy = (LoopStatus(10.0, on, 5, 3, 1, stats) for on in (False, True))
    assert stalled_for(idle, 0, 0.0, 400.0) == 0
    assert stalled_for(idle, 1, 399.5, 400.0) == 0.5, "a request has just come, after a long sleep"
    assert stalled_for(idle, 1, 20.0, 400.0) == 380, "it came long ago, and the loop never took it"
    assert stalled_for(busy, 0, 9.0, 400.0) == 390


def test_importing_it_imports_no_torch() -> None:
    code = "import octavo.engine.async_llm, sys; print([name for name in ('torch', 'fastapi') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
    code = "import octavo, octavo.llm, octavo.cli.main, sys; print([name for name in ('zmq', 'msgspec') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


# promise: every-10-s
def test_a_busy_engine_logs_a_line_every_ten_seconds(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list[str]()
    monkeypatch.setattr("octavo.engine.process.logger.info", lines.append)
    now, stats = [0.0], SchedulerStats(0, 0, 100, 101, 0, 0, 0, 0, 0)
    log = StatsLog(stats, clock=lambda: now[0])
    for second in range(1, 25):
        now[0], stats.generation_tokens, stats.prompt_tokens = second, second * 50, min(second, 12) * 10
        stats.running, stats.waiting, stats.free_blocks, stats.preemptions = 3, 2, 75, second
        stats.prefix_queries, stats.prefix_hits = second * 40, second * 10
        log.turn(stats)
    for second in range(25, 60):  # idle but for the last of it
        now[0] = second
        log.turn(stats)
    assert lines == [
        "Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 50.0 tokens/s, Running: 3 reqs, Waiting: 2 reqs, "
        "Preemptions: 10, KV cache usage: 25.0%, Prefix cache hit rate: 25.0%",
        "Avg prompt throughput: 2.0 tokens/s, Avg generation throughput: 50.0 tokens/s, Running: 3 reqs, Waiting: 2 reqs, "
        "Preemptions: 10, KV cache usage: 25.0%, Prefix cache hit rate: 25.0%",
        "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 20.0 tokens/s, Running: 3 reqs, Waiting: 2 reqs, "
        "Preemptions: 4, KV cache usage: 25.0%, Prefix cache hit rate: 25.0%",
    ]


def test_a_burst_of_long_prompts_is_taken_over_several_turns(tmp_path: Path) -> None:
    router = Router(f"ipc://{tmp_path}/engine", 1, 1, 1000, None)
    for number in range(7):
        router._inbox.put(AddRequest(str(number), [1] * 30_000, SamplingParams()))
    router._inbox.put(Abort("0"))
    turns = [router.take(wait=False) for _ in range(4)]
    assert [len(commands) for commands in turns] == [3, 3, 2, 0], "until more than 65,536 ids are taken"
    assert turns[2][-1] == Abort("0"), "in the order in which they arrived"


def test_a_client_that_lost_its_requests_is_told_again_what_the_engine_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"ipc://{tmp_path}/engine"
    router, client = Router(address, 1, 1, 1000, None), raw(address, b"client")
    router.ready(EngineFacts("model", 1, Limits(1, 1, 1, 1, 1, 1)), LoopStatus(time.monotonic(), False, 0, 0, 1, SchedulerStats(*[0] * 9)))
    router.start()

    def heard(count: int, *numbers: int, epoch: int = 1) -> list[Command]:
        for number in numbers:
            client.send(wire.encode(DownFrame(epoch, number, Ping(os.getpid()))))
        commands: list[Command] = []
        while len(commands) < count and (more := router.take(wait=True, seconds=PATIENCE)):
            commands += more
        return commands

    assert heard(1, 1, epoch=0) == [Met("client")]
    assert heard(2, 2, 4) == [Gone("client"), Met("client")], "a frame of it was lost"
    monkeypatch.setattr(router_module, "CLIENT_SECONDS", 0.0)
    assert heard(1) == [Gone("client")], "it was silent for too long"
    monkeypatch.setattr(router_module, "CLIENT_SECONDS", PATIENCE)
    assert heard(1, 5) == [Met("client")], "it is back"
    client.close()


def test_an_engine_that_rests_gives_back_what_its_steps_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[int] = []
    monkeypatch.setattr("octavo.engine.router.give_back_freed_memory", lambda: given_back.append(1))
    router, stats = Router(f"ipc://{tmp_path}/engine", 1, 1, 1000, None), SchedulerStats(0, 0, 0, 0, 0, 0, 0, 0, 0)
    beats = [(True, 5, 9, 0), (False, 5, 1, 0), (False, 5, 9, 1), (False, 5, 9, 1), (False, 6, 1, 1), (False, 6, 9, 2)]
    for busy, steps, seconds, times in beats:
        router.publish(LoopStatus(time.monotonic(), busy, steps, 0, 1, stats))
        router._given_back = router._given_back[0], time.monotonic() - seconds
        router._beat()
        assert len(given_back) == times
