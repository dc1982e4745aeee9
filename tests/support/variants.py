"""Which kernels the device's sampler would have compiled after the start: `python -m tests.support.variants` says, a line each.

Triton compiles a kernel once more for other types, for pointers that are not aligned, for other constants. Its hook tells the key
of what it would compile; nothing is compiled, and there need be no GPU.
"""

from array import array
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.runtime.driver import driver

from octavo.kernels.row_words import RowLayout
from octavo.kernels.triton.adjust import adjust
from octavo.kernels.triton.ahead import Ahead
from octavo.kernels.triton.draw import draw
from octavo.kernels.triton.rank import rank
from octavo.messages import NoiseKey, RowWrite, StepPlan
from octavo.sampling_params import SamplingParams
from octavo.worker import device_prompt_logprobs, device_sampler
from octavo.worker.device_prompt_logprobs import DevicePromptLogprobs
from octavo.worker.device_rows import DeviceRows
from octavo.worker.device_sampler import DeviceSampler
from tests.support.hopper import NoGPU

VOCAB, CPU, DTYPE = 151936, torch.device("cpu"), torch.bfloat16
KINDS: list[dict[str, Any]] = [
    {"top_k": 5, "logprobs": 3, "prompt_logprobs": 2},
    {"frequency_penalty": 1.0, "temperature": 0},
    {"logprobs": 20},
    {"top_p": 0.4, "logit_bias": {3: 1.0}},
    {"min_p": 0.1},
]


def record() -> set[str]:
    met: set[str] = set()

    def hook(*, key: Any, repr: str, **_: Any) -> bool:
        met.add(f"{repr} {key}")
        return True  # that is, do not compile it

    knobs.runtime.jit_cache_hook = hook
    return met


def serve() -> None:
    """Steps of every kind of entry, in batches of odd and even numbers."""
    for module in (device_sampler, device_prompt_logprobs):
        for kernel in (draw, rank, adjust):
            setattr(module, kernel.__name__, kernel)  # as on a GPU
    rows = DeviceRows(6, RowLayout(3, 41), CPU)
    sampler, prompts = DeviceSampler(rows, VOCAB, CPU), DevicePromptLogprobs(rows, VOCAB)
    writes = [
        RowWrite(row, row, array("i", range(12)), 11, 0, [], SamplingParams(**kind), (1,), [], NoiseKey((1, 2), 3, 4), b"")
        for row, kind in enumerate(KINDS)
    ]
    plan = StepPlan(0, row=[4, 3, 2, 1, 0], start=[11, 11, 11, 11, 3], num_query=[1, 1, 1, 1, 8], samples=[True] * 5, row_writes=writes)
    for part in (rows, sampler, prompts):
        part.apply(plan)  # type: ignore[attr-defined]
    for entries in (5, 8):
        for special in ([0, 1, 2, 3, 4], [1], [2, 4], [3], [0, 4]):
            logits, ids = torch.zeros(entries, VOCAB, dtype=DTYPE), torch.zeros(entries, dtype=torch.int32)
            sampler.sample(logits, special, plan.row, ids)
    prompts.rankings(torch.zeros(12, 4), plan, lambda hidden: torch.zeros(len(hidden), VOCAB, dtype=DTYPE))


def main() -> None:
    driver.set_active(NoGPU())
    met = record()
    ahead = Ahead(SimpleNamespace(vocab_size=VOCAB), DTYPE, 16, 8, 64, CPU)  # type: ignore[arg-type]
    for call in ahead.behind_a_step():
        call()
    known = set(met)
    assert len(known) == 15, "ten kernels, five of them for two types of logits"
    serve()
    print("\n".join(sorted(met - known)))


if __name__ == "__main__":
    main()
