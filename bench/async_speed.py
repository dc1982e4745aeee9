"""Measures how fast tokens come through `AsyncLLM` from an engine process on FakeKV: `python bench/async_speed.py MODEL`.

There is no model and no HTTP, so it measures only what lies between them: from the engine's step to the text that a reader gets.
Besides tokens a second it prints what each process could reach with a core of its own, and how late the event loop was.
"""

import argparse
import asyncio
import os
import time
from pathlib import Path

from octavo import log
from octavo.config import EngineConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.messages import AddRequest
from octavo.sampling_params import SamplingParams

PROMPT = 16  # tokens


def cpu_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


async def worst_lag(lags: list[float], every: float = 0.005) -> None:
    while True:
        start = time.perf_counter()
        await asyncio.sleep(every)
        lags.append(time.perf_counter() - start - every)


async def measure(llm: AsyncLLM, streams: int, count: int) -> str:
    async def one(number: int) -> int:
        ask = AddRequest("", [number % llm.facts.limits.vocab_size] * PROMPT, SamplingParams(max_tokens=count, ignore_eos=True))
        return sum([len(delta.token_ids) async for news in llm.generate(ask) for delta in news])

    assert llm.engine_pid is not None
    lags = list[float]()
    watching = asyncio.create_task(worst_lag(lags))
    start, own, engine = time.perf_counter(), time.process_time(), cpu_seconds(llm.engine_pid)
    tokens = sum(await asyncio.gather(*(one(number) for number in range(streams))))
    seconds, own, engine = time.perf_counter() - start, time.process_time() - own, cpu_seconds(llm.engine_pid) - engine
    watching.cancel()
    late = sorted(lags)[int(len(lags) * 0.99)] * 1000
    return f"{tokens / seconds:,.0f} tokens/s; a core here {tokens / own:,.0f}, of the engine {tokens / engine:,.0f}; p99 lag {late:.1f} ms"


async def main(args: argparse.Namespace) -> None:
    llm = AsyncLLM(EngineConfig(model=args.model, max_num_seqs=args.streams, num_gpu_blocks_override=20_000))
    try:
        await llm.start()
        for _ in range(args.rounds):
            print(await measure(llm, args.streams, args.tokens))
    finally:
        await llm.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="whose tokenizer and vocabulary to use; without one, the default model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if "runner=fake" not in os.environ.get("OCTAVO_DEBUG", ""):
        parser.error("run it with OCTAVO_DEBUG=runner=fake")
    log.setup("WARNING")
    asyncio.run(main(arguments))
