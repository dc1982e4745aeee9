"""A mixture that is split over real processes says what one process says."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests.support.greedy import same_greedy_text
from tests.support.mixtures import plain_folder

SOAK = pytest.mark.soak
EXPERTS = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


def said(folder: Path, **settings: Any) -> list[Any]:
    rng = Random(7)
    prompts = [[rng.randrange(97) for _ in range(rng.randint(1, 40))] for _ in range(6)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=3)
    with LLM(str(folder), dtype="float32", skip_tokenizer_init=True, max_num_seqs=6, num_gpu_blocks_override=40, **settings) as llm:
        return llm.generate(prompts, params, use_tqdm=False)


# promise: enable-expert-parallel, llm-enable-expert-parallel
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        pytest.param("Qwen2MoeForCausalLM", {"tensor_parallel_size": 2}, marks=SOAK),
        ("GptOssForCausalLM", EXPERTS),
        pytest.param("MixtralForCausalLM", {"pipeline_parallel_size": 2}, marks=SOAK),
        pytest.param("GptOssForCausalLM", {"tensor_parallel_size": 2}, marks=SOAK),
        pytest.param("Qwen3MoeForCausalLM", EXPERTS | {"pipeline_parallel_size": 2}, marks=SOAK),
    ],
)
def test_ranks_of_a_mixture_say_what_one_says(architecture: str, settings: dict[str, Any], tmp_path: Path) -> None:
    shared = {"shared_expert_intermediate_size": 38} if architecture == "Qwen2MoeForCausalLM" else {}
    folder = plain_folder(tmp_path, architecture, **shared)
    assert all(same_greedy_text(one, other) for one, other in zip(said(folder), said(folder, **settings), strict=True))
