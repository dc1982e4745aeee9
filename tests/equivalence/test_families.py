"""Greedy text of each dense family against transformers in float32, from a folder and from a GGUF file.

Prompts are computed in chunks, rows come and go, and windows give back their blocks.
"""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from octavo import LLM, RequestOutput, SamplingParams
from tests.models.test_family import count_given_back
from tests.support.families import FAMILIES, VOCAB, Tiny, family_model, for_a_gpu, gemma3_with_images, reference_model
from tests.support.families_gguf import family_gguf
from tests.support.greedy import compare_with_reference, same_greedy_text
from tests.support.places import PLACES, Place, open_engine

FEW, MANY = (5, 24), pytest.param((200, 64), marks=pytest.mark.soak)
PREFIXES = ("model.language_model.", "language_model.model.")
SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "native": False, "skip_tokenizer_init": True, "max_num_batched_tokens": 32}


def prompts_for(tiny: Tiny, count: int, tokens: int) -> list[list[int]]:
    longest = min(tiny.engine.get("max_model_len", 256), 150) - tokens
    rng = Random(7)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, max(longest, 1)))] for _ in range(count)]


def greedy(model: Path, tiny: Tiny, prompts: list[list[int]], tokens: int, **settings: Any) -> tuple[list[RequestOutput], int]:
    """Returns the answers, and how many blocks windows gave back."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=4)
    with LLM(str(model), **SETTINGS | {"max_num_seqs": 8} | tiny.engine | settings) as llm:
        given_back = count_given_back(llm._core.scheduler.kv)
        return llm.generate(prompts, params, use_tqdm=False), given_back[0]


@pytest.mark.parametrize("load", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gives_the_tokens_transformers_gives(name: str, load: tuple[int, int], tmp_path: Path) -> None:
    tiny, (count, tokens) = FAMILIES[name], load
    tokens = min(tokens, tiny.engine.get("max_model_len", 256) - 2)
    folder = family_model(tmp_path / "model", tiny, seed=11)
    prompts = prompts_for(tiny, count, tokens)
    outputs, given_back = greedy(folder, tiny, prompts, tokens)
    comparison = compare_with_reference(outputs, reference_model(folder, tiny))
    assert comparison.tokens == count * tokens
    comparison.accept()
    assert (given_back > 0) == (tiny.options.get("sliding_window") is not None)


@PLACES
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gives_them_on_a_gpu_too(name: str, place: Place, tmp_path: Path) -> None:
    tiny = FAMILIES[name] if place == "cpu" else for_a_gpu(FAMILIES[name])
    folder = family_model(tmp_path / "model", tiny, seed=15)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=4)
    settings = {"dtype": "float32", "max_num_batched_tokens": 32, "max_num_seqs": 4, "num_gpu_blocks_override": 300} | tiny.engine
    with open_engine(folder, place, **settings) as llm:
        outputs = llm.generate(prompts_for(tiny, 3, 10), params, use_tqdm=False)
    compare_with_reference(outputs, reference_model(folder, tiny)).accept()


@pytest.mark.parametrize("name", [name for name, tiny in FAMILIES.items() if tiny.gguf])
def test_a_gguf_file_gives_the_text_of_its_folder(name: str, tmp_path: Path) -> None:
    tiny = FAMILIES[name]
    folder = family_model(tmp_path / "model", tiny, seed=12)
    prompts = prompts_for(tiny, 3, 16)
    from_folder, _ = greedy(folder, tiny, prompts, 16)
    from_file, _ = greedy(family_gguf(folder, tmp_path / "model.gguf", tiny), tiny, prompts, 16)
    assert all(same_greedy_text(one, other) for one, other in zip(from_folder, from_file, strict=True))


def test_the_text_part_of_a_model_of_images_is_found_under_its_prefixes(tmp_path: Path) -> None:
    """Files of transformers have one prefix, and those on the hub another. Weights of images are left out."""
    tiny = gemma3_with_images(tmp_path / "model", seed=13)
    prompts = prompts_for(tiny, 2, 12)
    outputs, _ = greedy(tmp_path / "model", tiny, prompts, 12)
    compare_with_reference(outputs, reference_model(tmp_path / "model", tiny)).accept()
    weights = load_file(tmp_path / "model" / "model.safetensors")
    assert any("vision_tower" in name for name in weights)
    found = {prefix for prefix in PREFIXES for name in weights if name.startswith(prefix)}
    assert len(found) == 1, sorted(weights)[:3]
    other = next(prefix for prefix in PREFIXES if prefix not in found)
    save_file({name.replace(*found, other): weight for name, weight in weights.items()}, tmp_path / "model" / "model.safetensors")
    again, _ = greedy(tmp_path / "model", tiny, prompts, 12)
    assert [one.outputs[0].token_ids for one in again] == [one.outputs[0].token_ids for one in outputs]


@pytest.mark.parametrize("name", ["phi3, window", "gemma3", "granite", "smollm3"])
def test_ranks_that_share_a_family_give_its_text(name: str, tmp_path: Path) -> None:
    tiny = FAMILIES[name]
    folder = family_model(tmp_path / "model", tiny, seed=14)
    prompts = prompts_for(tiny, 2, 8)
    alone, _ = greedy(folder, tiny, prompts, 8)
    shared, _ = greedy(folder, tiny, prompts, 8, tensor_parallel_size=2)
    assert all(same_greedy_text(one, other) for one, other in zip(alone, shared, strict=True))
