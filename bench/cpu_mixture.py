"""A packed mixture of experts on the CPU, beside a dense model whose active part is as large, and beside llama.cpp.

    python bench/cpu_mixture.py [--kind Q4_0] [--rounds 3] [--loads single,batch32]

Weights are random. A token of the mixture reads 4 of 32 experts in each of 16 layers, and as many bytes of weights as a token of the dense
model. A round is Octavo's mixture, Octavo's dense model and llama.cpp with both, each in a process of its own.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random
from statistics import median

from bench.cpu_peers import DEFAULT_ENVS, measure
from bench.peers import report
from bench.peers.dummy_gguf import BLOCKS, Shape, write
from bench.peers.engines import HERE, Engine
from bench.peers.environments import environment
from octavo.bench.workload import Workload, random_ids
from octavo.worker.machine import cpu_model, num_threads

LOADS = {"single": (1, 128, 128), "batch32": (32, 64, 32)}  # streams, tokens in, tokens out of each
PAIRS = {
    "the mixture of the dense model, Octavo": ("Octavo, mixture", "Octavo, dense"),
    "the mixture of the dense model, llama.cpp": ("llama.cpp, mixture", "llama.cpp, dense"),
    "Octavo of llama.cpp, mixture": ("Octavo, mixture", "llama.cpp, mixture"),
    "Octavo of llama.cpp, dense": ("Octavo, dense", "llama.cpp, dense"),
}


def engines(kind: str, shape: Shape, root: Path, peer: bool) -> dict[str, Engine]:
    found = {}
    for word in ("mixture", "dense"):
        path = write(root / "models" / f"{word}-{kind}.gguf", shape, kind, word == "mixture")
        found |= {f"{name}, {word}": engine for name, engine in both_engines(path, kind, root, peer).items()}
    return found


def both_engines(path: Path, kind: str, root: Path, peer: bool, **settings: object) -> dict[str, Engine]:
    """Returns Octavo and, with `peer`, llama.cpp for one file. `settings`: of Octavo's engine"""
    variables = {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]), "OCTAVO_LOG_LEVEL": "WARNING"}
    ours: dict[str, object] = {"model": str(path), "skip_tokenizer_init": True, "max_model_len": 1024, **settings}
    found = {"Octavo": Engine("Octavo", kind, Path(sys.executable), "run_octavo.py", {"engine": ours}, variables)}
    if peer:
        theirs: dict[str, object] = {"model": str(path), "unified": False, "flash": False}
        found["llama.cpp"] = Engine("llama.cpp", kind, environment("llama", root), "run_llama.py", theirs)
    return found


def loads(chosen: Mapping[str, tuple[int, int, int]], names: list[str], vocab: int) -> dict[str, Workload]:
    """`chosen`: streams, tokens in and tokens out of each load"""
    rng, found = Random(0), {}
    for name in names:
        count, tokens, out = chosen[name]
        found[name] = Workload(name, [(random_ids(rng, tokens, vocab), out) for _ in range(count)])
    return found


def run_rounds(running: Mapping[str, Engine], wanted: Mapping[str, Workload], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Runs each engine once a round. Returns the figures of each."""
    samples: dict[str, list[dict[str, float]]] = {}
    for number in range(1, rounds + 1):
        for name, engine in running.items():
            sample = measure(engine, wanted)
            samples.setdefault(name, []).append(sample)
            figures = ", ".join(f"{key} {value:.4g}" for key, value in sample.items())
            print(f"round {number}: {name}: {figures}", file=sys.stderr, flush=True)
    return samples


def main() -> None:
    args, shape = arguments(str(__doc__), LOADS), Shape()
    wanted = loads(LOADS, args.loads.split(","), shape.vocab)
    samples = run_rounds(engines(args.kind, shape, args.envs, not args.alone), wanted, args.rounds)
    print(f"{args.kind}, {shape.active_bytes(args.kind) / 1e6:.0f} MB of matrices a token; {cpu_model()}, {num_threads()} threads; medians")
    print(report.figures_table(samples, {}))
    print_ratios(PAIRS, samples, wanted)


def print_ratios(
    compared: Mapping[str, tuple[str, str]], samples: Mapping[str, list[dict[str, float]]], wanted: Mapping[str, Workload]
) -> None:
    for title, (one, other) in compared.items():
        if one in samples and other in samples:
            ratios = [(load, [a[load] / b[load] for a, b in zip(samples[one], samples[other])]) for load in wanted]
            print(f"{title}: " + ", ".join(f"{load} {median(each):.2f}x" for load, each in ratios))


def arguments(description: str, chosen: Mapping[str, tuple[int, int, int]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=list(BLOCKS), default="Q4_0")
    parser.add_argument("--loads", default=",".join(chosen))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="without llama.cpp")
    parser.add_argument("--envs", type=Path, default=DEFAULT_ENVS, help="where llama.cpp's environment and the weights are kept")
    return parser.parse_args()


if __name__ == "__main__":
    main()
