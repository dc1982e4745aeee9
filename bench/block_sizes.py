"""What the size of a block costs and gives: throughput, slots held without a token, tokens found in the cache, bytes of tables.

    python bench/block_sizes.py [--device cuda] [--sizes 1,8,16,32,64,128,256] [--json FILE] [--picture FILE]

On a GPU random weights of Qwen3-0.6B's shape serve 128 requests of nano256's kind with shorter answers, with graphs; on the CPU the
default model serves half of batch32 with a quarter of the answers, its engines in turn, since a CPU's clock drifts. Slots are counted after
every step of a round that is not timed. Prefixes that requests share are of every length, hardly one a whole number of blocks.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from bench.peers.lines import Curve, Plot, draw
from octavo import LLM, SamplingParams
from octavo.bench import loads
from octavo.bench.figures import number
from octavo.bench.workload import text_ids
from octavo.worker.device import torch_gpu
from octavo.worker.machine import cpu_model, num_threads

SIZES = (1, 8, 16, 32, 64, 128, 256)
POOL = 2**17  # tokens
MAX_LEN, SHORT_LEN = 2048, 512
IDS = 300  # that every model has
Requests = list[tuple[list[int], int]]


@dataclass(slots=True)
class Found:
    """What was measured with one block size."""

    tokens_per_second: list[float]
    unused: float  # share of the slots held that hold no token
    served: float  # share of the shared tokens that came out of the cache
    table_bytes: int

    def as_json(self) -> dict[str, object]:
        return {"tokens_per_second": self.tokens_per_second, "unused": self.unused, "served": self.served, "table_bytes": self.table_bytes}


def gpu_load() -> Requests:
    rng = Random(0)
    return [([rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))], rng.randint(64, 256)) for _ in range(128)]


def cpu_load(llm: LLM) -> Requests:
    return [(ids, count // 4) for ids, count in loads.cpu(text_ids(llm.get_tokenizer()))["batch32"][::2]]


def tiny_load() -> Requests:
    rng = Random(0)
    return [([rng.randrange(IDS) for _ in range(rng.randint(10, 60))], 10) for _ in range(6)]


def shared_load() -> tuple[Requests, Requests, int]:
    """Returns eight requests with prefixes of odd lengths, three more requests for each prefix, and how many tokens those could find."""
    rng, first, others, shared = Random(1), list[tuple[list[int], int]](), list[tuple[list[int], int]](), 0
    for _ in range(8):
        prefix = [rng.randrange(IDS) for _ in range(rng.randrange(31, 480, 2))]
        own = [[rng.randrange(IDS) for _ in range(20)] for _ in range(4)]
        first.append((prefix + own[0], 1))
        others += [(prefix + tail, 1) for tail in own[1:]]
        shared += 3 * len(prefix)
    return first, others, shared


def answer(llm: LLM, requests: Requests, clock: Callable[[], float] = time.perf_counter) -> float:
    """Runs the requests. Returns the seconds they took."""
    params = [SamplingParams(temperature=0.6, max_tokens=count, ignore_eos=True, detokenize=False) for _, count in requests]
    start = clock()
    llm.generate([ids for ids, _ in requests], params, use_tqdm=False)
    return clock() - start


@contextmanager
def counting_slots(llm: LLM) -> Iterator[list[float]]:
    """Gives a list that gets the share of held slots without a token, after every step."""
    core: Any = llm._core  # type: ignore[attr-defined]
    kv, step, shares = core.scheduler.kv, core.step, list[float]()

    def watched() -> Any:
        news = step()
        held = (kv.pool.num_blocks - 1 - kv.pool.num_free) * kv.block_size
        if held:
            unused = sum(len(seq.tables[0]) * kv.block_size - seq.num_planned for seq in core.scheduler.running)
            shares.append(unused / held)
        return news

    core.step = watched
    yield shares
    core.step = step


def table_bytes(llm: LLM) -> int:
    """Returns the bytes of the block tables of all rows, and of those of one step, which are copies."""
    runner: Any = llm._core.executor
    layout = runner.table.layout
    copies: int = runner.program.eager.memory._tables.nbytes
    return len(runner.table.words) * layout.groups * layout.max_blocks * 4 + copies


def look_at(llm: LLM, load: Requests) -> Found:
    """Measures everything but throughput, which needs several rounds."""
    llm.reset_prefix_cache()
    with counting_slots(llm) as shares:
        answer(llm, load)
    llm.reset_prefix_cache()
    first, others, shared = shared_load()
    answer(llm, first)
    before = llm.stats().prefix_hits
    answer(llm, others)
    return Found([], statistics.mean(shares), (llm.stats().prefix_hits - before) / shared, table_bytes(llm))


def open_engine(args: argparse.Namespace, size: int) -> LLM:
    longest = SHORT_LEN if args.tiny else MAX_LEN
    settings: dict[str, Any] = {"block_size": size, "num_gpu_blocks_override": args.pool // size + 1, "max_model_len": longest}
    if args.model is not None or args.device == "cpu":
        return LLM(args.model, device=args.device, max_num_seqs=64, **settings)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(loads.QWEN3_06B))
        return LLM(folder, device="cuda", load_format="dummy", skip_tokenizer_init=True, max_num_seqs=128, **settings)


def measure(args: argparse.Namespace, sizes: list[int]) -> dict[int, Found]:
    """Measures engines that are all open. In every round each has its turn."""
    with ExitStack() as stack:
        engines = {size: stack.enter_context(open_engine(args, size)) for size in sizes}
        some = next(iter(engines.values()))
        load = tiny_load() if args.tiny else gpu_load() if args.device == "cuda" else cpu_load(some)
        found = {size: look_at(llm, load) for size, llm in engines.items()}
        tokens, clock = sum(count for _, count in load), time.process_time if args.cpu_time else time.perf_counter
        for _ in range(args.rounds):
            for size, llm in engines.items():
                llm.reset_prefix_cache()
                found[size].tokens_per_second.append(tokens / answer(llm, load, clock))
    return found


def table(found: dict[int, Found]) -> str:
    lines = ["| blocks of | tokens/s (least-most) | held slots without a token | shared tokens found | tables |", "|---|---|---|---|---|"]
    for size, one in found.items():
        rates = one.tokens_per_second
        cells = f"{statistics.median(rates):,.0f} ({min(rates):,.0f}-{max(rates):,.0f}) | {one.unused:.1%} | {one.served:.1%}"
        lines.append(f"| {size} | {cells} | {number(one.table_bytes / 1024)} KiB |")
    return "\n".join(lines)


def picture(found: dict[int, Found], what: str) -> str:
    sizes = list(found)

    def plot(title: str, values: list[float]) -> Plot:
        return Plot(title, sizes, [Curve("", values)])

    rates = plot("tokens/s, by size of blocks", [statistics.median(one.tokens_per_second) for one in found.values()])
    unused = plot("held slots without a token, %", [100 * one.unused for one in found.values()])
    served = plot("shared tokens found in the cache, %", [100 * one.served for one in found.values()])
    tables = plot("block tables, KiB", [one.table_bytes / 1024 for one in found.values()])
    return draw("The size of a block", [[rates, unused], [served, tables]], f"python bench/block_sizes.py; {what}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", help="another than the default one, or on a GPU than Qwen3-0.6B's shape")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pool", type=int, default=POOL, help="tokens the KV pool holds, whatever the size of its blocks")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of this process's CPU time, for a machine with other work")
    parser.add_argument("--tiny", action="store_true", help="a load of a moment, to try this out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    sizes, found = [int(size) for size in args.sizes.split(",")], dict[int, Found]()
    for together in [sizes] if args.device == "cpu" else [[size] for size in sizes]:
        found |= measure(args, together)
        if len(found) < len(sizes):
            print(table(found).splitlines()[-1], flush=True)
    print(table(found))
    if args.json:
        args.json.write_text(json.dumps({size: one.as_json() for size, one in found.items()}, indent=1) + "\n")
    if args.picture:
        gpu = torch_gpu()[0] if args.device == "cuda" else None
        args.picture.write_text(picture(found, gpu.name if gpu else f"{cpu_model()}, {num_threads()} threads"))


if __name__ == "__main__":
    main()
