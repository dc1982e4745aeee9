"""What it costs that an engine is on Ray: two engines of FakeKV as processes of this host, and two as actors of a Ray cluster,
alternating, best of the rounds. FakeKV takes almost no time for a step, so what is left is the way of requests and news.

    python bench/ray_engines.py [--rounds 5]

It joins the cluster at RAY_ADDRESS, or starts one of two nodes on this host.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo import log
from octavo.config import EngineConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.supervisor import Serving
from octavo.messages import AddRequest
from octavo.sampling_params import SamplingParams

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_theta": 10_000, "tie_word_embeddings": True, "torch_dtype": "float32", "eos_token_id": 2,
}  # fmt: skip
TOKENS, STREAMS = 400, 32
PACE_SECONDS = 0.01  # of a step, as a model might take


@contextmanager
def cluster() -> Iterator[None]:
    if os.environ.get("RAY_ADDRESS"):
        yield
        return
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    made = Cluster(initialize_head=True, head_node_args=node)
    try:
        made.add_node(wait=True, **node)
        os.environ["RAY_ADDRESS"] = made.address
        yield
    finally:
        made.shutdown()


async def read(llm: AsyncLLM, tokens: int) -> float:
    """Returns the seconds until all tokens of a request have come."""
    params, start = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False), time.perf_counter()
    count = 0
    async for news in llm.generate(AddRequest("", [1, 2, 3], params)):
        count += sum(len(delta.token_ids) for delta in news)
    assert count == tokens
    return time.perf_counter() - start


def cpu_seconds(llm: AsyncLLM) -> float:
    """Returns the CPU time of the processes that the server has started: engines, or bridges."""
    found = 0
    for replica in llm.replicas:
        fields = Path(f"/proc/{replica.pid}/stat").read_text().rpartition(")")[2].split()
        found += int(fields[11]) + int(fields[12])
    return found / os.sysconf("SC_CLK_TCK")


async def measure(llm: AsyncLLM) -> dict[str, float]:
    first = min([await read(llm, 1) for _ in range(20)])
    alone = (await read(llm, TOKENS) - first) / (TOKENS - 1)
    start, before = time.perf_counter(), cpu_seconds(llm)
    await asyncio.gather(*(read(llm, TOKENS) for _ in range(STREAMS)))
    seconds = time.perf_counter() - start
    return {
        "one token, ms": 1000 * first, "a token of one stream, ms": 1000 * alone,
        f"tokens/s of {STREAMS} streams": STREAMS * TOKENS / seconds,
        "CPU of engines or bridges, %": 100 * (cpu_seconds(llm) - before) / seconds,
    }  # fmt: skip


async def compare(folder: str, rounds: int) -> None:
    config = {"model": folder, "load_format": "dummy", "skip_tokenizer_init": True, "num_gpu_blocks_override": 2000, "max_model_len": 1024}
    llms: dict[str, AsyncLLM] = {}
    try:
        ways = ("here", "mp", 0.0), ("Ray", "ray", 0.0), ("here, 10 ms", "mp", PACE_SECONDS), ("Ray, 10 ms", "ray", PACE_SECONDS)
        for name, backend, pace in ways:
            settings = EngineConfig(distributed_executor_backend=backend, **config)  # type: ignore[arg-type]
            llms[name] = AsyncLLM(settings, Serving(engines=2, step_seconds=pace, beat_timeout=30.0, routing="turns"))
            await llms[name].start()
        best: dict[str, dict[str, float]] = {}
        for _ in range(rounds):
            for name, llm in llms.items():
                for what, value in (await measure(llm)).items():
                    known = best.setdefault(name, {}).setdefault(what, value)
                    best[name][what] = max(known, value) if "tokens/s" in what else min(known, value)
        for name, found in best.items():
            print(f"{name:12} " + "   ".join(f"{what} {value:8.2f}" for what, value in found.items()), flush=True)
    finally:
        for llm in llms.values():
            await llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    log.setup("ERROR", "text")
    os.environ |= {"OCTAVO_DEBUG": "runner=fake", "OCTAVO_LOG_LEVEL": "ERROR"}
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(SHAPE))
    rounds = parser.parse_args().rounds
    with cluster():
        asyncio.run(compare(folder, rounds))


if __name__ == "__main__":
    main()
