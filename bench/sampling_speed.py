"""Measures how fast the native library samples from logits, beside its torch twin: `python bench/sampling_speed.py`.

There are 32 rows of 49,152 random logits. They are flatter than those of a model, which makes it harder. Both run on one thread, in
turn. The figures are the best native call and the median of the ratios.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from octavo.kernels.cpu.levels import open_native
from octavo.kernels.cpu.sampling import NativeSampling
from octavo.kernels.reference import sampling as twin
from octavo.kernels.reference.sampling import Draws
from octavo.worker.sampler import Sampling

ROWS, VOCAB = 32, 49_152
FILTERS = {"temperature 0.7": (0, 1.0, 0.0), "top_k 50": (50, 1.0, 0.0), "top_p 0.9": (0, 0.9, 0.0), "min_p 0.05": (0, 1.0, 0.05)}


def calls() -> dict[str, Callable[[Sampling], object]]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, VOCAB, generator=generator) * 3
    noise = torch.randint(0, 2**32, (ROWS, 4), generator=generator)
    ones, ids = torch.ones(ROWS), torch.arange(ROWS)

    def drawing(top_k: int, top_p: float, min_p: float) -> Callable[[Sampling], object]:
        draws = Draws(ones * 0.7, (ones * top_k).long(), ones * top_p, ones * min_p, noise, ids)
        return lambda sampling: sampling.draw(logits, draws)

    return {name: drawing(*kind) for name, kind in FILTERS.items()} | {"logprobs 5": lambda sampling: sampling.rank(logits, ids, 5)}


def seconds(call: Callable[[Sampling], object], sampling: Sampling) -> float:
    start = time.perf_counter()
    call(sampling)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    library = open_native("auto", 1)
    assert library is not None, "the native library is not built"
    native = NativeSampling(library)
    for name, call in calls().items():
        pairs = [(seconds(call, twin), seconds(call, native)) for _ in range(rounds)]
        best, ratio = min(mine for _, mine in pairs), statistics.median(torch_ / mine for torch_, mine in pairs)
        print(f"{name:16} {best / ROWS * 1e6:6.0f} us a row, {ratio:5.1f}x", flush=True)


if __name__ == "__main__":
    main()
