"""Octavo beside its peers on the CPU: the published loads, in turn, each engine in a process of its own.

    python bench/cpu_peers.py [--peers llama,openvino] [--loads single,batch32] [--rounds 3] [--json figures.json]

Peers get virtual environments of their own (--envs), made on first use. All run the default model's weights, greedy, past ending
ids, the same token ids in and ids out, on the same threads. A round is Octavo, peer, Octavo, next peer ..., so that a ratio is of two
runs one after the other. The roofline is measured before and after.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench import roofline
from bench.peers import report
from bench.peers.engines import OCTAVO, PEERS, Engine, octavo
from bench.peers.environments import NotInstalled
from bench.peers.export import ExportFailed
from bench.peers.process import EngineFailed, EngineProcess, Requests
from octavo.bench.figures import Figure
from octavo.bench.workload import TEXT_LOADS, Workload, text_ids, text_loads
from octavo.loading.resolve import ModelSource, resolve_model
from octavo.loading.text_side import load_tokenizer
from octavo.worker.machine import cpu_model, num_threads

MIB = 2**20
DEFAULT_ENVS = Path("~/.cache/octavo/peers").expanduser()


def measure(engine: Engine, loads: Mapping[str, Workload]) -> dict[str, float]:
    """Starts one process, and runs each load in it after a warm-up."""
    with engine.start() as process:
        process.call([([1, 2, 3, 4], 1)])
        sample = {"first_token": time.perf_counter() - process.started}
        for name, load in loads.items():
            process.call([(_other(ids)[:64], min(count, 4)) for ids, count in load.requests[:8]])
            sample[name] = _rate(process, name, load)
            if name == "single":
                sample["memory_single"] = process.peak_memory() / MIB
        return sample | {"memory": process.peak_memory() / MIB}


def _rate(process: EngineProcess, name: str, load: Workload) -> float:
    """Returns tokens per second: prompt tokens for prefill, else output tokens. A single stream does not count its first token."""
    seconds = process.call(load.requests).seconds
    if name == "single":
        alone: Requests = [(_other(ids), 1) for ids, _ in load.requests]
        return (load.output_tokens - 1) / (seconds - process.call(alone).seconds)
    return (load.input_tokens if name == "prefill" else load.output_tokens) / seconds


def _other(ids: list[int]) -> list[int]:
    """Returns a prompt of the same length that is in no prefix cache."""
    return ids[::-1]


class Comparison:
    def __init__(self, loads: Mapping[str, Workload]) -> None:
        self._loads = loads
        self.samples: dict[str, list[dict[str, float]]] = {}  # by the engine's name
        self.before: dict[str, list[dict[str, float]]] = {}  # by the peer's name: Octavo's, right before each of the peer's
        self.failed: dict[str, str] = {}

    def round(self, variants: Mapping[str, Engine], peers: Mapping[str, Engine]) -> None:
        first, *others = variants
        for name, engine in peers.items():
            if name not in self.failed:
                ours = self._run(first, variants[first])
                if ours and self._run(name, engine):
                    self.before.setdefault(name, []).append(ours)
        for variant in others if peers else variants:
            self._run(variant, variants[variant])

    def _run(self, name: str, engine: Engine) -> dict[str, float] | None:
        try:
            sample = measure(engine, self._loads)
        except EngineFailed as error:
            self.failed[name] = str(error)
            print(f"{name} failed: {error}", file=sys.stderr, flush=True)
            return None
        print(f"{name}: " + ", ".join(f"{column} {value:.4g}" for column, value in sample.items()), file=sys.stderr, flush=True)
        self.samples.setdefault(name, []).append(sample)
        return sample


def work(source: ModelSource) -> tuple[int, float]:
    """Returns the bytes of weights that a token reads, and the operations of a prefill of 1,024 tokens, without the head."""
    tensors = source.gguf.tensors
    matrices = [tensor.shape[0] * tensor.shape[1] for name, tensor in tensors.items() if name.startswith("blk.") and len(tensor.shape) == 2]
    metadata, length = source.gguf.metadata, 1024
    attention = 4 * length * length / 2 * metadata["llama.embedding_length"] * metadata["llama.block_count"]
    return sum(tensor.num_bytes for tensor in tensors.values()), 2 * length * sum(matrices) + attention


def shares(source: ModelSource, ours: Mapping[str, float], limits: Mapping[str, Figure]) -> list[str]:
    bytes_read, operations = work(source)
    lines = []
    if "single" in ours and "read_96_mb" in limits:
        reached = ours["single"] * bytes_read / 1e9
        share = reached / limits["read_96_mb"].at(50)
        lines.append(f"single reads {reached:.1f} GB/s of weights ({bytes_read / 1e6:.0f} MB a token): {share:.0%} of a buffer of 96 MB")
    if "prefill" in ours and "amx_bf16" in limits:
        reached = ours["prefill"] * operations / 1024 / 1e12
        lines.append(f"prefill computes {reached:.2f} TFLOP/s: {reached / limits['amx_bf16'].at(50):.0%} of AMX bfloat16 from registers")
    return lines


def _limits() -> dict[str, Figure]:
    try:
        return roofline.measure(num_threads())
    except roofline.NoRoofline as error:
        print(error, file=sys.stderr)
        return {}


def main() -> None:
    args = _arguments()
    source = resolve_model(None)
    loads = {name: load for name, load in text_loads(text_ids(load_tokenizer(source))).items() if name in args.loads}
    args.envs.mkdir(parents=True, exist_ok=True)
    comparison, peers = Comparison(loads), {}
    for name in args.peers:
        try:
            peers[name] = PEERS[name](source, args.envs)
        except (NotInstalled, ExportFailed) as error:
            comparison.failed[name] = str(error)
    variants = {f"octavo-{variant}": octavo(variant) for variant in args.octavo}
    limits = _limits()
    for number in range(1, args.rounds + 1):
        print(f"round {number} of {args.rounds}", file=sys.stderr, flush=True)
        comparison.round(variants, peers)
    after = _limits()
    limits = {name: Figure(figure.unit, [*figure.samples, *after[name].samples]) for name, figure in limits.items()}
    _say(args, source, comparison, variants | peers, limits)


def _say(args: argparse.Namespace, source: ModelSource, done: Comparison, engines: Mapping[str, Engine], limits: dict[str, Figure]) -> None:
    labels = {name: f"{engine.label}, {engine.weights}" for name, engine in engines.items()}
    first = f"octavo-{args.octavo[0]}"
    blocks = [f"{source.name}; {cpu_model()}, {num_threads()} threads; rounds: {args.rounds}, medians"]
    failed = {labels.get(name, name): reason for name, reason in done.failed.items()}
    blocks.append(report.figures_table({labels[name]: samples for name, samples in done.samples.items()}, failed))
    for variant in [name for name in done.samples if name.startswith("octavo-") and done.before]:
        ours = {labels[name]: before if variant == first else done.samples[variant] for name, before in done.before.items()}
        theirs = {labels[name]: done.samples[name] for name in done.before}
        blocks.append(report.ratios_table(labels[variant], platform.machine(), ours, theirs))
    if limits:
        blocks.append("roofline, before and after (least to most):\n" + roofline.report(limits))
        blocks += shares(source, report.medians(done.samples.get(first, [])), limits)
    print("\n\n".join(blocks))
    if args.json:
        content = {
            "command": sys.argv, "cpu": cpu_model(), "threads": num_threads(), "labels": labels, "samples": done.samples,
            "octavo_before": done.before, "failed": done.failed, "roofline": {name: figure.as_json() for name, figure in limits.items()},
        }  # fmt: skip
        args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    def some_of(known: list[str]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            names = [name for name in text.split(",") if name]
            if unknown := [name for name in names if name not in known]:
                raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}, only {', '.join(known)}")
            return names

        return parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=some_of(list(PEERS)), default=["llama", "llama-flash", "transformers", "openvino", "vllm"])
    parser.add_argument("--octavo", type=some_of(list(OCTAVO)), default=list(OCTAVO), help="variants; the first one runs before every peer")
    parser.add_argument("--loads", type=some_of(list(TEXT_LOADS)), default=list(TEXT_LOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--envs", type=Path, default=DEFAULT_ENVS, help="where the peers' environments and converted weights are kept")
    parser.add_argument("--json", type=Path, help="every sample, to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
