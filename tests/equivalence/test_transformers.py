"""Greedy text against transformers in float32: the same tokens, model family by model family, and on the real weights."""

from pathlib import Path
from random import Random

import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams
from octavo.loading.resolve import resolve_model
from tests.support.greedy import compare_with_reference
from tests.support.models import tiny_model
from tests.support.smollm2 import reference_smollm2

TOKENS = 64


def random_prompts(count: int, vocab: int, longest: int, seed: int) -> list[list[int]]:
    rng = Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def greedy(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=4)
    return llm.generate(prompts, params, use_tqdm=False)


# promise: family-folder
@pytest.mark.parametrize("prompts", [32, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_tiny_models_give_the_tokens_transformers_gives(architecture: str, prompts: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_model(tmp_path / "model", architecture, seed=1)
    with LLM(str(folder), dtype="float32", skip_tokenizer_init=True, max_num_seqs=64, num_gpu_blocks_override=500) as llm:
        outputs = greedy(llm, random_prompts(prompts, 300, 60, seed=2))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    comparison = compare_with_reference(outputs, reference)
    assert comparison.tokens == prompts * TOKENS
    comparison.accept()


# promise: llm-model-none
@pytest.mark.parametrize(("prompts", "tokens"), [(4, 12), pytest.param(40, 64, marks=pytest.mark.soak)])
def test_smollm2_gives_the_tokens_transformers_gives(prompts: int, tokens: int) -> None:
    questions = [line for line in Path("tests/data/prompts/questions.txt").read_text().splitlines() if line][:prompts]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=4)
    with LLM(dtype="float32", native=False) as llm:  # native, its weights would stay codes
        outputs = llm.generate(questions, params, use_tqdm=False)
    reference = reference_smollm2(resolve_model(None).path)
    comparison = compare_with_reference(outputs, reference, batch_size=10)
    assert comparison.tokens == prompts * tokens
    comparison.accept()
