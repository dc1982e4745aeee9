"""A storm over HTTP: many clients, requests of all kinds, some of them left at any byte, some with too little time.

What is left must be whole, and exact: the text of the offline engine or, where tools are called, that of the server while it was quiet.
"""

import asyncio
import os
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from tests.support.fair_clock import FairClock
from tests.support.http_client import Connection, answer_of, choices_of, request_bytes
from tests.support.server_process import Reply, ServerProcess

WATCHED = "tests.support.watched_server"
FLAGS = (
    "--num-gpu-blocks-override", "60", "--block-size", "4", "--max-model-len", "200",
    "--max-num-seqs", "24", "--max-num-batched-tokens", "64", "--tool-call-parser", "hermes",
)  # fmt: skip
CLIENTS = 64
LEAVING = 0.3
HURRIED = 0.1
DEADLINES = (0.002, 0.05, 0.2, 60)  # seconds: too few for all, for some, and for none
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": CITY}} for name in ("sun", "rain")]
WORDS = ["Once", " upon", " a", " time", " there", " was", " Lily", " dog", " é", " 🐕"]


@dataclass(frozen=True)
class Case:
    path: str
    body: dict[str, Any]
    n: int
    expected: list[tuple[str, str | None]]


def cases(folder: str, count: int, monkeypatch: pytest.MonkeyPatch, seed: int = 5) -> list[Case]:
    """Questions, with what the offline engine answers on FakeKV."""
    rng = random.Random(seed)
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=fake")
    asked, params = [], []
    for number in range(count):
        text = "".join(rng.choices(WORDS, k=rng.randrange(1, 9)))
        given = {"temperature": 1.0, "seed": number, "max_tokens": rng.randrange(1, 24), "n": rng.choice((1, 1, 1, 2, 3))}
        if rng.random() < 0.3:
            given["stop"] = rng.sample(["e", "th", " a", "no such text"], 2)
        params.append(SamplingParams(**given))  # type: ignore[arg-type]
        if rng.random() < 0.5:
            asked.append(("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **given}))
        else:
            asked.append(("/v1/completions", {"prompt": text, **given}))
    with LLM(folder, num_gpu_blocks_override=400) as llm:

        def answer(body: dict[str, Any], given: SamplingParams) -> RequestOutput:
            if "messages" in body:
                return llm.chat(body["messages"], given, use_tqdm=False)[0]
            return llm.generate(body["prompt"], given, use_tqdm=False)[0]

        outputs = [answer(body, each) for (_, body), each in zip(asked, params)]
    monkeypatch.delenv("OCTAVO_DEBUG")
    return [
        Case(path, body | {"stream": rng.random() < 0.6}, each.n, [(sample.text, sample.finish_reason) for sample in output.outputs])
        for (path, body), each, output in zip(asked, params, outputs)
    ]


def tool_cases(server: ServerProcess, count: int, seed: int = 6) -> list[Case]:
    """Questions with tools, with what the server answers while it has nothing else to do."""
    rng, found = random.Random(seed), []
    for number in range(count):
        body = {"messages": [{"role": "user", "content": "".join(rng.choices(WORDS, k=3))}], "temperature": 1.0, "seed": number}
        forced = number % 2 == 0
        body |= {"tools": TOOLS, "tool_choice": "required" if forced else "auto", "parallel_tool_calls": False}
        body |= {"max_tokens": 120 if forced else 12, "n": rng.choice((1, 1, 2))}
        expected = choices_of(server.ask("POST", "/v1/chat/completions", body))
        for text, end in expected if forced else []:
            assert end == "tool_calls" and re.fullmatch(r'(sun|rain)\{\s*"city":\s*"(Paris|Oslo)"\s*\}', text), text
        found.append(Case("/v1/chat/completions", body | {"stream": number % 4 < 2}, len(expected), expected))
    return found


def how_it_ended(reply: Reply, case: Case) -> str:
    """Exact; or as far as it came in time, if it had a deadline."""
    found, error = answer_of(reply, case.n)
    if error is None:
        assert found == case.expected, f"{case} was answered with {reply}"
        return "called" if any(end == "tool_calls" for _, end in found) else "streamed" if case.body["stream"] else "whole"
    assert error == "deadline_exceeded" and reply.status in (200, 504) and "timeout" in case.body, f"{case} was answered with {reply}"
    for (text, end), (whole, its_end) in zip(found, case.expected, strict=True):
        assert whole.startswith(text) and end in (None, its_end), f"{case} was answered with {reply}"
    return "late" if reply.status == 504 else "cut off"


async def storm(server: ServerProcess, questions: list[Case], requests: int, seed: int, leaving: float = LEAVING) -> Counter[str]:
    """What happened; every answer that was read to its end was right."""
    happened = Counter[str]()

    async def client(number: int) -> None:
        rng, connection = random.Random(f"{seed} {number}"), Connection(server)
        for _ in range(requests // CLIENTS):
            case = rng.choice(questions)
            if rng.random() < HURRIED:
                case = replace(case, body=case.body | {"timeout": rng.choice(DEADLINES)})
            if rng.random() < leaving:
                data = request_bytes(case.path, case.body)
                await connection.leave_after(data, rng.randrange(len(data) + 3000), at_once=rng.random() < 0.5)
                happened["left"] += 1
            else:
                happened[how_it_ended(await connection.ask(case.path, case.body), case)] += 1
        connection.close()

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(number))
    return happened


def held(server: ServerProcess) -> dict[str, int]:
    """What the two processes hold besides their memory."""
    seen = server.ask("GET", "/watch").json
    time.sleep(0.02)  # the connection of this question is gone
    fds = {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in (("api_fds", server.process.pid), ("engine_fds", seen["engine_pid"]))}
    return {name: seen[name] for name in ("requests", "streams", "tasks", "running", "waiting", "held_blocks")} | fds


def held_at_rest(server: ServerProcess) -> dict[str, int]:
    """Once what closing connections leave behind for a moment is gone, too: nothing changes for a while."""
    seen = [held(server)]
    while len(seen) < 10:
        now = held(server)
        seen = [*seen, now] if now == seen[-1] else [now]
    return seen[-1]


def seconds_until_idle(server: ServerProcess, before: dict[str, int], most: float = 60.0) -> float:
    """As little as before, once the stats of the engine's last beat are in."""
    clock = FairClock()
    while (now := held(server)) != before and not clock.is_past(most):
        time.sleep(0.02)
    assert now == before, f"held after {most:g} s: {now}, before: {before}"
    return clock.seconds()


def anonymous_bytes(pid: int) -> int:
    """What a process has written and still holds, in memory or swapped out."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))
