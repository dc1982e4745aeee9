"""Sections G and H: clients that leave or do not read, full queues, faults in a step, an engine that dies, tenants."""

import json
import os
import random
import signal
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from tests.support.bad_inputs_http import POST, refused
from tests.support.bad_inputs_row import COMPLETIONS, SOUND, Row, acted
from tests.support.bad_inputs_watch import Watched
from tests.support.fair_clock import FairClock
from tests.support.server_process import Reply, read_replies

LONG: dict[str, Any] = {"prompt": "Lily said", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
FAULTS = "forward.raise@1000,forward.nan@1400,sample.bad_id@1800"
MOST_PAIRS = 60
CLIENTS = 64


def opened(server: Watched, body: dict[str, Any], cut: int | None = None) -> socket.socket:
    """A connection on which this was asked, all or its first bytes."""
    sock = server.process.connect()
    data = json.dumps(body).encode()
    sock.sendall((POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(data) + data)[:cut])
    return sock


def read_until(sock: socket.socket, count: int) -> bytes:
    """Until so many events have come, or the last of them: some may come as one."""
    data = b""
    while data.count(b"data: ") < count and b'"length"' not in data and (piece := sock.recv(4096)):
        data += piece
    return data


def _alone(server: Watched, seconds: float = 1.0) -> None:
    """But for the canary: long before what was asked would have ended by itself."""
    server.wait_until(
        lambda found: found["streams"] <= 1 and found["answers"] <= 1 and found["running"] + found["waiting"] <= 1,
        seconds,
        "P2 beside the canary",
    )


def _leaving(server: Watched) -> None:
    """With half a head, half a body, before the first token, behind it, and one before the end."""
    for cut in (10, 60, -10):
        opened(server, LONG, cut).close()
        _alone(server, 0.5)
    for events in (0, 1, 59):
        for stream in (True, False) if events == 0 else (True,):
            sock = opened(server, LONG | {"stream": stream})
            read_until(sock, events)
            time.sleep(0.03)
            sock.close()
            _alone(server, 0.5)
    with server.process.connect() as sock:
        data = json.dumps(LONG | {"stream": False}).encode()
        sock.sendall(2 * (POST + b"Content-Length: %d\r\n\r\n" % len(data) + data))  # the second waits for the first
        time.sleep(0.03)
    _alone(server, 0.5)


def _leaving_while_read_in(server: Watched) -> None:
    """A prompt of eight steps, left in the third: what was left is not computed."""
    computed = []
    for _ in range(3):
        before = server.watch()["prompt_tokens"]
        prompt = [random.randrange(3, 500) for _ in range(60)]
        sock = opened(server, LONG | {"prompt": prompt})
        time.sleep(0.045)
        sock.close()
        _alone(server, 0.5)
        time.sleep(0.3)  # the engine's next beat tells
        computed.append(server.watch()["prompt_tokens"] - before)
    assert min(computed) < 50, computed


def _leaving_the_queue(server: Watched) -> None:
    """Two may run and one may wait: when that one leaves there is room for the next at once, long before its time was up."""
    holders = [opened(server, LONG) for _ in range(2)]
    server.wait_until(lambda found: found["running"] == 2, 1, "two run")
    waiting = opened(server, LONG)
    time.sleep(0.1)
    refused(server.ask("POST", COMPLETIONS, SOUND[COMPLETIONS]), 429, "rate_limit_error")
    waiting.close()
    time.sleep(0.1)
    assert server.ask("POST", COMPLETIONS, SOUND[COMPLETIONS]).status != 429
    for holder in holders:
        holder.close()


def _never_reading(server: Watched) -> None:
    """More than all buffers on the way hold, of which nothing is read: dropped when its time is up, cut off."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((server.process.host, server.process.port))
        body = json.dumps(LONG | {"prompt": [[7] * 20] * 2, "n": 16, "max_tokens": 230, "logprobs": 20}).encode()
        sock.sendall(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(1)
        assert server.watch()["answers"] >= 1, "it was all taken"
        server.wait_idle(9)
        sock.settimeout(5)
        data = b""
        with suppress(ConnectionResetError):
            while piece := sock.recv(2**20):
                data += piece
    assert data.startswith(b"HTTP/1.1 200") and b"[DONE]" not in data


def _full_queue(server: Watched) -> None:
    """Two may run, the canary and one more; one may wait, and half a second."""
    holder = opened(server, LONG)
    read_until(holder, 1)
    waited: list[Reply] = []
    waiter = threading.Thread(target=lambda: waited.append(server.ask("POST", COMPLETIONS, SOUND[COMPLETIONS])))
    waiter.start()
    server.wait_until(lambda found: found["waiting"] == 1, 1, "one waits")
    times = []
    for _ in range(3):
        start = time.monotonic()
        reply = server.ask("POST", COMPLETIONS, SOUND[COMPLETIONS])
        times.append(time.monotonic() - start)
        assert refused(reply, 429, "rate_limit_error").headers["retry-after"].isdigit()
    assert min(times) < 0.05, times
    waiter.join()
    assert refused(waited[0], 503, "server_error").headers["retry-after"].isdigit()
    leaving = opened(server, LONG | {"max_tokens": 5})  # in the queue, or in its place if the canary has ended
    leaving.close()
    holder.close()


def _own_ids(server: Watched) -> None:
    """The same id from two clients at once: each has its own answer, and an id of ours."""
    replies: list[Reply] = []
    bodies = [LONG | {"stream": False, "max_tokens": count} for count in (20, 30)]
    threads = [
        threading.Thread(target=lambda body=body: replies.append(server.ask("POST", COMPLETIONS, body, x_request_id="mine")))  # type: ignore[misc]
        for body in bodies
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reply.status for reply in replies] == [200, 200] and {reply.headers["x-request-id"] for reply in replies} == {"mine"}
    assert sorted(reply.json["usage"]["completion_tokens"] for reply in replies) == [20, 30]
    assert len({reply.json["id"] for reply in replies}) == 2


def _pair(server: Watched) -> list[tuple[str, dict[str, Any] | None]]:
    """Two streams side by side: the text of each, and the error it ended with."""
    socks = [opened(server, LONG | {"prompt": prompt}) for prompt in ("Lily said", "Tim and Sam went")]
    found = []
    for sock in socks:
        data = b""
        while b"data: [DONE]" not in data and (piece := sock.recv(65536)):
            data += piece
        sock.close()
        events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
        error = events[-1].get("error") if events else json.loads(data.rpartition(b"\r\n\r\n")[2])["error"]
        choices = [choice for event in events for choice in event.get("choices", [])]
        assert (error is None) == any(choice["finish_reason"] == "length" for choice in choices), "an error is not the end of an answer"
        found.append(("".join(choice["text"] for choice in choices), error))
    return found


def _faults(server: Watched) -> None:
    """A step that raises, a row of NaN, a token that is none: each ends those it hits, and the others' texts are as ever."""
    clean = [text for text, _ in _pair(server)]
    kinds = []
    for _ in range(MOST_PAIRS):
        pair = _pair(server)
        assert all(error or text == whole for (text, error), whole in zip(pair, clean, strict=True)), "the neighbour's text"
        assert all(whole.startswith(text) for (text, _), whole in zip(pair, clean, strict=True)), "nothing bad was ever told"
        kinds += [[error["code"] for _, error in pair if error]] if any(error for _, error in pair) else []
        if len(kinds) == 3:
            break
    assert len(kinds[0]) in (1, 2) and kinds[1:] == [["numerical_error"]] * 2, kinds
    assert [text for text, _ in _pair(server)] == clean, "nothing of it is in the cache"


def _dead(server: Watched) -> None:
    engine = server.watch()["engine_pid"]
    sock = opened(server, LONG | {"stream": False})
    os.kill(engine, signal.SIGKILL)
    start, clock = time.monotonic(), FairClock()
    (told,) = read_replies(sock)
    assert refused(server.seen(told, start), 503, "server_error").error["code"] == "engine_dead" and clock.seconds() < 2
    assert server.ask("GET", "/health").json == {"status": "dead"} and clock.seconds() < 2
    assert refused(server.ask("POST", COMPLETIONS, SOUND[COMPLETIONS]), 503, "server_error").headers["retry-after"].isdigit()
    while server.ask("GET", "/health").status != 200:
        assert not clock.is_past(20)
        time.sleep(0.05)
    assert server.watch()["engine_pid"] not in (0, engine)


def _salts(server: Watched) -> None:
    def cached(salt: str) -> int:
        body = {"prompt": "Once upon a time there was a secret that nobody else knew", "max_tokens": 1, "cache_salt": salt}
        found: int = server.ask("POST", COMPLETIONS, body).json["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    mark = str(time.monotonic())
    assert (cached("a" + mark), cached("b" + mark)) == (0, 0) and cached("a" + mark) > 8


def _tenants(server: Watched) -> None:
    """Each client has a secret in its prompt, repeated in its answers (`echo`); nothing else is in them but what FakeKV says to it alone.

    A third of them leave early; half of the answers are streamed.
    """
    secrets = [f"secret {number:02d}{number * 7919 % 97:02d} of a client" for number in range(CLIENTS)]
    body: dict[str, Any] = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "echo": True}
    alone = [_text(server.ask("POST", COMPLETIONS, body | {"prompt": secret})) for secret in secrets]
    assert len(set(alone)) == CLIENTS and all(text.startswith(secret) for text, secret in zip(alone, secrets, strict=True))
    wrong: list[str] = []

    def ask(number: int) -> None:
        dice = random.Random(number)
        for _ in range(8):
            asked = body | {"prompt": secrets[number], "stream": dice.random() < 0.5}
            if dice.random() < 0.3:
                opened(server, asked, dice.choice([None, -5])).close()
            elif (text := _text(server.ask("POST", COMPLETIONS, asked))) != alone[number]:
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def _text(reply: Reply) -> str:
    """Of the one choice of an answer, streamed or whole."""
    assert reply.status == 200, reply
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return str(reply.json["choices"][0]["text"])
    lines = [line[6:] for line in reply.body.replace(b"\r", b"").split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


ROWS: list[Row] = [
    acted(96, "clients that leave", _leaving, "small"),
    acted(96, "clients that leave while their prompt is read in", _leaving_while_read_in, "small"),
    acted(96, "clients that leave the queue", _leaving_the_queue, "small", canary=False),
    acted(97, "a client that does not read", _never_reading, canary=False),
    acted(99, "a full queue; 100: too long in it", _full_queue, "small"),
    acted(101, "one id for two", _own_ids),
    acted(98, "an error within a stream; 103, 104, 105: faults in a step", _faults, "faulty", canary=False),
    acted(102, "a dead engine", _dead, "faulty", canary=False),
    acted(106, "salts", _salts),
    acted(109, "512 requests of 64 clients", _tenants, "optimized", canary=False),
]
