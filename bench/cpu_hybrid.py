"""A model with recurrent layers, of the shape of Qwen3.5-0.8B, on the CPU beside llama.cpp on the same GGUF file.

    python bench/cpu_hybrid.py [--kind Q4_0] [--rounds 3] [--loads single,prefill]

Weights are random. A round is Octavo and llama.cpp, each in a process of its own, so that a ratio is of two runs one after the other.
"""

from bench.cpu_mixture import arguments, both_engines, loads, print_ratios, run_rounds
from bench.peers import report
from bench.peers.dummy_hybrid import HybridShape, write
from octavo.worker.machine import cpu_model, num_threads

LOADS = {"single": (1, 64, 128), "prefill": (4, 512, 1)}  # streams, tokens in, tokens out of each


def main() -> None:
    args, shape = arguments(str(__doc__), LOADS), HybridShape()
    wanted = loads(LOADS, args.loads.split(","), shape.vocab)
    path = write(args.envs / "models" / f"hybrid-{args.kind}.gguf", shape, args.kind)
    samples = run_rounds(both_engines(path, args.kind, args.envs, not args.alone, max_num_seqs=8), wanted, args.rounds)
    print(f"{args.kind}, {shape.token_bytes(args.kind) / 1e6:.0f} MB of matrices a token; {cpu_model()}, {num_threads()} threads; medians")
    print(report.figures_table(samples, {}))
    print_ratios({"Octavo of llama.cpp": ("Octavo", "llama.cpp")}, samples, wanted)


if __name__ == "__main__":
    main()
