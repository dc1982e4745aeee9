"""A kernel that begins while the one before still runs must not show: 1,000 steps with and without, bit for bit."""

import sys
from pathlib import Path

import pytest

from octavo import RequestOutput, SamplingParams
from tests.support.places import open_engine, random_model, vocabulary

ROWS, STEPS = 24, 1000


def texts(folder: Path, rows: int) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=STEPS, ignore_eos=True, detokenize=False, logprobs=1)
    prompts = [[(11 * row + 3 * at) % vocabulary("cuda") for at in range(row + 1)] for row in range(rows)]
    limits = {"max_num_seqs": rows, "max_num_batched_tokens": 512, "max_model_len": 1024, "num_gpu_blocks_override": rows * 65}
    with open_engine(folder, "cuda", dtype="bfloat16", **limits) as llm:
        return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, ROWS])  # few rows have kernels of their own
def test_nobody_reads_what_is_not_yet_written(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = random_model(tmp_path, "Qwen3ForCausalLM", "cuda")
    early = texts(folder, rows)
    modules = [module for name, module in sys.modules.items() if name.startswith("octavo.kernels.triton") and hasattr(module, "use_pdl")]
    assert len(modules) >= 6
    for module in modules:
        monkeypatch.setattr(module, "use_pdl", lambda: False)
    for one, other in zip(early, texts(folder, rows), strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids and len(one.outputs[0].token_ids) == STEPS
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
