"""Greedy text of each dense family against transformers in float32, from a folder and from a GGUF file.

Prompts are computed in chunks, rows come and go, and windows give back their blocks.
"""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from octavo import LLM, RequestOutput, SamplingParams
from octavo.config import EngineConfig
from octavo.engine.verify import verify
from octavo.loading.resolve import load_model_config, resolve_model
from octavo.loading.shape import model_shape
from octavo.sizing.native_size import native_refusal
from tests.models.test_family import count_given_back
from tests.support.families import FAMILIES, VOCAB, Tiny, family_model, for_a_gpu, gemma3_with_images, reference_model
from tests.support.families_gguf import family_gguf
from tests.support.greedy import compare_with_reference, same_greedy_text
from tests.support.places import Place, open_engine
from tests.support.soaked import one_in, rarely

FEW, MANY = (5, 24), pytest.param((200, 64), marks=pytest.mark.soak)
OF_TRANSFORMERS = ("model.language_model.", "model.vision_tower.", "model.multi_modal_projector.")  # prefixes of weights
OF_THE_HUB = ("language_model.model.", "vision_tower.", "multi_modal_projector.")
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


# promise: family-folder
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


# promise: family-folder
@pytest.mark.parametrize(
    ("name", "place"),
    [*one_in(2, [(name, "cpu") for name in FAMILIES]), *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in FAMILIES)],
)
def test_a_family_gives_them_on_a_gpu_too(name: str, place: Place, tmp_path: Path) -> None:
    tiny = FAMILIES[name] if place == "cpu" else for_a_gpu(FAMILIES[name])
    folder = family_model(tmp_path / "model", tiny, seed=15)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=4)
    settings = {"dtype": "float32", "max_num_batched_tokens": 32, "max_num_seqs": 4, "num_gpu_blocks_override": 300} | tiny.engine
    with open_engine(folder, place, **settings) as llm:
        outputs = llm.generate(prompts_for(tiny, 3, 10), params, use_tqdm=False)
    compare_with_reference(outputs, reference_model(folder, tiny)).accept()


# promise: family-gguf
@pytest.mark.parametrize("name", one_in(2, (name for name, tiny in FAMILIES.items() if tiny.gguf)))
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
    there, other = OF_TRANSFORMERS, OF_THE_HUB
    if not any(name.startswith(there) for name in weights):
        there, other = other, there
    pairs = [(name, old, new) for name in weights for old, new in zip(there, other) if name.startswith(old)]
    renamed = {new + name.removeprefix(old): weights[name] for name, old, new in pairs}
    assert len(renamed) == len(weights) and {old for _, old, _ in pairs} == {*there}, sorted(weights)[:5]
    save_file(renamed, tmp_path / "model" / "model.safetensors")
    again, _ = greedy(tmp_path / "model", tiny, prompts, 12)
    assert [one.outputs[0].token_ids for one in again] == [one.outputs[0].token_ids for one in outputs]


@pytest.mark.parametrize("name", ["gemma3", *rarely("bloom, six heads", "cohere", "granite", "phi3, window", "smollm3", "bloom")])
def test_ranks_that_share_a_family_give_its_text(name: str, tmp_path: Path) -> None:
    tiny = FAMILIES[name]
    folder = family_model(tmp_path / "model", tiny, seed=14)
    prompts = prompts_for(tiny, 2, 8)
    alone, _ = greedy(folder, tiny, prompts, 8)
    shared, _ = greedy(folder, tiny, prompts, 8, tensor_parallel_size=2)
    assert all(same_greedy_text(one, other) for one, other in zip(alone, shared, strict=True))


def test_the_native_program_reads_weights_of_several_parts(tmp_path: Path) -> None:
    tiny = FAMILIES["phi3, whole heads"]
    folder = family_model(tmp_path / "model", tiny, seed=17)
    assert native_refusal(model_shape(str(folder)).model) is None
    prompts = prompts_for(tiny, 2, 12)
    (native, _), (plain, _) = (greedy(folder, tiny, prompts, 12, native=native) for native in (True, False))
    assert all(same_greedy_text(one, other) for one, other in zip(native, plain, strict=True))


@pytest.mark.parametrize("name", ["gemma3", "bloom", *rarely("phi3, window", "cohere2", "gemma2", "olmo2", "smollm3, windows")])
def test_paging_is_invisible_in_a_family(name: str, tmp_path: Path) -> None:
    folder = family_model(tmp_path / "model", FAMILIES[name], seed=16)
    source = resolve_model(str(folder))
    config = EngineConfig(model=str(folder), device="cpu", native=False, block_size=4)
    verified = verify(config, source, load_model_config(source), 1, 8)
    assert verified.kernels == "torch" and verified.compared.cache_values and verified.compared.output_values
