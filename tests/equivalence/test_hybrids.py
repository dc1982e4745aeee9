"""Models with recurrent layers, end to end: the tokens of transformers, whatever was computed before and beside them."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from octavo import LLM, BeamSearchParams, RequestOutput, SamplingParams
from octavo.errors import ConfigError
from octavo.messages import AddRequest
from octavo.worker.model_runner import ModelRunner
from octavo.worker.native_program import NativeProgram
from tests.support.families import VOCAB, family_model, reference_model
from tests.support.greedy import compare_with_reference, same_greedy_text
from tests.support.hybrids import HYBRIDS, for_a_gpu
from tests.support.hybrids_gguf import hybrid_gguf
from tests.support.places import PLACES, Place, open_engine
from tests.support.soaked import rarely

LENGTHS = (1, 3, 4, 63, 64, 65, 150)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=4)
TORCH_ONLY = "qwen3.5, tied", True  # heads of 24
NATIVE = pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])


def prompts_of(lengths: tuple[int, ...], seed: int = 5) -> list[list[int]]:
    rng = Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


@contextmanager
def open_llm(folder: Path, native: bool, **settings: Any) -> Iterator[LLM]:
    fixed = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 8}
    with LLM(str(folder), native=native, **fixed | settings) as llm:
        executor: Any = llm._core.executor
        runner = executor if isinstance(executor, ModelRunner) else executor.runner  # of the first rank
        assert isinstance(runner, ModelRunner) and isinstance(runner.program, NativeProgram) == native
        yield llm


def second_turns(outputs: list[RequestOutput]) -> list[list[int]]:
    return [[*output.prompt_token_ids, *output.outputs[0].token_ids, 7, 8, 9] for output in outputs]


# promise: family-folder
@pytest.mark.parametrize(("name", "native"), [case for case in product(HYBRIDS, (True, False)) if case != TORCH_ONLY])
def test_a_hybrid_gives_the_tokens_transformers_gives(name: str, native: bool, tmp_path: Path) -> None:
    """Prompts are computed in chunks beside other rows, and second turns continue from states that were kept."""
    folder = family_model(tmp_path / "model", HYBRIDS[name], seed=31)
    with open_llm(folder, native, max_num_seqs=4, max_num_batched_tokens=16) as llm:
        first = llm.generate(prompts_of(LENGTHS), GREEDY, use_tqdm=False)
        second = llm.generate(second_turns(first), GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in second] == [(length + 7) // 16 * 16 for length in LENGTHS]
    compare_with_reference(first + second, reference_model(folder, HYBRIDS[name])).accept()


# promise: family-folder
@PLACES
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_gives_them_on_a_gpu_too(name: str, place: Place, tmp_path: Path) -> None:
    """Steps are padded, and have rows of one token beside prompts; second turns continue from states that were kept."""
    tiny = HYBRIDS[name] if place == "cpu" else for_a_gpu(HYBRIDS[name])
    folder = family_model(tmp_path / "model", tiny, seed=37)
    settings: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 32, "max_num_seqs": 4, "kv_cache_memory_bytes": 8 << 20}
    with open_engine(folder, place, check=True, **settings) as llm:
        first = llm.generate(prompts_of((1, 3, 40, 65, 90)), GREEDY, use_tqdm=False)
        second = llm.generate(second_turns(first), GREEDY, use_tqdm=False)
        assert llm.stats().prefix_hits > 0
    compare_with_reference(first + second, reference_model(folder, tiny)).accept()


def said(outputs: list[RequestOutput]) -> list[Any]:
    return [[(sample.token_ids, sample.logprobs) for sample in output.outputs] for output in outputs]


def check_schedules(
    folder: Path, prompts: list[list[int]], in_beams: slice, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt alone, and then all in chunks, twice with a cache, and preempted. `in_beams`: the prompts that are searched, too"""
    if settings.get("cpu_isa") == "avx2" and platform.machine() == "aarch64":
        settings = settings | {"cpu_isa": "portable"}
    params = SamplingParams(temperature=1.0, max_tokens=8, seed=3, n=4, ignore_eos=True, logprobs=2)
    beams = BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True)
    with open_llm(folder, True, enable_prefix_caching=False, **settings) as llm:
        alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in prompts]
        sampled = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
        searched = [llm.beam_search([{"prompt_token_ids": prompt}], beams)[0] for prompt in prompts[in_beams]]
    for preempt_every in (0, 3):
        monkeypatch.setenv("OCTAVO_DEBUG", f"preempt.every={preempt_every},check=1")
        with open_llm(folder, True, max_num_batched_tokens=16, pipeline_depth=1 + (preempt_every > 0), **settings) as llm:
            for _ in range(2):  # the second time from what the first one cached
                assert said(llm.generate(prompts, GREEDY, use_tqdm=False)) == said(alone)
                assert said(llm.generate(prompts, params, use_tqdm=False)) == said(sampled)
                found = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts[in_beams]], beams)
                assert [[one.tokens for one in each.sequences] for each in found] == [
                    [one.tokens for one in each.sequences] for each in searched
                ]
            stats = llm._core.scheduler.stats
            assert stats.prefix_hits > 0 and (stats.preemptions > 0) == (preempt_every > 0)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("qwen3.5", {}), ("qwen3-next", {"quantization": "int4", "cpu_isa": "avx2"}), *rarely(("qwen3.5 moe", {"cpu_isa": "portable"}))],
)
def test_no_schedule_changes_a_bit_of_an_answer(
    name: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_schedules(family_model(tmp_path / "model", HYBRIDS[name], seed=32), prompts_of(LENGTHS), slice(3, 5), settings, monkeypatch)


def test_native_kernels_give_the_text_of_a_gguf_file_too(tmp_path: Path) -> None:
    tiny, prompts = HYBRIDS["qwen3.5"], prompts_of(LENGTHS)
    folder = family_model(tmp_path / "model", tiny, seed=34)
    answers = []
    for path in (folder, hybrid_gguf(folder, tmp_path / "model.gguf", tiny)):
        with open_llm(path, True) as llm:
            answers.append(llm.generate(prompts, GREEDY, use_tqdm=False))
    assert all(map(same_greedy_text, *answers))


@NATIVE
def test_a_pinned_prefix_and_a_reset_work_with_states(native: bool, tmp_path: Path) -> None:
    folder, (prefix, tail, other) = family_model(tmp_path / "model", HYBRIDS["qwen3.5"], seed=33), prompts_of((64, 20, 200))
    with open_llm(folder, native, kv_cache_memory_bytes=1 << 20) as llm:
        (before,) = llm.generate([prefix + tail], GREEDY, use_tqdm=False)
        llm.pin_prefix("prefix", prefix)
        llm.reset_prefix_cache()
        llm.generate([other, other[5:], other[9:]], GREEDY, use_tqdm=False)
        (after,) = llm.generate([prefix + tail], GREEDY, use_tqdm=False)
        assert after.num_cached_tokens == 64 == after.metrics.pinned_tokens and after.outputs[0].token_ids == before.outputs[0].token_ids


def test_a_request_that_moves_to_another_engine_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    """As if each engine had answered a part: the second has no state of the first, and computes one from all tokens so far."""
    folder, (prompt, other) = family_model(tmp_path / "model", HYBRIDS["qwen3.5"], seed=34), prompts_of((40, 23))
    params = SamplingParams(temperature=0.9, max_tokens=24, seed=5, n=2, ignore_eos=True)
    with open_llm(folder, True) as llm:
        (whole,) = llm.generate([prompt], params, use_tqdm=False)
    with open_llm(folder, True, max_num_batched_tokens=16) as llm:
        llm.generate([other], GREEDY, use_tqdm=False)
        found = {sample.index: sample.token_ids[: 5 + 9 * sample.index] for sample in whole.outputs}
        llm._core.add(AddRequest("moved", prompt, params).resumed({index: ids.copy() for index, ids in found.items()}))
        while llm._core.has_work:
            for delta in llm._core.step():
                found[delta.index] += delta.token_ids
    assert found == {sample.index: sample.token_ids for sample in whole.outputs}


# -- ranks and stages

TENSOR, STAGES, BOTH = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


def check_ranks(
    folder: Path, native: bool, split: dict[str, Any], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process and several give the same texts, also in second turns and after preemptions."""
    answers = []
    monkeypatch.setenv("OCTAVO_DEBUG", "preempt.every=5,check=1")
    for settings in ({}, split):
        with open_llm(folder, native, max_num_seqs=4, max_num_batched_tokens=32, **settings) as llm:
            first = llm.generate(prompts, GREEDY, use_tqdm=False)
            answers.append(first + llm.generate(second_turns(first), GREEDY, use_tqdm=False))
            stats = llm._core.scheduler.stats
            assert stats.preemptions > 0 and stats.prefix_hits > 0
    assert all(same_greedy_text(one, other) for one, other in zip(*answers, strict=True))


# promise: tensor-parallel-size, pipeline-parallel-size
@pytest.mark.parametrize(
    ("name", "native", "split"),
    [
        ("qwen3.5", True, TENSOR),
        *rarely(
            ("qwen3-next", False, STAGES),  # the first stage has no attention
            ("qwen3.5", False, TENSOR),
            ("qwen3-next", True, STAGES),
            ("qwen3.5 moe", True, TENSOR),
            ("qwen3-next", True, TENSOR | {"enable_expert_parallel": True}),
            ("qwen3-next, some mlps", True, BOTH),  # ranks of a stage have the same k head
            ("qwen3-next, some mlps", False, BOTH),
            ("qwen3.5, tied", False, {"pipeline_parallel_size": 3}),  # the first stage has no recurrent layer
        ),
    ],
)
def test_ranks_and_stages_of_a_hybrid_give_its_text(
    name: str, native: bool, split: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Second turns continue from states that were kept, and rows are preempted."""
    check_ranks(family_model(tmp_path / "model", HYBRIDS[name], seed=35), native, split, prompts_of((1, 40, 65, 90)), monkeypatch)


def test_a_context_of_states_is_refused_before_a_process_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.worker.host_ranks.ProcessPeer", None)
    folder = family_model(tmp_path / "model", HYBRIDS["qwen3.5"], seed=36)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"decode_context_parallel_size is 2, and the model has recurrent layers, .*: set it to 1"):
        LLM(str(folder), tensor_parallel_size=2, decode_context_parallel_size=2, skip_tokenizer_init=True)
