"""Counts how many sequences fit into the same bytes: with the whole context reserved, with their limit reserved, and in blocks.

    python bench/capacity.py [--gpu 80,120] [--json capacity.json] [--picture docs/capacity.svg]

The bytes are what the engine's own plan leaves for the KV cache of a GPU, in bfloat16. There are always requests that wait. The
engine's scheduler, block pool and block tables decide who runs; tokens are made up, and a step may have any size. Reservation
differs only in what a sequence takes when it is admitted. It loses nothing between regions here, as it would in real memory.
Figures are means over steps, after the first sequences have made room for others.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from octavo.bench import loads
from octavo.bench.picture import Bar, Panel, draw
from octavo.bench.traces import read_trace
from octavo.config import EngineConfig
from octavo.loading.shape import ModelShape
from octavo.messages import AddRequest, Limits, StepPlan, StepResult
from octavo.model_config import ModelConfig
from octavo.models.registry import read_config
from octavo.policy.block_pool import BlockPool
from octavo.policy.kv_manager import KVManager, PrefixHit
from octavo.policy.request import Sequence
from octavo.policy.scheduler import Scheduler
from octavo.sampling_params import SamplingParams
from octavo.sizing.auto import resolved
from octavo.sizing.memory_plan import GIB, Memory, plan_memory

MODELS = {"Qwen3-0.6B": loads.QWEN3_06B, "Qwen3-8B": loads.QWEN3_8B}
TRACES = Path(__file__).resolve().parents[1] / "tests/data/traces"
SIZE, VOCAB, GO_ON, STOP = 16, 3, 0, 1
UNKNOWN_LIMIT = 1024  # tokens of an answer, where a trace has only what became of it
QUEUE = 64  # requests that wait at any time
UNBOUNDED = 2**30

Reserve = Callable[[Sequence], int]  # tokens a sequence holds room for from the start
WAYS = {"max_model_len each": "model", "its own limit each": "limit", "blocks": "blocks"}


@dataclass(frozen=True, slots=True)
class Lengths:
    prompt: int
    answer: int
    limit: int  # of the answer, as asked for


@dataclass(frozen=True, slots=True)
class Fit:
    """What ran at the same time."""

    sequences: float
    filled: float  # share of the slots that hold a token
    preemptions: int


def load_lengths() -> dict[str, list[Lengths]]:
    found = {"nano256": [Lengths(len(ids), count, count) for ids, count in loads.nano256()]}
    for name in ("azure_conversation_2023.csv", "mooncake_conversation.jsonl"):
        requests = [(one.input_length, one.output_length) for one in read_trace(str(TRACES / name))]
        found[name.partition("_")[0]] = [Lengths(prompt, answer, max(answer, UNKNOWN_LIMIT)) for prompt, answer in requests]
    return found


class Reserving(KVManager):
    """A manager that takes room for a whole region when a sequence is admitted."""

    def __init__(self, pool: BlockPool, reserve: Reserve) -> None:
        super().__init__(pool, SIZE, caching=False, key=b"bench", identity=b"bench")
        self.reserve = reserve

    def blocks_needed(self, seq: Sequence, hit: PrefixHit) -> int:
        return -(-self.reserve(seq) // SIZE)

    def allocate(self, seq: Sequence, count: int, plan: StepPlan) -> bool:
        return super().allocate(seq, self.reserve(seq) if not seq.tables[0] else count, plan)


def scheduler_of(way: str, num_blocks: int, max_len: int) -> Scheduler:
    pool, limits = BlockPool(num_blocks), Limits(num_blocks, UNBOUNDED, max_len, VOCAB, num_blocks, SIZE)
    if way == "blocks":
        return Scheduler(KVManager(pool, SIZE, caching=False, key=b"bench", identity=b"bench"), limits)
    scheduler = Scheduler(Reserving(pool, (lambda seq: max_len) if way == "model" else (lambda seq: seq.limit)), limits)
    scheduler.admission.kept_free = lambda: 0  # type: ignore[method-assign]  # what is reserved never grows: nothing has to stay free
    return scheduler


def fit(way: str, lengths: list[Lengths], num_blocks: int, max_len: int) -> Fit:
    """Runs twice as many steps as the longest answer needs, and counts in the second half."""
    scheduler, rng, wanted = scheduler_of(way, num_blocks, max_len), Random(0), list[int]()
    half, slots, running, filled = max(one.answer for one in lengths), (num_blocks - 1) * SIZE, 0, 0
    for step in range(2 * half):
        while len(scheduler.waiting) < QUEUE:
            one = rng.choice(lengths)
            params = SamplingParams(max_tokens=one.limit, stop_token_ids=[STOP], ignore_eos=True)
            scheduler.add(AddRequest(str(len(wanted)), [GO_ON] * one.prompt, params))
            wanted.append(one.answer)
        plan = scheduler.schedule()
        if step >= half:
            running += len(scheduler.running)
            filled += sum(seq.num_planned for seq in scheduler.running)
        scheduler.update(plan, StepResult(plan.step, [[_token(wanted, seq_id)] for seq_id in plan.seq_id]))
    return Fit(running / half, filled / half / slots, scheduler.stats.preemptions)


def _token(wanted: list[int], seq_id: int) -> int:
    """Returns a made-up token. Every request has one sequence, numbered in order of arrival."""
    wanted[seq_id] -= 1
    return STOP if wanted[seq_id] == 0 else GO_ON


def blocks_of(model: ModelConfig, gpu: int) -> tuple[int, int]:
    """Returns the blocks, and the longest sequence, that the engine's plan has on a GPU with so many bytes."""
    config, needs = resolved(EngineConfig(block_size=SIZE), "cuda"), ModelShape("", model).needs("bfloat16", device="cuda")
    plan = plan_memory(needs, config, Memory.of_gpu(gpu, gpu, config.gpu_memory_utilization))
    assert plan.refusal is None, plan.refusal
    num_blocks = plan.geometry.num_blocks
    return num_blocks, min(plan.geometry.max_model_len, (num_blocks - 1) * SIZE)


def table(found: dict[tuple[str, int], dict[str, dict[str, Fit]]]) -> str:
    columns = ["model, GPU", "load", *WAYS, "blocks against the first, the second"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for (model, gpu), by_load in found.items():
        for load, ways in by_load.items():
            cells = [f"{each.sequences:,.0f} ({each.filled:.0%})" for each in ways.values()]
            whole, limit, blocks = (each.sequences for each in ways.values())
            lines.append(f"| {model}, {gpu} GiB | {load} | {' | '.join(cells)} | {blocks / whole:.1f}x, {blocks / limit:.2f}x |")
    return "\n".join(lines)


def picture(found: dict[tuple[str, int], dict[str, dict[str, Fit]]], command: str) -> str:
    first = next(gpu for _, gpu in found)
    panels = [
        Panel(f"{model}, {load}: sequences at once", [Bar(way, *[each.sequences] * 3) for way, each in ways.items()])
        for (model, gpu), by_load in found.items()
        for load, ways in by_load.items()
        if gpu == first
    ]
    return draw(f"Sequences in the memory of a GPU of {first} GiB, reserved and in blocks of {SIZE}", panels, [command])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="80,120", help="its memory in GiB, one or more")
    parser.add_argument("--loads", default="nano256,azure,mooncake")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    lengths = {name: one for name, one in load_lengths().items() if name in args.loads.split(",")}
    found: dict[tuple[str, int], dict[str, dict[str, Fit]]] = {}
    for name, shape in MODELS.items():
        model = read_config(shape, name)
        for gpu in map(int, args.gpu.split(",")):
            num_blocks, max_len = blocks_of(model, gpu * GIB)
            found[name, gpu] = {
                load: {way: fit(key, each, num_blocks, max_len) for way, key in WAYS.items()} for load, each in lengths.items()
            }
    print(table(found))
    if args.json:
        content = {f"{model}, {gpu} GiB": {load: {way: asdict(each) for way, each in ways.items()} for load, ways in by_load.items()}
                   for (model, gpu), by_load in found.items()}  # fmt: skip
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    if args.picture:
        args.picture.write_text(picture(found, f"python bench/capacity.py --gpu {args.gpu}"))


if __name__ == "__main__":
    main()
