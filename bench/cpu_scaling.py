"""How Octavo and llama.cpp scale on the CPU, in turn at every point: with concurrent streams, and with the length of the context.

    python bench/cpu_scaling.py [--rounds 3] [--json scaling.json] [--picture scaling.svg]

Streams arrive together, each with 128 tokens in and 64 out. A context of N is a prompt of N - 64 tokens and 64 out, one stream.
Set-up, weights and environments are those of cpu_peers.py, llama.cpp with and without its flash attention; all processes stay open,
and one of them computes at a time.
"""

import argparse
import json
import statistics
import sys
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from random import Random

from bench.cpu_peers import DEFAULT_ENVS
from bench.peers.engines import llama, octavo
from bench.peers.lines import Curve, Plot, draw
from bench.peers.process import EngineProcess, Reply, Requests
from octavo.bench.figures import Figure, number
from octavo.bench.workload import text_ids
from octavo.loading.resolve import resolve_model
from octavo.loading.text_side import load_tokenizer
from octavo.worker.machine import cpu_model, num_threads

STREAMS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
INPUT, OUTPUT = 128, 64

Point = dict[str, float]  # tokens/s, and gaps between tokens in ms: p50, p95


def streams_at(text: list[int], count: int) -> Requests:
    rng = Random(count)
    return [(_cut(text, INPUT, rng), OUTPUT) for _ in range(count)]


def context_of(text: list[int], length: int) -> Requests:
    return [(_cut(text, length - OUTPUT, Random(length)), OUTPUT)]


def _cut(text: list[int], length: int, rng: Random) -> list[int]:
    start = rng.randrange(len(text) - length)
    return text[start : start + length]


def point(reply: Reply, decode_only: bool) -> Point:
    """Returns the throughput of the whole call, or of one stream after its first token; and the gaps of all streams."""
    gaps = Figure("ms", [1e3 * (after - before) for times in reply.times for before, after in pairwise(times)])
    if decode_only:
        (times,) = reply.times
        rate = (len(times) - 1) / (times[-1] - times[0])
    else:
        rate = sum(len(answer) for answer in reply.answers) / reply.seconds
    return {"tokens_per_second": rate, "p50_ms": gaps.at(50), "p95_ms": gaps.at(95)}


def median_point(points: list[Point]) -> Point:
    return {name: statistics.median(one[name] for one in points) for name in points[0]}


def measure(processes: dict[str, EngineProcess], requests: Requests, rounds: int, decode_only: bool) -> dict[str, Point]:
    found: dict[str, list[Point]] = {name: [] for name in processes}
    for _ in range(rounds):
        for name, process in processes.items():
            found[name].append(point(process.call(requests), decode_only))
    return {name: median_point(points) for name, points in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most-streams", type=int, default=STREAMS[-1])
    parser.add_argument("--longest", type=int, default=CONTEXTS[-1], help="context, in tokens")
    parser.add_argument("--envs", type=Path, default=DEFAULT_ENVS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    source = resolve_model(None)
    text = text_ids(load_tokenizer(source))
    args.envs.mkdir(parents=True, exist_ok=True)
    engines = [octavo("packed"), llama(source, args.envs), llama(source, args.envs, flash=True)]
    plans = {
        "streams": {count: streams_at(text, count) for count in STREAMS if count <= args.most_streams},
        "context": {length: context_of(text, length) for length in CONTEXTS if length <= args.longest},
    }
    found: dict[str, dict[int, dict[str, Point]]] = {kind: {} for kind in plans}
    with ExitStack() as stack:
        processes = {engine.label: stack.enter_context(engine.start()) for engine in engines}
        measure(processes, streams_at(text, 1), 1, decode_only=False)  # a warm-up
        for kind, requests in plans.items():
            for number_of, each in requests.items():
                found[kind][number_of] = measure(processes, each, args.rounds, decode_only=kind == "context")
                _say(kind, number_of, found[kind][number_of])
    if args.json:
        content = {"command": sys.argv, "cpu": cpu_model(), "threads": num_threads(), "rounds": args.rounds, **found}
        args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if args.picture:
        small = f"{source.name}, Q4_1; {cpu_model()}, {num_threads()} threads; medians of {args.rounds}; dashed: p95"
        title = "Octavo and llama.cpp on the CPU: many streams, long contexts"
        args.picture.write_text(draw(title, [_plots(kind, points) for kind, points in found.items() if points], small), encoding="utf-8")


def _say(kind: str, number_of: int, points: dict[str, Point]) -> None:
    rows = [(name, *(number(each[key]) for key in ("tokens_per_second", "p50_ms", "p95_ms"))) for name, each in points.items()]
    cells = [f"{name} {rate} tokens/s, {p50} ms (p95 {p95})" for name, rate, p50, p95 in rows]
    print(f"{kind} {number_of:5}: {'; '.join(cells)}", flush=True)


def _plots(kind: str, points: dict[int, dict[str, Point]]) -> list[Plot]:
    title = "tokens/s, by streams" if kind == "streams" else "decode, tokens/s, by context"
    names = list(next(iter(points.values())))

    def values(name: str, key: str) -> list[float]:
        return [each[name][key] for each in points.values()]

    rates = [Curve(name, values(name, "tokens_per_second")) for name in names]
    gaps = [Curve(name, values(name, "p50_ms"), values(name, "p95_ms")) for name in names]
    return [Plot(title, list(points), rates), Plot("time between tokens, ms", list(points), gaps)]


if __name__ == "__main__":
    main()
