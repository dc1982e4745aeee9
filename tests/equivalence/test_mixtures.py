"""Mixtures of experts against transformers in float32: the same greedy tokens, family by family and form of file by form of file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from octavo import LLM, RequestOutput, SamplingParams
from octavo.config import EngineConfig
from octavo.engine.verify import verify
from octavo.loading.resolve import load_model_config, source_of
from tests.equivalence.test_transformers import random_prompts
from tests.support.greedy import compare_with_reference
from tests.support.mixtures import HEADS, MIXTURES, VOCAB, plain_folder, tiny_mixture, to_mxfp4
from tests.support.places import PLACES, Place, open_engine

HUB_NAMES = {
    "MixtralForCausalLM": ["model.layers.1.block_sparse_moe.gate.weight", "model.layers.1.block_sparse_moe.experts.4.w3.weight"],
    "Qwen2MoeForCausalLM": ["model.layers.1.mlp.experts.4.up_proj.weight", "model.layers.1.mlp.shared_expert_gate.weight"],
    "Qwen3MoeForCausalLM": ["model.layers.2.mlp.experts.4.up_proj.weight", "model.layers.1.mlp.up_proj.weight"],
    "GptOssForCausalLM": ["model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj_bias"],
}


def greedy(folder: Path, prompts: list[list[int]], tokens: int, **settings: Any) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=4)
    with LLM(str(folder), dtype="float32", skip_tokenizer_init=True, max_num_seqs=32, num_gpu_blocks_override=400, **settings) as llm:
        return llm.generate(prompts, params, use_tqdm=False)


def accepted(folder: Path, outputs: list[RequestOutput], tokens: int) -> None:
    from transformers import AutoModelForCausalLM

    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # others want sizes that are multiples of 16
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **plain)
    comparison = compare_with_reference(outputs, reference)
    assert comparison.tokens == tokens
    comparison.accept()


# promise: mixture-text
@pytest.mark.parametrize(("requests", "tokens"), [(6, 20), pytest.param(200, 64, marks=pytest.mark.soak)])
@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("architecture", MIXTURES)
def test_mixtures_give_the_tokens_transformers_gives(architecture: str, native: bool, requests: int, tokens: int, tmp_path: Path) -> None:
    folder = tiny_mixture(tmp_path / "model", architecture, seed=1)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert set(HUB_NAMES[architecture]) <= set(file.keys())  # the names of files on the hub
    outputs = greedy(folder, random_prompts(requests, VOCAB, 60, seed=2), tokens, native=native)
    accepted(folder, outputs, requests * tokens)


# promise: mixture-text
@PLACES
@pytest.mark.parametrize("architecture", MIXTURES)
def test_mixtures_give_them_on_a_gpu_too(architecture: str, place: Place, tmp_path: Path) -> None:
    """One row, which takes the kernels for a few, and several. Kernels of a GPU want heads of a multiple of 16 numbers."""
    folder = tiny_mixture(tmp_path / "model", architecture, seed=3, **{"hidden_size": 16 * HEADS} if place == "cuda" else {})
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=4)
    with open_engine(folder, place, dtype="float32", max_num_seqs=8, num_gpu_blocks_override=300) as llm:
        prompts = random_prompts(6, VOCAB, 60, seed=4)
        outputs = llm.generate(prompts[:1], params, use_tqdm=False) + llm.generate(prompts[1:], params, use_tqdm=False)
    accepted(folder, outputs, 6 * 8)


def test_gpt_oss_as_on_the_hub_gives_the_tokens_transformers_gives(tmp_path: Path) -> None:
    """Experts in MXFP4; transformers reads the floats that they stand for, as torch does: native kernels round what experts read."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tiny_mixture(tmp_path / "floats", "GptOssForCausalLM", seed=1, inner=32, hidden_size=64, **heads)
    blocks = to_mxfp4(folder, tmp_path / "blocks")
    accepted(folder, greedy(blocks, random_prompts(4, VOCAB, 60, seed=2), 12, native=False), 4 * 12)


@pytest.mark.parametrize("architecture", [*(pytest.param(one, marks=pytest.mark.soak) for one in MIXTURES[:-1]), MIXTURES[-1]])
def test_paging_is_proved_for_a_mixture(architecture: str, tmp_path: Path) -> None:
    config = EngineConfig(model=str(plain_folder(tmp_path, architecture)), dtype="float32")
    source = source_of(config)
    assert verify(config, source, load_model_config(source), depth=1, num_requests=24).compared.values > 0
