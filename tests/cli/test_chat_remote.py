"""`octavo chat URL`: the same conversation with a running server, at a terminal and against one that answers to a script."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.chat_session import ChatSession, RemoteAnswers
from octavo.client.api import RemoteServer
from octavo.client.http import parse_url
from octavo.errors import RemoteError
from octavo.text.reasoning import Piece
from tests.cli.processes import SLOW, Typist
from tests.support.fair_clock import cpu_seconds
from tests.support.http_server import wait_for
from tests.support.scripted_server import Script, ScriptedServer
from tests.support.server_process import ServerProcess


# promise: octavo-chat-url, chat-ends, server-url-word
def test_a_conversation_with_a_server_from_banner_to_ctrl_d(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "OCTAVO_API_KEY": "secret"}
    with ServerProcess("octavo serve", "--api-key", "secret", env=SLOW) as server:
        url = f"http://127.0.0.1:{server.port}"
        with Typist("chat", "--url", url, "--max-tokens", "7000", "--system", "Be brief.", cwd=tmp_path, env=env) as chat:
            assert "loading" not in chat.expect(r"SmolLM2-135M-Instruct, context of 8192 tokens")
            chat.expect(">>> ")
            chat.type("Talk until the context is full\r")
            chat.expect(r"full\r\n.+")
            assert "stopped" in chat.interrupt()
            count = re.search(r"answer  (\d+) tokens", chat.ask("/stats"))
            assert count and 1 <= int(count[1]) < 6000
            assert chat.leave() == 0
        with Typist("chat", f"localhost:{server.port}/v1", "--max-tokens", "6", cwd=tmp_path, env=env) as chat:
            chat.expect(">>> ")
            assert re.search(r"server  queue \d+ ms, prefill \d+ ms, decode \d+ ms", chat.ask_twice())
            server.process.terminate()
            assert server.ended() == 0
            assert "error: no server answers at http://localhost" in chat.ask("Is anybody there?")
            assert chat.leave("/bye\r") == 0


def said(*pieces: tuple[str, str], pause: float = 0.0) -> Script:
    """An answer of (kind, text)."""
    names = {"reasoning": "reasoning_content", "content": "content"}
    events = [(pause, {"choices": [{"delta": {names[kind]: text}, "finish_reason": None}]}) for kind, text in pieces]
    return Script([(0, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}), *events])


@contextmanager
def session(server: ScriptedServer, notes: list[str], **sampling: object) -> Iterator[ChatSession]:
    remote = RemoteServer(parse_url(server.url), None)
    with asyncio.Runner() as runner:
        yield ChatSession(RemoteAnswers(runner, remote, runner.run(remote.model(None)), sampling), None, notes.append)
        remote.close()


def test_thinking_is_told_apart_and_left_out_of_the_next_turn() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> Script:
        bodies.append(body)
        return said(("reasoning", "hm"), ("content", "Forty"), ("content", "-two."))

    with ScriptedServer(answer) as server, session(server, [], temperature=0.5) as talk:
        assert list(talk.ask("What is it?")) == [
            Piece("reasoning", "hm"),
            Piece("tag", "\n\n"),
            Piece("content", "Forty"),
            Piece("content", "-two."),
        ]
        list(talk.ask("Sure?"))
        assert talk.stats is not None and talk.stats.tokens == 3 and len(talk.stats.lines()) == 1  # this server tells nothing
    assert [message["content"] for message in bodies[1]["messages"]] == ["What is it?", "Forty-two.", "Sure?"]
    assert bodies[0]["temperature"] == 0.5 and bodies[0]["stream"] is True and "top_p" not in bodies[0]


# promise: octavo-chat-url
def test_turns_are_left_out_when_the_server_says_the_context_is_full() -> None:
    full = Script(status=400, error={"message": "maximum context length is 9 tokens", "code": "context_length_exceeded"})
    notes: list[str] = []

    def answer(body: dict[str, Any]) -> Script:
        return full if len(body["messages"]) > 3 else said(("content", "yes"))

    with ScriptedServer(answer) as server, session(server, notes) as talk:
        for number in range(4):
            assert list(talk.ask(f"{number}?")) == [Piece("content", "yes")]
        assert [turn.question for turn in talk.turns] == ["2?", "3?"]
        assert notes == ["the context is full: the oldest turn is left out"] * 2
    with ScriptedServer(lambda _body: full) as server, session(server, notes) as talk:
        with pytest.raises(RemoteError, match="maximum context length is 9 tokens"):
            list(talk.ask("far too long"))
        assert talk.turns == [] and len(notes) == 2


def test_whoever_stops_reading_leaves_the_server_and_keeps_what_came() -> None:
    scripts = iter([said(*[("content", "a")] * 200, pause=0.02), said(("content", "b"))])
    with ScriptedServer(lambda _body: next(scripts)) as server, session(server, []) as talk:
        pieces = talk.ask("Go on")
        assert next(pieces) == Piece("content", "a")
        pieces.close()
        wait_for(lambda: server.left == 1)
        assert [turn.answer for turn in talk.turns] == ["a"]
        assert list(talk.ask("And now?")) == [Piece("content", "b")]


def test_an_answer_that_fails_is_no_turn() -> None:
    failing = said(("content", "half"))
    failing.events.append((0, {"error": {"message": "it broke", "code": "internal_error"}}))
    with ScriptedServer(lambda _body: failing) as server, session(server, []) as talk:
        pieces = talk.ask("Go on")
        assert next(pieces).text == "half"
        with pytest.raises(RemoteError, match="it broke"):
            next(pieces)
        assert talk.turns == []


# promise: octavo-chat-url
@pytest.mark.timed("start-up time")
def test_it_starts_in_half_a_second(tmp_path: Path) -> None:
    """Of CPU time, and the best of a few: other tests run beside this one."""
    used = [float("inf")]
    with ScriptedServer(lambda _body: said(("content", "b"))) as server:
        while min(used) >= 0.5 and len(used) < 6:
            with Typist("chat", "--url", server.url, cwd=tmp_path, env={"HOME": str(tmp_path)}) as chat:
                chat.expect(">>> ")
                used.append(cpu_seconds(chat.process.pid))
    assert min(used) < 0.5
