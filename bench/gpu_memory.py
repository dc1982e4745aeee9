"""Compares the memory that an engine takes of a GPU with what was planned, part by part.

    python bench/gpu_memory.py [--model 0.6B] [--set kv_cache_memory_bytes=4294967296 max_num_seqs=256]

The plan is the one that the engine starts by, as `octavo plan` prints it. Another process reads how much of the GPU is in use, so
that the memory of CUDA counts, too. The load fills every row and steps of the largest size, with filters and penalties. Measured are:

    weights, KV cache, rows    the tensors themselves
    graphs                     what is missing from the GPU once they are captured
    activations                room for logits, and the most in use at once under load beyond what was in use before it
    other                      what torch does not know of; `context` and `libraries` are the constants of `sizing/gpu_size.py`
    kept by torch              what it holds beyond all these, for later
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from octavo import LLM, SamplingParams
from octavo.bench import loads
from octavo.sizing.gpu_size import CONTEXT, GPU_LIBRARIES
from octavo.sizing.memory_plan import MemoryPlan
from octavo.worker import facts as facts_module
from octavo.worker.graph_program import Graph
from octavo.worker.model_runner import ModelRunner

MIB = 2**20
MODELS = {"0.6B": loads.QWEN3_06B, "8B": loads.QWEN3_8B}
KINDS: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.9}, {"repetition_penalty": 1.1})
PARTS = ("weights", "kv_cache", "activations", "graphs", "rows", "other")


def held_parts(runner: ModelRunner) -> dict[str, int]:
    """Returns the bytes of what the engine keeps: weights, the pool, and all that belongs to rows."""
    program: Any = runner.program
    eager = program.eager
    rope = eager.model.layers[0].attention.rope
    memory = [part for part in vars(eager.memory).values() if isinstance(part, torch.Tensor)]
    rows = [runner.table.words, *memory, eager._result, rope.cos, rope.sin, *([] if eager.teams is None else [eager.teams.words])]
    pool = sum(buffer.nbytes for cache in runner.store.caches for buffer in cache.values())
    return {
        "weights": eager.nbytes, "kv_cache": pool, "rows": sum(one.nbytes for one in rows), "logits": eager.logits_memory.nbytes,
    }  # fmt: skip


def recorded_plans() -> list[MemoryPlan]:
    """Returns a list that collects the plans the engine makes from now on."""
    plans, plan_stages = list[MemoryPlan](), facts_module.plan_stages

    def plan(*given: Any) -> list[MemoryPlan]:
        made = plan_stages(*given)
        plans.extend(made)
        return made

    facts_module.plan_stages = plan
    return plans


def recorded_graphs() -> list[int]:
    """Returns two numbers, set when steps are captured: the bytes they take of the GPU, and those of them that torch knows of."""
    taken, capture = [0, 0], Graph.capture

    def watched(self: Graph) -> None:
        torch.cuda.empty_cache()
        free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        capture(self)
        torch.cuda.synchronize()
        taken[:] = free - torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved() - reserved

    Graph.capture = watched  # type: ignore[method-assign]
    return taken


def full_load(llm: LLM, rows: int, tokens: int) -> None:
    prompts = [[(7 * row + at) % 9973 for at in range(max(2 * tokens // rows, 16))] for row in range(rows)]
    for extra in KINDS:
        params = SamplingParams(temperature=0.6, max_tokens=8, ignore_eos=True, detokenize=False, **extra)
        llm.generate(prompts, params, use_tqdm=False)


def child(settings: dict[str, Any]) -> None:
    def done(what: str, **said: Any) -> None:
        torch.cuda.synchronize()
        print(json.dumps({"done": what, "reserved": torch.cuda.memory_reserved(), **said}), flush=True)
        sys.stdin.readline()

    torch.cuda.mem_get_info()
    done("context")
    plans, graphs = recorded_plans(), recorded_graphs()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[settings.pop("model")]))
        llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, device="cuda", **settings)
    limits, runner = llm._core.scheduler.limits, llm._core.executor
    assert isinstance(runner, ModelRunner)
    planned, parts = {part: getattr(plans[0].use, part) for part in PARTS}, held_parts(runner)
    done("ready", planned=planned)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    full_load(llm, limits.max_num_seqs, limits.max_num_batched_tokens)
    parts["activations"] = parts.pop("logits") + torch.cuda.max_memory_allocated() - before
    done("full load", parts=parts | {"graphs": graphs[0]}, graphs_in_torch=graphs[1])


def watched(settings: dict[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yields what the other process has done, the bytes it holds, and what it printed."""
    before, _ = torch.cuda.mem_get_info()
    command = [sys.executable, __file__, "--child", json.dumps(settings)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    for line in process.stdout:
        if line.startswith("{"):
            said = json.loads(line)
            yield said.pop("done"), before - torch.cuda.mem_get_info()[0], said
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.wait() == 0, "the engine's process failed; its words are above"


def table(planned: dict[str, int], held: int, said: dict[str, Any]) -> str:
    """Returns a table of planned and measured bytes. The last line is what `octavo plan` promises within 5 %."""
    parts, reserved = said["parts"], said["reserved"]
    outside = parts["graphs"] - said["graphs_in_torch"]
    measured = parts | {"other": held - reserved - outside}
    slack = held - sum(measured.values())
    lines = ["| part | planned, MiB | measured, MiB | measured / planned |", "|---|---|---|---|"]
    lines += [_line(part, planned[part], measured[part]) for part in PARTS]
    lines.append(f"| kept by torch | - | {slack / MIB:,.0f} | - |")
    return "\n".join([*lines, _line("all", sum(planned.values()), held)])


def _line(part: str, planned: int, measured: int) -> str:
    ratio = f"{measured / planned:.3f}" if planned else "-"
    return f"| {part.replace('kv_cache', 'KV cache')} | {planned / MIB:,.0f} | {measured / MIB:,.0f} | {ratio} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6B", choices=MODELS)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the engine")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(json.loads(args.child))
    settings = {name: json.loads(value) for name, value in (item.split("=", 1) for item in args.set)}
    planned: dict[str, int] = {}
    for what, held, said in watched({"model": args.model, **settings}):
        planned = said.get("planned", planned)
        print(f"{what:10} held {held / MIB:9,.0f} MiB, of which torch knows {said['reserved'] / MIB:9,.0f}", flush=True)
        if what == "full load":
            print(table(planned, held, said))
    print(f"constants: context {CONTEXT / MIB:.0f} MiB, libraries {GPU_LIBRARIES / MIB:.0f} MiB")


if __name__ == "__main__":
    main()
