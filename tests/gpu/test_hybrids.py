"""Models with recurrent layers on a GPU: graphs, `deterministic`, and steps that do not wait, with heads as large as published ones."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams
from octavo.worker.graph_program import Graph
from tests.equivalence.test_hybrids import second_turns
from tests.gpu.test_deterministic import SETTINGS, under_schedules
from tests.support.families import Tiny, family_model
from tests.support.hybrids import HYBRIDS
from tests.support.places import open_engine, vocabulary

ROWS, BATCHED = 12, 256  # tokens of a step: some are captured, and longer prompts are computed in chunks


def large(name: str) -> Tiny:
    """Heads of published sizes: 256 numbers of which a quarter is rotated, and states of 128 x 128."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    fields = {"hidden_size": 256, "head_dim": 256, "vocab_size": vocabulary("cuda"), "max_position_embeddings": 2048}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}}
    return replace(HYBRIDS[name], options=HYBRIDS[name].options | fields | heads | rope)


def prompts(count: int, longest: int) -> list[list[int]]:
    rng = Random(3)
    return [[rng.randrange(vocabulary("cuda")) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def answers(folder: Path, dtype: str, **settings: Any) -> list[RequestOutput]:
    """Samples and forks, chunks beside other rows, preemptions, and second turns that continue from kept states."""
    params = [SamplingParams(temperature=n % 2, n=1 + n % 3, seed=n, max_tokens=20, ignore_eos=True, logprobs=3) for n in range(24)]
    with open_engine(
        folder, "cuda", check=True, dtype=dtype, max_num_seqs=ROWS, max_num_batched_tokens=BATCHED, max_model_len=1024,
        kv_cache_memory_bytes=1 << 28, pipeline_depth=2, **settings,
    ) as llm:  # fmt: skip
        executor: Any = llm._core.executor
        assert isinstance(executor.program, Graph) and bool(executor.program._graphs) != bool(settings.get("enforce_eager"))
        first = llm.generate(prompts(24, 600), params, use_tqdm=False)
        second = llm.generate(second_turns(first), params, use_tqdm=False)
        assert llm.stats().prefix_hits > 0
        return first + second


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next"])
def test_graphs_and_their_kernels_one_by_one_say_the_same(name: str, dtype: str, tmp_path: Path) -> None:
    folder = family_model(tmp_path / "model", large(name), seed=3)
    replayed, launched = (answers(folder, dtype, enforce_eager=eager) for eager in (False, True))
    for one, other in zip(replayed, launched, strict=True):
        assert [(each.token_ids, each.logprobs) for each in one.outputs] == [(each.token_ids, each.logprobs) for each in other.outputs]


# promise: deterministic
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("budget", [64, 2048])
def test_no_schedule_changes_an_answer(dtype: str, budget: int, tmp_path: Path) -> None:
    folder = str(family_model(tmp_path / "model", large("qwen3.5"), seed=4))
    with LLM(folder, dtype=dtype, max_num_batched_tokens=budget, **SETTINGS) as llm:
        under_schedules(llm)


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True])
def test_no_step_waits_for_the_device(eager: bool, tmp_path: Path) -> None:
    folder, params = family_model(tmp_path / "model", large("qwen3.5"), seed=5), SamplingParams(max_tokens=16, n=2, ignore_eos=True)
    settings: dict[str, Any] = {"max_num_seqs": ROWS, "max_num_batched_tokens": BATCHED, "kv_cache_memory_bytes": 1 << 28}
    with open_engine(folder, "cuda", dtype="bfloat16", enforce_eager=eager, **settings) as llm:
        llm.generate(prompts(6, 400), params, use_tqdm=False)  # what is set up once
        torch.cuda.set_sync_debug_mode("error")
        try:
            llm.generate(prompts(8, 400), params, use_tqdm=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
