"""Measures what watching costs: in turn without the inspector, with it but no watcher, and watched at ten frames a second.

    python bench/view_cost.py                     steps on FakeKV in this process: seconds of CPU for 32 sequences that decode
    python bench/view_cost.py --model [MODEL]     batch32 of `octavo bench` over HTTP: wall time, and CPU of engine and API process

Figures are medians of ratios to the same round's run without. CPU time is told beside wall time because it depends less on what else runs.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Literal

from octavo.bench.workload import text_ids, text_loads
from octavo.config import Debug, EngineConfig
from octavo.engine.core import EngineCore
from octavo.inspector.engine_view import EngineView
from octavo.loading.text_side import open_text_side
from octavo.messages import AddRequest, Limits
from octavo.policy.block_pool import BlockPool
from octavo.policy.cache_spec import CacheGeometry
from octavo.policy.kv_manager import KVManager
from octavo.policy.scheduler import Scheduler
from octavo.sampling_params import SamplingParams
from octavo.worker.fake_runner import FakeRunner
from octavo.worker.faults import Faults
from tests.support.http_client import Connection
from tests.support.server_process import ServerProcess

WATCHED = "tests.support.watched_server"
Way = Literal["without", "unwatched", "watched"]
WAYS: tuple[Way, ...] = ("without", "unwatched", "watched")
ROWS, BLOCK, COUNT, VOCAB = 32, 16, 400, 1000
FRAME_SECONDS = 0.1


def fake_core() -> EngineCore:
    num_blocks, max_len = ROWS * (COUNT // BLOCK + 4), COUNT + 64
    kv = KVManager(BlockPool(num_blocks), BLOCK, caching=True, key=b"bench", identity=b"bench")
    scheduler = Scheduler(kv, Limits(ROWS, 4096, max_len, VOCAB, num_blocks, BLOCK))
    runner = FakeRunner(CacheGeometry(num_blocks, BLOCK, max_len, 1), VOCAB, Faults(Debug()))
    for number in range(ROWS):
        scheduler.add(AddRequest(str(number), [number] * (BLOCK + number % BLOCK), SamplingParams(max_tokens=COUNT, ignore_eos=True)))
    return EngineCore(scheduler, runner, depth=1)


def fake_seconds(way: Way, clock: Callable[[], float] = time.process_time) -> float:
    """Returns the CPU seconds of a step. A step stands for one of 10 ms, so a frame is sent every ten steps."""
    core = fake_core()
    view = None if way == "without" else EngineView(core.scheduler)
    core.traces += [] if view is None else [view]
    if view is not None and way == "watched":
        view.ask("w", "full")
    steps, start = 0, clock()
    while core.has_work:
        core.step()
        steps += 1
        if view is not None and steps % 10 == 0:
            view.frames(busy=False)
            view.ask("w", "delta") if way == "watched" else None
    return (clock() - start) / steps


def on_fake(rounds: int) -> None:
    ratios: dict[Way, list[float]] = {"unwatched": [], "watched": []}
    steps: list[float] = []
    for number in range(rounds + 1):
        seconds = {way: fake_seconds(way) for way in (WAYS if number % 2 else WAYS[::-1])}
        if number:
            steps.append(seconds["without"])
            for way, found in ratios.items():
                found.append(seconds[way] - seconds["without"])
    base = statistics.median(steps)
    print(f"a step on FakeKV of {ROWS} rows: {base * 1e6:,.0f} us of CPU, {1 / base:,.0f} a second")
    for way, found in ratios.items():
        print(f"{way}: {statistics.median(found) * 1e6:+,.1f} us a step, {statistics.median(found) / base:+.2%} (median of {rounds})")


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        words = file.read().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


async def one_load(server: ServerProcess, workload: list[tuple[list[int], int]], watched: bool) -> tuple[float, int]:
    """Returns the seconds of the load, and how many frames were read meanwhile."""
    frames = 0

    async def watch() -> None:
        nonlocal frames
        connection = Connection(server)
        await connection.send(f"GET /v1/view HTTP/1.1\r\nhost: {server.host}:{server.port}\r\n\r\n".encode())
        await connection.head()
        try:
            while piece := await connection.piece():
                frames += piece.count(b"\n")
        finally:
            connection.close(at_once=True)

    async def ask(ids: list[int], count: int) -> None:
        body = {"prompt": ids, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        reply = await Connection(server).ask("/v1/completions", body)
        assert reply.status == 200 and json.loads(reply.body)["usage"]["completion_tokens"] == count

    watching = asyncio.create_task(watch()) if watched else None
    await asyncio.sleep(0.5)
    start = time.perf_counter()
    await asyncio.gather(*(ask(ids, count) for ids, count in workload))
    seconds = time.perf_counter() - start
    if watching is not None:
        watching.cancel()
        await asyncio.wait({watching})
    await asyncio.sleep(0.3)
    return seconds, frames


def on_model(model: str | None, rounds: int) -> None:
    text = open_text_side(EngineConfig(model=model))
    assert text.tokenizer is not None
    workload = text_loads(text_ids(text.tokenizer))["batch32"].requests
    ratios: list[tuple[float, float]] = []
    with ServerProcess(WATCHED, *([model] if model else []), "--no-enable-prefix-caching", watch="") as server:
        engine = server.ask("GET", "/watch").json["engine_pid"]
        for number in range(rounds + 1):
            found = {}
            for watched in (True, False) if number % 2 else (False, True):
                before = cpu_seconds(engine), cpu_seconds(server.process.pid)
                seconds, frames = asyncio.run(one_load(server, workload, watched))
                after = cpu_seconds(engine), cpu_seconds(server.process.pid)
                found[watched] = seconds, after[0] - before[0], after[1] - before[1], frames
            if number:  # the first warms it up
                (wall, cpu, api, frames), (plain_wall, plain_cpu, plain_api, _) = found[True], found[False]
                ratios.append((wall / plain_wall - 1, cpu / plain_cpu - 1))
                print(
                    f"watched {wall:.2f} s ({frames / wall:.1f} frames a second), CPU of engine {cpu:.2f} s and API process {api:.2f} s; "
                    f"not watched {plain_wall:.2f} s, {plain_cpu:.2f} s and {plain_api:.2f} s",
                    flush=True,
                )
    wall_more, cpu_more = (statistics.median(each) for each in zip(*ratios))
    print(f"median of {rounds}: {wall_more:+.2%} wall time, {cpu_more:+.2%} of the engine's CPU")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="?", const="", help="with a model, or the default one")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    if arguments.model is None:
        on_fake(arguments.rounds)
    else:
        on_model(arguments.model or None, arguments.rounds)
