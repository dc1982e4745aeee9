"""Measures what a burst of large bodies does to others: /health, a running stream, and the event loop of the API process.

    python bench/body_burst.py [--bodies 800] [--ids 16384] [--rounds 3] [MODEL] [-- FLAGS OF octavo serve]

The engine is FakeKV, so no model hides the cost. The burst is sent by a process of its own. CPU is the CPU time of the API process, which
other programs on the machine change little: its longest turn of the event loop, and its CPU time between a request and the answer.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import re
import sys
import threading
import time
from collections import Counter
from multiprocessing.queues import SimpleQueue
from operator import itemgetter

from octavo.engine.stall_watch import SAID
from tests.support.fair_clock import cpu_seconds
from tests.support.http_client import Connection, request_bytes
from tests.support.server_process import ServerProcess

WATCHED = "tests.support.watched_server"
LONG_TURN = re.compile(rf"{SAID} (\d+) ms")
VOCABULARY = 40_000
CONTEXT = multiprocessing.get_context("fork")
OVERRIDES = json.dumps({"max_position_embeddings": 20_000})


async def _burst(server: ServerProcess, bodies: list[bytes], count: int) -> Counter[int]:
    async def one(number: int) -> int:
        connection = Connection(server)
        await connection.send(bodies[number % len(bodies)])
        status = (await connection.reply()).status
        connection.close()
        return status

    return Counter(await asyncio.gather(*(one(number) for number in range(count))))


def _send_burst(server: ServerProcess, bodies: list[bytes], count: int, answers: "SimpleQueue[tuple[float, dict[int, int]]]") -> None:
    start = time.monotonic()
    statuses = asyncio.run(_burst(server, bodies, count))
    answers.put((time.monotonic() - start, dict(statuses)))


def _ask_health(server: ServerProcess, over: threading.Event, found: list[tuple[float, float]]) -> None:
    while not over.is_set():
        start, before = time.monotonic(), cpu_seconds(server.process.pid)
        assert server.ask("GET", "/health").status == 200
        found.append((time.monotonic() - start, cpu_seconds(server.process.pid) - before))
        time.sleep(0.02)


def _read_stream(server: ServerProcess, over: threading.Event, gaps: list[tuple[float, float]]) -> None:
    async def read() -> None:
        connection = Connection(server)
        await connection.send(request_bytes("/v1/completions", {"prompt": [1], "max_tokens": 16_000, "ignore_eos": True, "stream": True}))
        status, _ = await connection.head()
        assert status == 200, await connection.piece()
        await connection.piece()
        last = time.monotonic(), cpu_seconds(server.process.pid)
        while not over.is_set() and await connection.piece():
            now = time.monotonic(), cpu_seconds(server.process.pid)
            gaps.append((now[0] - last[0], now[1] - last[1]))
            last = now
        connection.close(at_once=True)

    asyncio.run(read())


def measure(server: ServerProcess, bodies: list[bytes], count: int) -> str:
    over, health, gaps = threading.Event(), list[tuple[float, float]](), list[tuple[float, float]]()
    work = ((_ask_health, health), (_read_stream, gaps))
    others = [threading.Thread(target=target, args=(server, over, found)) for target, found in work]
    for each in others:
        each.start()
    time.sleep(1)
    seen = len(server.stderr)
    before, answers = cpu_seconds(server.process.pid), CONTEXT.SimpleQueue()
    sender = CONTEXT.Process(target=_send_burst, args=(server, bodies, count, answers))
    del health[:], gaps[:]
    sender.start()
    seconds, statuses = answers.get()
    sender.join()
    spent = cpu_seconds(server.process.pid) - before
    turns = [int(milliseconds) / 1000 for milliseconds in LONG_TURN.findall(server.stderr[seen:])]
    over.set()
    for each in others:
        each.join()
    (late, late_cpu), (gap, gap_cpu) = max(health, key=itemgetter(1)), max(gaps, key=itemgetter(1))
    return (
        f"{seconds:.2f} s for all, {spent:.2f} s CPU; longest turn {max(turns, default=0):.3f} s CPU, "
        f"health {late:.3f} s ({late_cpu:.2f} CPU), gap of the stream {gap:.3f} s ({gap_cpu:.2f} CPU); {json.dumps(statuses)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--bodies", type=int, default=800)
    parser.add_argument("--ids", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3)
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, flags = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    dice = random.Random(0)
    bodies = [
        request_bytes("/v1/completions", {"prompt": [dice.randrange(VOCABULARY) for _ in range(args.ids)], "max_tokens": 1})
        for _ in range(8)
    ]
    env = {"OCTAVO_DEBUG": "runner=fake,loop.slow=10", "OCTAVO_LOG_LEVEL": "ERROR"}
    given = [*([args.model] if args.model else []), "--num-gpu-blocks-override", "20000", "--max-model-len", "20000"]
    given += ["--hf-overrides", OVERRIDES, *flags]
    server = ServerProcess(WATCHED, *given, env=env, watch="")
    try:
        for _ in range(args.rounds):
            print(measure(server, bodies, args.bodies), flush=True)
    finally:
        server.process.kill()


if __name__ == "__main__":
    main()
