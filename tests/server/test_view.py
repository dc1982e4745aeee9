"""GET /v1/view and --record on a real server: what watchers read, who may, and that they hold nobody up and leave nothing behind."""

import asyncio
import json
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from octavo.client.http import Reply
from octavo.errors import ConfigError
from octavo.inspector import hub
from octavo.inspector.frames import Pieces, ViewFrame
from octavo.inspector.recorder import Recorder
from octavo.inspector.state import ViewState
from octavo.server.app import build_app
from octavo.server.state import Server
from octavo.server_config import ServerConfig
from octavo.text.tokenizer import Tokenizer
from tests.support.fake import FakeEngine, sampling
from tests.support.http_server import HttpServer, wait_for, wait_for_async
from tests.support.http_storm import WATCHED, held_at_rest, seconds_until_idle
from tests.support.server_process import ServerProcess
from tests.support.stand_in_llm import StandInLLM
from tests.support.tokenizers import stories_metadata
from tests.support.watching import view_of

FAKE = {"OCTAVO_DEBUG": "runner=fake,forward.sleep=5", "OCTAVO_LOG_LEVEL": "WARNING"}
FLAGS = ("--num-gpu-blocks-override", "300", "--block-size", "4")
BODY = {"prompt": "Once upon a time there was a \u2603 in the snow.", "max_tokens": 40, "ignore_eos": True}


class Watching:
    """Reads /v1/view in a thread, until left."""

    def __init__(self, server: ServerProcess, query: str = "") -> None:
        self.frames: list[dict[str, Any]] = []
        self.state = ViewState()
        self.over = False
        self._socket = server.connect(20)
        self._socket.sendall(f"GET /v1/view{query} HTTP/1.1\r\nhost: {server.host}:{server.port}\r\n\r\n".encode())
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        wait_for(lambda: len(self.frames) >= 2)

    def _read(self) -> None:
        reply, held = Reply(), b""
        while not reply.done and (data := self._received()):
            *lines, held = (held + reply.feed(data)).split(b"\n")
            assert reply.headers["content-type"].startswith("application/x-ndjson")
            for text in lines:
                frame = json.loads(text)
                self.state.apply(frame)
                self.frames.append(frame)
        self._socket.close()
        self.over = True

    def _received(self) -> bytes:
        with suppress(ConnectionResetError):  # the server saw that this client had left
            return self._socket.recv(65536)
        return b""

    def leave(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(60)

    @property
    def kinds(self) -> list[str]:
        return [frame["kind"] for frame in self.frames]


@pytest.fixture(scope="module")
def server(endless: str) -> Iterator[ServerProcess]:
    with ServerProcess(WATCHED, endless, *FLAGS, env=FAKE) as server:
        yield server
        assert "Traceback" not in server.stderr, server.stderr[-3000:]


# promise: every-sequence-seen, timeline-of-before
def test_watchers_see_text_and_names_and_the_last_one_leaves_nothing(server: ServerProcess) -> None:
    assert server.ask("POST", "/v1/completions", BODY).status == 200
    before = held_at_rest(server)
    first = Watching(server)
    assert first.kinds[:2] == ["head", "full"] and set(first.frames[1]) == {
        "kind", "at", "blocks", "seqs", "gone", "steps", "events", "lost",
    }  # fmt: skip
    head, full = first.frames[:2]
    assert [step[0] for step in full["steps"]] == list(range(1, 41)), "the steps that were made before anybody watched"
    assert list(head) == ["kind", "version", "model", "block_size", "num_blocks", "epoch", "started", "version_of", "lesson", "text"]
    assert (head["version"], head["block_size"], head["num_blocks"], head["epoch"]) == (1, 4, 300, 1)
    assert abs(head["started"] - time.time()) < 600 and head["version_of"].startswith("octavo ")
    short, answer = (server.ask("POST", "/v1/completions", body).json for body in (BODY | {"max_tokens": 1}, BODY))
    wait_for(lambda: len(first.state.ended) == 2)
    names = {seq["request"] for frame in first.frames for seq in frame.get("seqs", ())}
    assert names == {short["id"], answer["id"]}, "also of one that may have ended before there was a frame"
    for (last, how), usage in zip(first.state.ended, (short["usage"], answer["usage"])):
        assert (last["tokens"], how) == (usage["total_tokens"], "length") and last["computed"] == last["tokens"] - 1
        assert len(last["table"]) == -(-last["computed"] // 4) and len(last["digests"]) == last["computed"] // 4
        assert [first.state.digests[block] for block in last["table"]][: len(last["digests"])] == last["digests"]
    cached = [frame_seq for frame in first.frames for frame_seq in frame.get("seqs", ())][-1]
    assert cached["cached"] > 0 and cached["reason"] == "end"
    prompt = server.ask("POST", "/tokenize", {"prompt": BODY["prompt"]}).json["tokens"]
    pieces = Pieces(Tokenizer.from_gguf(stories_metadata(), "tok512.bin"))
    assert pieces.of(prompt[:4]) in first.state.tokens, "the first block of the prompt, as text"
    second = Watching(server)
    wait_for(lambda: second.state.steps == first.state.steps and second.state.ended == first.state.ended)
    assert second.state.events == first.state.events
    assert second.state.tokens == first.state.tokens and second.state.since == first.state.since
    first.leave()
    server.ask("POST", "/v1/completions", BODY)
    wait_for(lambda: len(second.state.steps) > len(first.state.steps))
    second.leave()
    seconds_until_idle(server, before)


def test_a_server_that_is_told_to_stop_does_not_wait_for_watchers_and_a_new_engine_is_told(endless: str) -> None:
    with ServerProcess(WATCHED, endless, *FLAGS, env=FAKE) as server:
        watching = Watching(server)
        os.kill(server.ask("GET", "/watch").json["engine_pid"], signal.SIGKILL)
        wait_for(lambda: watching.kinds.count("head") == 2)
        assert watching.state.head["epoch"] == 2
        assert watching.kinds[watching.kinds.index("head", 1) + 1] == "full"
        wait_for(lambda: server.ask("POST", "/v1/completions", BODY).status == 200)
        wait_for(lambda: len(watching.state.steps) >= 40)
        server.process.send_signal(signal.SIGTERM)
        assert server.ended(15) == 0  # half of the time that open requests have
        wait_for(lambda: watching.over)
        assert "Traceback" not in server.stderr


# promise: inspector
def test_the_key_is_wanted_and_without_the_inspector_there_is_no_route() -> None:
    def status(config: ServerConfig, **headers: str) -> int:
        with HttpServer(build_app(Server(StandInLLM(), config, "m"))) as server:  # type: ignore[arg-type]
            return server.http.get("/v1/view", headers=headers).status_code

    assert status(ServerConfig()) == 200
    assert status(ServerConfig(api_key=("secret",))) == 401
    assert status(ServerConfig(api_key=("secret",)), authorization="Bearer secret") == 200
    assert status(ServerConfig(inspector=False)) == 404


class ScriptedLLM(StandInLLM):
    """Its view is what the test puts into the queue."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.frames: asyncio.Queue[ViewFrame] = asyncio.Queue()
        self.readers = 0

    async def view(self, engine: int = 0) -> AsyncIterator[ViewFrame]:
        self.readers += 1
        try:
            while True:
                yield await self.frames.get()
        finally:
            self.readers -= 1


def engine_frames(count: int) -> Iterator[ViewFrame]:
    """Of an engine at work, from the first on."""
    engine = FakeEngine(num_blocks=64, block_size=16, rows=4, states=10)
    reader = view_of(engine.core)
    reader.request("w", "full")
    for number in range(count):
        if number % 10 == 0:
            engine.add(f"r{number}", list(range(number % 7, 30)), sampling(9, n=1 + number % 3))
        engine.step()
        yield from (frame for _, frame in reader.frames(busy=False))
        reader.request("w", "delta")


def test_who_is_new_or_left_behind_starts_from_the_state_and_misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "BLOCKS_A_LINE", 7)
    monkeypatch.setattr(hub, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(hub, "LIFE_SECONDS", 0.05)

    async def main() -> None:
        llm, before = ScriptedLLM(), asyncio.all_tasks()
        server = Server(llm, ServerConfig(), "m")  # type: ignore[arg-type]
        states, heads = [ViewState() for _ in range(3)], [0, 0, 0]
        streams = [server.views[0].lines(True) for _ in range(3)]

        async def read(number: int) -> bool:
            """One piece; whether it said anything."""
            frames = [json.loads(text) for text in (await anext(streams[number])).splitlines()]
            for frame in frames:
                states[number].apply(frame)
                heads[number] += frame["kind"] == "head"
            return any(len(frame) > 2 for frame in frames)

        frames = list(engine_frames(2 * hub.KEPT_LINES + 20))
        assert len(frames) > 2 * hub.KEPT_LINES
        for at, frame in enumerate(frames):
            llm.frames.put_nowait(frame)
            await read(0)  # keeps up
            if at in (0, 1, 2, len(frames) - 3):
                await read(1)  # sees the first few, is away for long, and comes back
        await read(2)  # comes late
        for number in range(3):
            while await read(number):
                pass  # until there was nothing but a sign of life
        wanted = states[0]
        assert heads == [1, 2, 1] and states[1].at == pytest.approx(wanted.at, abs=1)
        for state in states[1:]:
            for part in ("ref", "sealed", "digests", "tokens", "since", "seqs", "ended", "steps", "states"):
                assert getattr(state, part) == getattr(wanted, part), part
        assert wanted.states[0] == 18 and sum(wanted.sealed) > 0 and len(wanted.ended) > 5 and llm.readers == 1
        for stream in streams:
            await stream.aclose()
        await wait_for_async(lambda: llm.readers == 0 and not server.views[0]._lines and asyncio.all_tasks() == before)
        again = server.views[0].lines(True)
        llm.frames.put_nowait(frames[0])
        first = await anext(again)
        assert first.startswith(b'{"kind":"head"') and b'"states":[18,' in first
        server.draining = True
        assert [text async for text in again] == []
        await server.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_who_is_cut_off_takes_nothing_any_more() -> None:
    async def main() -> None:
        llm, before = ScriptedLLM(), asyncio.all_tasks()
        server = Server(llm, ServerConfig(), "m")  # type: ignore[arg-type]
        written: list[bytes] = []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0.001 if not written else 0.1)  # a GET without a body; what is not read is cut off
            return {"type": "http.disconnect"} if written else {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                written.append(message["body"])
                await asyncio.sleep(60)  # the connection is full

        llm.frames.put_nowait(next(engine_frames(1)))
        scope = {"type": "http", "method": "GET", "path": "/v1/view", "headers": [(b"host", b"localhost")], "query_string": b""}
        with suppress(ClientDisconnect):
            await asyncio.wait_for(build_app(server)(scope, receive, send), 60)  # type: ignore[arg-type]
        assert len(written) == 1 and written[0].startswith(b'{"kind":"head"')
        await wait_for_async(lambda: llm.readers == 0 and asyncio.all_tasks() == before)
        await server.close()

    asyncio.run(main())


# promise: record-file-what
def test_a_recording_is_what_a_watcher_reads(endless: str, tmp_path: Path) -> None:
    file = tmp_path / "r.ndjson"
    file.write_text('{"kind":"head"} of an older one\n')
    file.chmod(0o644)
    flags = (*FLAGS, "--record", str(file), "--api-processes", "2")
    with ServerProcess("octavo serve", endless, *flags, env=FAKE) as server:
        for body in (BODY, BODY, BODY, BODY | {"max_tokens": 1}):
            assert server.ask("POST", "/v1/completions", body).status == 200
        wait_for(lambda: file.read_text().count('"digests"') == 4)  # the last one has been told
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0 and "Traceback" not in server.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    state = ViewState()
    frames = [json.loads(text) for text in file.read_text().splitlines()]
    for frame in frames:
        state.apply(frame)
    assert frames[0]["text"] and any("Once" in "".join(tokens) for tokens in state.tokens if tokens)
    assert [frame["kind"] for frame in frames[:2]] == ["head", "full"] and {frame["kind"] for frame in frames[2:]} == {"delta"}
    assert [step[0] for step in state.steps] == list(range(1, 122)) and not state.seqs and sum(state.sealed) > 10
    assert [event[2] for event in state.events].count("hit") == 3
    assert [last["tokens"] - last["prompt"] for last, _ in state.ended] == [40, 40, 40, 1]


# promise: record-file-what
def test_a_recording_that_cannot_grow_ends_and_what_is_no_recording_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = tmp_path / "model.gguf"
    other.write_bytes(b"GGUF....")
    with pytest.raises(ConfigError, match="there is a file that is no recording"):
        Recorder(str(other))
    assert other.read_bytes() == b"GGUF...."
    with pytest.raises(ConfigError, match="No such file"):
        Recorder(str(tmp_path / "absent" / "r"))
    with pytest.raises(ConfigError, match="record needs the inspector"):
        ServerConfig(record="r", inspector=False)
    small = Recorder(str(tmp_path / "r"), most_bytes=20)
    assert small._write(b"x" * 15 + b"\n") and not small._write(b"y" * 15 + b"\n")
    assert (tmp_path / "r").read_bytes() == b"x" * 15 + b"\n"
    full = Recorder("/dev/full")
    assert not full._write(b"line\n")


def test_half_characters_stand_where_they_are_complete() -> None:
    pieces = Pieces(Tokenizer.from_gguf(stories_metadata(), "tok512.bin"))
    snowman = [3 + byte for byte in "\u2603".encode()]  # the byte tokens of a Llama vocabulary begin at 3
    assert pieces.of(snowman) == ["", "", "\u2603"]
    assert pieces.of(snowman[:2]) == ["", "\ufffd"] and pieces.of(snowman[1:]) == ["\ufffd", "\ufffd"]
    assert pieces.of([]) == []
