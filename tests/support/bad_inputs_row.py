"""`Row`: a row of the table of bad inputs, told as what is sent and what must come back."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from tests.support.bad_inputs_watch import Watched
from tests.support.server_process import Reply

Place = Literal["stories", "optimized", "locked", "small", "faulty"]  # the servers of tests/server/test_bad_inputs.py
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Once upon a time"}]
SOUND: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Once upon a time", "max_tokens": 2},
    CHAT: {"messages": HELLO, "max_tokens": 2},
    RESPONSES: {"input": "Once upon a time", "max_output_tokens": 2},
}
PAUSE = 0.005  # seconds between attempts: what is asked is what bad inputs do to others, not what many requests do
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(frozen=True)
class Row:
    number: int
    name: str
    make: Callable[[Watched], Callable[[], None]]  # what is large is made before the watch begins: it would cost the canary its time
    place: Place = "stories"
    canary: bool = True  # False: what happens is work or trouble for all, and the row itself looks after those it must not reach

    @property
    def id(self) -> str:
        return f"{self.number} {self.name}"


@dataclass(frozen=True)
class Attempt:
    """A body to a path, and the answer it must get."""

    path: str
    body: bytes | object
    status: int = 400
    param: str | None = "*"  # "*": whatever; "stop": it or a place in it
    code: str | None = "*"

    def check(self, reply: Reply) -> None:
        assert reply.status == self.status, f"{self}: {reply}"
        if self.status == 200:
            return
        error = reply.error
        assert error["type"] == TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error"), reply
        assert len(error["message"]) < 500 and reply.headers["x-request-id"].startswith("req-"), reply
        found, place = error["param"] or "", self.param or ""
        assert place == "*" or found == place or found.startswith((f"{place}[", f"{place}.")), f"{self}: {reply}"
        assert self.code == "*" or error["code"] == self.code, reply

    def __str__(self) -> str:
        return f"{self.path} {str(self.body)[:200]}"


def row(number: int, name: str, attempts: Callable[[], Sequence[Attempt]] | Sequence[Attempt], place: Place = "stories") -> Row:
    """One attempt after the other, each on a connection of its own."""

    def make(server: Watched) -> Callable[[], None]:
        listed = attempts() if callable(attempts) else attempts
        encoded = [one.body if isinstance(one.body, bytes) else json.dumps(one.body, ensure_ascii=False).encode() for one in listed]

        def run() -> None:
            for one, data in zip(listed, encoded, strict=True):
                one.check(server.ask("POST", one.path, data, content_type="application/json"))
                time.sleep(PAUSE)

        return run

    return Row(number, name, make, place)


def acted(number: int, name: str, act: Callable[[Watched], None], place: Place = "stories", canary: bool = True) -> Row:
    return Row(number, name, lambda server: partial(act, server), place, canary)


def fields(name: str, values: Sequence[Any], *paths: str, status: int = 400, param: str | None = None) -> list[Attempt]:
    """A sound request but for this field."""
    return [Attempt(path, SOUND[path] | {name: value}, status, param or name) for path in paths for value in values]


def numbers(name: str, *paths: str) -> list[Attempt]:
    """Numbers that are none: what JSON has no word for, and what a float cannot hold."""
    return [
        Attempt(path, (json.dumps(SOUND[path])[:-1] + f', "{name}": {word}}}').encode(), param=name)
        for path in paths
        for word in ("NaN", "Infinity", "-Infinity", "1e400")
    ]
