"""Measures what requests that wait for blocks cost a running stream, over HTTP.

    python bench/waiting_requests.py [--waiting 40] [--prefix 29000] [--block-size 16] [--seconds 5]

The engine is FakeKV, so no model hides the cost. A prefix of 29,000 ids is computed and stays cached. While a stream runs, requests that
begin with it wait: the pool has no blocks for them. The time between two tokens of the stream is measured alone and beside them.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from tests.support.http_client import Connection, request_bytes
from tests.support.server_process import ServerProcess
from tests.support.story_folder import story_folder

OWN, TAIL = 1000, 4000  # ids in the prompt of the stream, and of a waiting request behind the prefix


async def _gaps(stream: Connection, seconds: float) -> list[float]:
    gaps, last = [], time.monotonic()
    end = last + seconds
    while last < end:
        assert await stream.piece(), "the stream ended"
        now = time.monotonic()
        gaps.append(now - last)
        last = now
    return gaps


async def measure(server: ServerProcess, prefix: list[int], waiting: int, seconds: float) -> tuple[list[float], list[float]]:
    first, stream = Connection(server), Connection(server)
    assert (await first.ask("/v1/completions", {"prompt": [*prefix, 5], "max_tokens": 1})).status == 200
    body = {"prompt": [5] * OWN, "max_tokens": 16_000, "ignore_eos": True, "stream": True}
    await stream.send(request_bytes("/v1/completions", body))
    assert (await stream.head())[0] == 200
    await stream.piece()
    await _gaps(stream, 1)
    alone = await _gaps(stream, seconds)
    others = [Connection(server) for _ in range(waiting)]
    for number, other in enumerate(others):
        await other.send(request_bytes("/v1/completions", {"prompt": prefix + [6 + number] * TAIL, "max_tokens": 4}))
    await _gaps(stream, 2)
    beside = await _gaps(stream, seconds)
    for connection in (first, stream, *others):
        connection.close(at_once=True)
    return alone, beside


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--waiting", type=int, default=40)
    parser.add_argument("--prefix", type=int, default=29_000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5)
    args = parser.parse_args()
    blocks = (args.prefix + TAIL) // args.block_size + 20  # a waiting request fits into the pool only alone
    length = args.prefix + TAIL + 16
    with tempfile.TemporaryDirectory() as name:
        folder = story_folder(Path(name) / "endless", end_ids=[])
        flags = ["--max-model-len", str(length), "--hf-overrides", f'{{"max_position_embeddings": {length}}}']
        flags += ["--num-gpu-blocks-override", str(blocks), "--block-size", str(args.block_size), "--max-num-seqs", "64"]
        server = ServerProcess("octavo serve", str(folder), *flags, env={"OCTAVO_DEBUG": "runner=fake"}, watch="", forks=False)
        try:
            prefix = [4 + at * at % 250 for at in range(args.prefix)]
            alone, beside = asyncio.run(measure(server, prefix, args.waiting, args.seconds))
        finally:
            server.process.kill()
    medians = [statistics.median(gaps) * 1e3 for gaps in (alone, beside)]
    print(
        f"gap of the stream alone {medians[0]:.2f} ms, beside {args.waiting} waiting requests {medians[1]:.2f} ms: "
        f"{medians[1] / medians[0]:.2f}x; longest {max(alone) * 1e3:.0f} and {max(beside) * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
