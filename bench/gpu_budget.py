"""Where the time of one decode step goes, in the running engine: on the device, between its kernels, and on the host.

    python bench/gpu_budget.py [--model 0.6B,8B] [--rows 1,256] [--context 600] [--json FILE] [--picture FILE]

Rows of `context` tokens decode at temperature 0.6, two steps in flight, random weights of Qwen3's shapes. First the host: what it
spends on planning, launching, waiting and taking results in, with nothing else measuring. Then the device, out of torch's profiler:
a step begins with `prepare_entries`. Kernels may overlap (dependent launch): each counts from the end of the one before, so
that kinds, and gaps in which nothing runs, add up to the step.
"""

import argparse
import json
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu_loads import MODELS
from octavo import LLM
from octavo.bench.figures import number
from octavo.bench.picture import Bar, Panel, draw
from octavo.messages import AddRequest
from octavo.sampling_params import SamplingParams

FIRST_KERNEL, LAST_NORM = "prepare_entries", "add_norm"
KINDS = {  # the first that matches; what follows the last norm of a step is vocabulary and sampling
    "products": r"gemm|gemv|nvjet|cutlass|cublas|splitK|product|merge_gemv|merge_linear|packed",
    "attention": r"decode|merge|prefill|attention",
    "norms, rotation, KV writes": r"add_norm|^write",
    "gate": r"gate",
}
SAMPLING, REST = "vocabulary and sampling", "rows, embedding, copies"
AROUND = r"Memcpy|Memset|copy_runs|prepare_entries|finish_entries|finite_tokens"  # of the rest, wherever in a step they are
TWO_LAYERS = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 500}
SKIPPED = 4  # steps, while the profiler finds its feet
HOST_PARTS = ("plan", "launch", "wait", "update", "rest")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that the device did. Times are in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Budget:
    """The microseconds of one decode step, as means over steps."""

    step: float  # from one beginning to the next
    kinds: dict[str, float]
    gaps: float  # inside a step
    between: float  # from the end of a step to the next beginning
    kernels: dict[str, float]  # by name


def kind_of(name: str, behind_the_layers: bool) -> str:
    if re.search(AROUND, name):
        return REST
    return SAMPLING if behind_the_layers else next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), REST)


def steps_of(events: Sequence[Event]) -> list[list[Event]]:
    """Returns the steps in order. Each goes from one `prepare_entries` to the next."""
    steps: list[list[Event]] = []
    for event in sorted(events, key=lambda event: event.start):
        if FIRST_KERNEL in event.name:
            steps.append([])
        if steps:
            steps[-1].append(event)
    return steps


def budget(events: Sequence[Event], skipped: int = 0) -> Budget:
    """Returns the budget over all steps but the first few and the last, whose end is not known."""
    steps = steps_of(events)[skipped:]
    assert len(steps) > 1, f"no two steps among {len(events)} events: {sorted({event.name for event in events})[:20]}"
    starts = [step[0].start for step in steps]
    kinds, kernels, gaps, between = Counter[str](), Counter[str](), 0.0, 0.0
    for step, following in zip(steps, starts[1:]):
        final_norm = max((place for place, event in enumerate(step) if LAST_NORM in event.name), default=len(step))
        reached = step[0].start
        for place, event in enumerate(step):
            gaps += max(event.start - reached, 0.0)
            took = max(event.end - max(event.start, reached), 0.0)
            kinds[kind_of(event.name, place > final_norm)] += took
            kernels[event.name] += took
            reached = max(reached, event.end)
        between += max(following - reached, 0.0)
    count = len(steps) - 1
    by_kind, by_name = ({name: total / count for name, total in each.most_common()} for each in (kinds, kernels))
    return Budget((starts[-1] - starts[0]) / count, by_kind, gaps / count, between / count, by_name)


class Watch:
    """Times each part of an engine's step on the host."""

    def __init__(self, llm: LLM) -> None:
        core: Any = llm._core  # type: ignore[attr-defined]
        self.spent: dict[str, float] = defaultdict(float)
        for owner, name, part in (
            (core.scheduler, "schedule", "plan"), (core.executor, "forward", "launch"), (core.scheduler, "update", "update")
        ):  # fmt: skip
            setattr(owner, name, self.timed(part, getattr(owner, name)))
        sample = self.timed("launch", core.executor.sample)
        core.executor.sample = lambda masks: Waited(sample(masks), self)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*given)
            finally:
                self.spent[part] += time.perf_counter() - start

        return call


@dataclass(slots=True)
class Waited:
    """A result that times how long the caller waits for it."""

    promise: Any
    watch: Watch

    def result(self) -> Any:
        return self.watch.timed("wait", self.promise.result)()


class Unread:
    """An output that nobody reads."""

    def push(self, delta: Any) -> None:
        pass

    def finish(self, output: Any) -> None:
        pass


class Load:
    """Rows that decode in an engine, step by step, with the text side."""

    def __init__(self, llm: LLM, rows: int, context: int, tokens: int) -> None:
        self.llm, self.rows, self.ids = llm, rows, [f"budget-{row}" for row in range(rows)]
        rng, highest = Random(rows), min(10_000, llm._core.scheduler.limits.vocab_size)  # type: ignore[attr-defined]
        params = SamplingParams(temperature=0.6, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for name in self.ids:
            request = AddRequest(name, [rng.randrange(highest) for _ in range(context)], params)
            llm._core.add(request)
            llm._outputs.add(request, None, Unread())

    def step(self) -> None:
        self.llm._pump()

    def until_all_decode(self) -> None:
        scheduler: Any = self.llm._core.scheduler  # type: ignore[attr-defined]
        while len(scheduler.running) < self.rows or any(seq.num_computed < seq.request.num_prompt for seq in scheduler.running):
            assert len(scheduler.requests) == self.rows, "a request ended before all of them decoded"
            self.step()
        for _ in range(8):
            self.step()

    def end(self) -> None:
        for name in self.ids:
            self.llm._drop([name])
        while self.llm._core.has_work:  # type: ignore[attr-defined]
            self.step()


def host_times(load: Load, watch: Watch, steps: int) -> dict[str, float]:
    """Returns the microseconds of each part of a step. `rest` is the loop itself and the text side."""
    watch.spent.clear()
    start = time.perf_counter()
    for _ in range(steps):
        load.step()
    total = time.perf_counter() - start
    parts = {part: 1e6 * watch.spent[part] / steps for part in HOST_PARTS[:-1]}
    return {**parts, "rest": 1e6 * total / steps - sum(parts.values())}


def device_times(load: Load, steps: int) -> Budget:
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        for _ in range(SKIPPED + steps + 1):
            load.step()
        torch.cuda.synchronize()
    events = [
        Event(event.name, event.time_range.start, event.time_range.end)
        for event in traced.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return budget(events, SKIPPED)


def open_engine(args: argparse.Namespace, shape: dict[str, Any]) -> LLM:
    settings: dict[str, Any] = {"max_num_seqs": 8, "num_gpu_blocks_override": 200} if args.device == "cpu" else {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape))
        return LLM(folder, load_format="dummy", skip_tokenizer_init=True, device=args.device, pipeline_depth=2, **settings)


def measure(args: argparse.Namespace, shape: dict[str, Any]) -> dict[int, tuple[dict[str, float], Budget | None]]:
    """Returns the parts of the host and of the device, for each number of rows."""
    found: dict[int, tuple[dict[str, float], Budget | None]] = {}
    with open_engine(args, shape) as llm:
        watch = Watch(llm)
        for rows in map(int, args.rows.split(",")):
            load = Load(llm, rows, args.context, tokens=2 * args.steps + 200)
            load.until_all_decode()
            host = host_times(load, watch, args.steps)
            found[rows] = host, device_times(load, args.steps) if args.device == "cuda" else None
            load.end()
    return found


def parts_of(host: dict[str, float], device: Budget | None) -> dict[str, float]:
    """Returns all parts by name, in the order of the table."""
    parts = {"step": sum(host.values())}
    if device is not None:
        parts |= {"step, profiled": device.step} | {kind: device.kinds.get(kind, 0.0) for kind in (*KINDS, SAMPLING, REST)}
        parts |= {"gaps inside a step": device.gaps, "gap between steps": device.between}
    return parts | {f"host: {part}": host[part] for part in HOST_PARTS}


def table(columns: dict[str, dict[str, float]]) -> str:
    """Returns a table with a line for each part, and a column for each model and number of rows."""
    lines = [f"| us of one step | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    lines += [f"| {part} | {' | '.join(number(parts[part]) for parts in columns.values())} |" for part in next(iter(columns.values()))]
    return "\n".join(lines)


def picture(columns: dict[str, dict[str, float]], context: int) -> str:
    panels = [Panel(f"{name}: us of one step", [Bar(part, us, us, us) for part, us in parts.items()]) for name, parts in columns.items()]
    return draw(f"One decode step, contexts of {context} tokens, temperature 0.6", panels, ["python bench/gpu_budget.py"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6B", help="0.6B, 8B, or both with a comma")
    parser.add_argument("--rows", default="1,256")
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the host's part alone, on a shape of two layers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    columns: dict[str, dict[str, float]] = {}
    for model in args.model.split(","):
        for rows, (host, device) in measure(args, MODELS[model] | (TWO_LAYERS if args.device == "cpu" else {})).items():
            columns[f"{model}, {rows} row{'s' if rows > 1 else ''}"] = parts_of(host, device)
            for name, us in list(device.kernels.items() if device else [])[:16]:
                print(f"{model}, {rows} rows: {us:9.1f} us  {name[:90]}", flush=True)
    print(table(columns))
    if args.json:
        args.json.write_text(json.dumps(columns, indent=1) + "\n")
    if args.picture:
        args.picture.write_text(picture(columns, args.context))


if __name__ == "__main__":
    main()
