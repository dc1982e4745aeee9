"""The host plans and launches ahead of the device: nothing of a step but its result waits for it, whatever the step does."""

from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from tests.support.places import open_engine, random_model, vocabulary

SAMPLES = 3


def batch(llm: LLM) -> int:
    """Samples that fork and copy blocks, filters, penalties and logprobs; how many blocks were copied."""
    copied: list[int] = []
    core = llm._core  # type: ignore[attr-defined]
    schedule = core.scheduler.schedule

    def counted():  # type: ignore[no-untyped-def]
        plan = schedule()
        copied.append(len(plan.copies))
        return plan

    core.scheduler.schedule = counted
    prompts = [[(5 * row + at) % vocabulary("cuda") for at in range(20 + row)] for row in range(4)]
    asks = [{"n": SAMPLES}, {"n": SAMPLES, "top_p": 0.9, "logprobs": 2}, {"repetition_penalty": 1.2}, {"temperature": 0}]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, detokenize=False, **ask) for ask in asks]  # type: ignore[arg-type]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert {(sample.finish_reason, sample.stop_reason) for output in outputs for sample in output.outputs} == {("length", None)}
    core.scheduler.schedule = schedule
    return sum(copied)


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True])
def test_no_step_waits_for_the_device(eager: bool, tmp_path: Path) -> None:
    folder = random_model(tmp_path, "Qwen3ForCausalLM", "cuda")
    with open_engine(
        folder, "cuda", dtype="bfloat16", enforce_eager=eager, num_gpu_blocks_override=256, max_num_seqs=16, max_num_batched_tokens=256
    ) as llm:
        batch(llm)  # what is set up once
        torch.cuda.set_sync_debug_mode("error")
        try:
            assert batch(llm) >= SAMPLES - 1
        finally:
            torch.cuda.set_sync_debug_mode("default")
