"""Measures what HTTP costs: the same load offline and over HTTP in turn, and streams on FakeKV, where no model hides the cost.

    python bench/serving_cost.py [MODEL]              batch32 of `octavo bench`, offline and over HTTP, as a ratio
    python bench/serving_cost.py --fake [MODEL]       streamed tokens a second, and how late the API process's event loop was
    python bench/serving_cost.py --engines [MODEL]    the same tokens a second of three engines beside one, by the number of API processes

Server and client share this machine's cores, so besides tokens a second there is what the API process would carry on a core of its own.
"""

import argparse
import asyncio
import os
import statistics
import time

from octavo import LLM, SamplingParams, log
from octavo.bench.workload import Workload, text_ids, text_loads
from tests.support.http_client import Connection, request_bytes
from tests.support.server_process import ServerProcess

WATCHED = "tests.support.watched_server"
THREADS = os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))  # of both engines
PROMPT = 16  # tokens of a stream on FakeKV


async def stream_all(server: ServerProcess, workload: list[tuple[list[int], int]], path: str = "/v1/completions") -> int:
    """Sends all requests at once, and reads every stream to its end. Returns how many events came."""

    async def one(ids: list[int], count: int) -> int:
        connection = Connection(server)
        body = {"prompt": ids, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True}
        await connection.send(request_bytes(path, body))
        status, _ = await connection.head()
        assert status == 200
        events, last = 0, b""
        while piece := await connection.piece():
            events, last = events + piece.count(b"data: "), piece
        assert last.endswith(b"data: [DONE]\n\n") and b'"error"' not in last
        connection.close()
        return events

    return sum(await asyncio.gather(*(one(ids, count) for ids, count in workload)))


def against_offline(model: str | None, rounds: int) -> None:
    with LLM(model, enable_prefix_caching=False) as llm:
        workload: Workload = text_loads(text_ids(llm.get_tokenizer()))["batch32"]
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in workload.requests]
        flags = [*([model] if model else []), "--no-enable-prefix-caching"]
        with ServerProcess(WATCHED, *flags, env={"OMP_NUM_THREADS": THREADS}, watch="") as server:
            ratios = []
            for number in range(rounds + 1):
                start = time.perf_counter()
                llm.generate([ids for ids, _ in workload.requests], params, use_tqdm=False)
                offline = time.perf_counter() - start
                start = time.perf_counter()
                asyncio.run(stream_all(server, workload.requests))
                http = time.perf_counter() - start
                if number:  # the first warms both up
                    ratios.append(offline / http)
                    tokens = workload.output_tokens
                    print(f"offline {tokens / offline:,.0f} tokens/s, HTTP {tokens / http:,.0f}: {ratios[-1]:.1%}", flush=True)
            print(f"median of {rounds}: {statistics.median(ratios):.1%}")


def of_engines(model: str | None, rounds: int, streams: int, count: int, step_ms: int) -> None:
    """A step takes its time and has rows for few of the streams, so three engines can do three times as much as one.

    Streams differ in length. If all were equal, an engine that gets one more than it has rows for would need as long for it as for all
    the others of a round, and the figure would be about that one.
    """
    flags = ("--num-gpu-blocks-override", "4000", "--max-num-seqs", str(streams // 24))
    env = {"OCTAVO_DEBUG": f"runner=fake,forward.sleep={step_ms}", "OCTAVO_LOG_LEVEL": "ERROR"}
    workload = [([100 + number] * PROMPT, count // 2 + number * 7 % count) for number in range(streams)]
    tokens = sum(length for _, length in workload)
    for processes in (1, 2):
        speeds: dict[int, list[float]] = {1: [], 3: []}
        for engines in [1, 3] * rounds:
            more = ("-dp", str(engines), "--api-processes", str(processes))
            with ServerProcess("octavo serve", *([model] if model else []), *flags, *more, env=env, watch="") as server:
                asyncio.run(stream_all(server, [(ids, 4) for ids, _ in workload]))
                start = time.perf_counter()
                asyncio.run(stream_all(server, workload))
                speeds[engines].append(tokens / (time.perf_counter() - start))
        one, three = statistics.median(speeds[1]), statistics.median(speeds[3])
        print(f"{processes} API process(es): one engine {one:,.0f} tokens/s, three {three:,.0f}: {three / one:.2f} times", flush=True)


def on_fake(model: str | None, rounds: int, streams: int, count: int, step_ms: int) -> None:
    flags = ("--num-gpu-blocks-override", "20000", "--max-num-seqs", str(streams))
    env = {"OCTAVO_DEBUG": "runner=fake" + (f",forward.sleep={step_ms}" if step_ms else ""), "OCTAVO_LOG_LEVEL": "ERROR"}
    with ServerProcess(WATCHED, *([model] if model else []), *flags, env=env, watch="") as server:
        workload = [([100 + number] * PROMPT, count) for number in range(streams)]
        speeds = []
        for number in range(rounds + 1):
            before, start = server.ask("GET", "/watch").json, time.perf_counter()
            events = asyncio.run(stream_all(server, workload))
            seconds, after = time.perf_counter() - start, server.ask("GET", "/watch").json
            if number:
                tokens, used = streams * count, after["cpu_seconds"] - before["cpu_seconds"]
                speeds.append(tokens / used)
                lag = after["lag_p99_ms"]
                print(f"{tokens / seconds:,.0f} tokens/s in {events:,} events; a core here {tokens / used:,.0f}; p99 lag {lag:.1f} ms")
        print(f"median of {rounds}: {statistics.median(speeds):,.0f} tokens a second of the API process")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--engines", action="store_true", help="three engines beside one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--step-ms", type=int, default=0, help="with --fake: how long a step takes; 0: no time")
    arguments = parser.parse_args()
    log.setup("WARNING")
    if arguments.engines:
        of_engines(arguments.model, arguments.rounds, arguments.streams, arguments.tokens, arguments.step_ms)
    elif arguments.fake:
        on_fake(arguments.model, arguments.rounds, arguments.streams, arguments.tokens, arguments.step_ms)
    else:
        against_offline(arguments.model, arguments.rounds)
