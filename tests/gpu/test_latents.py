"""Models with latent attention on a GPU: graphs, steps that do not wait, and memory, with latents as large as published ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams
from octavo.worker.graph_program import Graph
from tests.equivalence.test_hybrids import GREEDY, second_turns
from tests.equivalence.test_verify import run as run_verify
from tests.gpu.test_deterministic import SETTINGS as DETERMINISTIC
from tests.gpu.test_deterministic import under_schedules
from tests.gpu.test_hybrids import BATCHED, ROWS, prompts
from tests.support.families import Tiny, family_model, reference_model
from tests.support.greedy import compare_with_reference
from tests.support.latents import LATENTS
from tests.support.places import open_engine, vocabulary

SETTINGS: dict[str, Any] = {
    "max_num_seqs": ROWS, "max_num_batched_tokens": BATCHED, "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28,
}  # fmt: skip


def large(name: str, heads: int = 20) -> Tiny:
    """Latents of published sizes, in two layers: one with an MLP, one with experts."""
    options = LATENTS[name].options
    fields = {
        "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 2, "first_k_dense_replace": 1,
        "num_attention_heads": heads, "num_key_value_heads": heads, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "q_lora_rank": options["q_lora_rank"] and 192, "vocab_size": vocabulary("cuda"), "max_position_embeddings": 2048,
    }  # fmt: skip
    types = {"mlp_layer_types": ["dense", "sparse"]} if "mlp_layer_types" in options else {}
    return replace(LATENTS[name], options=options | fields | types)


def answers(folder: Path, dtype: str, **settings: Any) -> list[RequestOutput]:
    """Samples and forks, chunks beside other rows, preemptions, and second turns that continue from cached blocks."""
    params = [SamplingParams(temperature=n % 2, n=1 + n % 3, seed=n, max_tokens=20, ignore_eos=True, logprobs=3) for n in range(24)]
    with open_engine(folder, "cuda", check=True, dtype=dtype, pipeline_depth=2, **SETTINGS | settings) as llm:
        executor: Any = llm._core.executor
        assert isinstance(executor.program, Graph) and bool(executor.program._graphs) != bool(settings.get("enforce_eager"))
        first = llm.generate(prompts(24, 600), params, use_tqdm=False)
        second = llm.generate(second_turns(first), params, use_tqdm=False)
        assert llm.stats().prefix_hits > 0
        return first + second


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "heads", "dtype"), [("glm 4.7 flash", 20, "bfloat16"), ("deepseek v3", 128, "bfloat16"), ("deepseek v2 lite", 16, "float32")]
)
def test_graphs_and_their_kernels_one_by_one_say_the_same(name: str, heads: int, dtype: str, tmp_path: Path) -> None:
    folder = family_model(tmp_path / "model", large(name, heads), seed=3)
    replayed, launched = (answers(folder, dtype, enforce_eager=eager) for eager in (False, True))
    for one, other in zip(replayed, launched, strict=True):
        assert [(each.token_ids, each.logprobs) for each in one.outputs] == [(each.token_ids, each.logprobs) for each in other.outputs]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["glm 4.7 flash", "deepseek v3"])
def test_texts_of_large_latents_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """One row reads in parts, several in work items, and prompts come in chunks."""
    tiny = large(name)
    folder = family_model(tmp_path / "model", tiny, seed=8)
    with open_engine(folder, "cuda", check=True, dtype="float32", **SETTINGS) as llm:
        alone = llm.generate([[(7 * at) % 4000 + 3 for at in range(1000)]], GREEDY, use_tqdm=False)
        first = llm.generate(prompts(8, 500), GREEDY, use_tqdm=False)
        second = llm.generate(second_turns(first), GREEDY, use_tqdm=False)
    compare_with_reference(alone + first + second, reference_model(folder, tiny)).accept()


# promise: deterministic
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "heads", "dtype", "budget"),
    [("glm 4.7 flash", 20, "bfloat16", 64), ("deepseek v3", 40, "bfloat16", 2048), ("deepseek v2 lite", 16, "float32", 256)],
)
def test_no_schedule_changes_an_answer(name: str, heads: int, dtype: Any, budget: int, tmp_path: Path) -> None:
    folder = str(family_model(tmp_path / "model", large(name, heads), seed=4))
    with LLM(folder, dtype=dtype, max_num_batched_tokens=budget, **DETERMINISTIC) as llm:
        under_schedules(llm)


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True])
def test_no_step_waits_for_the_device(eager: bool, tmp_path: Path) -> None:
    folder, params = family_model(tmp_path / "model", large("deepseek v3"), seed=5), SamplingParams(max_tokens=16, n=2, ignore_eos=True)
    with open_engine(folder, "cuda", dtype="bfloat16", enforce_eager=eager, **SETTINGS) as llm:
        llm.generate(prompts(6, 400), params, use_tqdm=False)  # what is set up once
        torch.cuda.set_sync_debug_mode("error")
        try:
            llm.generate(prompts(8, 400), params, use_tqdm=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype", "deterministic"),
    [("glm 4.7 flash", "bfloat16", False), ("deepseek v3", "float32", False), ("deepseek v3", "bfloat16", True)],
)
def test_paging_changes_no_bit_of_latents(name: str, dtype: str, deterministic: bool, tmp_path: Path) -> None:
    folder = str(family_model(tmp_path / "model", large(name), seed=6))
    verified = run_verify(folder, requests=16, device="cuda", dtype=dtype, depth=2, deterministic=deterministic)
    assert verified.kernels == "Triton" and verified.compared.cache_values > 100_000


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_quantised_weights_beside_latents_give_nearly_the_same_logprobs(quantization: str, tmp_path: Path) -> None:
    folder = family_model(tmp_path / "model", large("deepseek v3"), seed=7)
    params, found = SamplingParams(temperature=0, max_tokens=1, logprobs=1, prompt_logprobs=0), []
    for settings in ({}, {"quantization": quantization}):
        with open_engine(folder, "cuda", dtype="bfloat16", **SETTINGS, **settings) as llm:
            (output,) = llm.generate([[(7 * at) % 4000 + 3 for at in range(200)]], params, use_tqdm=False)
        numbers = [next(iter(one.values())).logprob for one in (output.prompt_logprobs or [])[1:] if one]
        found.append(sum(numbers) / max(len(numbers), 1))
    assert abs(found[0] - found[1]) < (0.5 if quantization == "int4" else 0.1)
