"""Engines of a real model die and stop in turn under 64 clients: no client sees an error, and every answer is that of a quiet server."""

import asyncio
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.server.test_replicas import engines, ready
from tests.support.http_client import Connection
from tests.support.http_server import wait_for
from tests.support.server_process import Reply, ServerProcess

# Logprobs of other batches differ by rounding. A seed or no noise at all: what is asked again must be answered again.
CLOSE = 1e-3
NOTICED_SECONDS = 30  # within which a loss is noticed
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 4},
    {"seed": 5, "n": 3},
    {"temperature": 0, "repetition_penalty": 1.2, "min_tokens": 20},
    {"seed": 6, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"seed": 7, "stop": ["mom", "the"]},
    {"temperature": 0, "logprobs": 3},
    {"seed": 8, "n": 2, "logprobs": 1},
    {"temperature": 0, "structured_outputs": {"regex": "[A-Z][a-z ,]{50}[.]"}},
    {"seed": 9, "bad_words": ["Lily", "Tim"]},
]
PROMPTS = ["Once upon a time", "Tim and Sam went to the park. They saw", "One day, a big dog", "Lily had a red ball and"]
FLAGS = ("-dp", "3", "--dtype", "float32", "--num-gpu-blocks-override", "600", "--max-num-seqs", "32", "--max-restarts", "100")


def question(number: int) -> dict[str, Any]:
    is_stream = number % 3 > 0
    more = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
    prompt = f"{PROMPTS[number % 4]} {number % 7}"
    return {"prompt": prompt, "max_tokens": 40 + number % 60, "include_timings": True, **KINDS[number % len(KINDS)], **more}


@dataclass
class Answer:
    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[str]] = field(default_factory=dict)  # of logprobs
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    resumed: int = 0

    def add(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        for choice in event["choices"]:
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if choice["finish_reason"] is not None:
                self.ends[index] = choice["finish_reason"]
            if choice["logprobs"] is not None:
                self.tokens.setdefault(index, []).extend(choice["logprobs"]["tokens"])
                self.logprobs.setdefault(index, []).extend(choice["logprobs"]["token_logprobs"])
        if usage := event.get("usage"):
            self.usage = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
            self.resumed = event["timings"]["resumed"]

    def is_like(self, other: "Answer") -> bool:
        close = all(
            abs(one - two) < CLOSE
            for index, values in self.logprobs.items()
            for one, two in zip(values, other.logprobs[index], strict=True)
        )
        same = (self.texts, self.ends, self.tokens, self.usage) == (other.texts, other.ends, other.tokens, other.usage)
        return same and close


def answer_of(reply: Reply) -> Answer:
    assert reply.status == 200, reply
    answer, body = Answer(), reply.body.decode()
    events = re.findall(r"data: (\{.*\})\n\n", body) if body.startswith("data: ") else [body]
    for event in events:
        answer.add(json.loads(event))
    return answer


async def asked(server: ServerProcess, number: int) -> Answer:
    connection = Connection(server)
    try:
        return answer_of(await connection.ask("/v1/completions", question(number)))
    finally:
        connection.close()


async def one_by_one(server: ServerProcess, clients: int) -> list[Answer]:
    return [await asked(server, number) for number in range(clients)]


Blow = Callable[[ServerProcess, random.Random], None]  # ends an engine


def kill_or_stop(server: ServerProcess, rng: random.Random) -> None:
    os.kill(rng.choice(sorted(engines(server).values())), rng.choice([signal.SIGKILL, signal.SIGSTOP]))


async def clients(server: ServerProcess, quiet: list[Answer], end: float) -> tuple[int, int]:
    """Returns how many were answered as on the quiet server, and how many of them moved."""
    answered = moved = 0

    async def client(number: int) -> None:
        nonlocal answered, moved
        while time.monotonic() < end:
            number = (number + 13) % len(quiet)
            found = await asked(server, number)
            assert found.is_like(quiet[number]), f"{question(number)}: {found} and not {quiet[number]}"
            answered, moved = answered + 1, moved + (found.resumed > 0)

    await asyncio.gather(*(client(number) for number in range(len(quiet))))
    return answered, moved


def nothing_is_held(server: ServerProcess) -> bool:
    told = server.ask("GET", "/metrics").body.decode()
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(set(re.findall(rf"octavo:{gauge}{{[^}}]*}} (\S+)", told)) == {"0.0"} for gauge in gauges)


def storm(server: ServerProcess, quiet: list[Answer], seconds: float, blow: Blow) -> tuple[int, int, int]:
    """Returns how many were answered, how many of them moved, and how many engines died. Clients have a thread of their own, for a blow
    may take long, and Ray starts nodes in the main thread alone."""
    rng, end, deaths = random.Random(11), time.monotonic() + seconds, 0
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(asyncio.run, clients(server, quiet, end))
        while time.monotonic() < end and not served.done():
            time.sleep(rng.uniform(1.0, 3.0))
            if ready(server)[0] == 3:  # whoever loses two engines without a token between is failed
                blow(server, rng)
                deaths += 1
                wait_for(lambda: ready(server)[0] < 3)  # until then all would still seem to be well
        return *served.result(), deaths


def survives(folder: str, num_clients: int, seconds: float, deaths: int, *flags: str, blow: Blow = kill_or_stop) -> str:
    with ServerProcess("octavo serve", folder, *FLAGS, *flags, env={"OMP_NUM_THREADS": "1"}, watch="") as server:
        wait_for(lambda: ready(server) == (3, 3))
        quiet = asyncio.run(one_by_one(server, num_clients))
        before = server.memory("VmRSS")
        try:
            answered, moved, died = storm(server, quiet, seconds, blow)
        except Exception as error:
            error.add_note(server.stderr[-20_000:])
            raise
        assert died >= deaths and moved > 0, (answered, moved, died)
        wait_for(lambda: ready(server) == (3, 3))
        wait_for(lambda: nothing_is_held(server))  # an API process hears it with the next beats
        grown = server.memory("VmRSS") - before
        assert grown < 50 * 2**20, f"the API process grew by {grown >> 20} MiB"
        return f"{answered} answers, {moved} moved, {died} engines died, {grown / 2**20:+.1f} MiB"


# promise: data-parallel-size
@pytest.mark.soak
def test_no_client_of_sixteen_sees_engines_of_a_model_die(endless: str) -> None:
    survives(endless, 16, 6, 1)


@pytest.mark.soak
def test_no_client_of_64_sees_engines_of_a_model_die_for_two_minutes(endless: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = survives(endless, 64, 120, 10)
    with capsys.disabled():
        print(f"\nstorm of engines: {told}")
