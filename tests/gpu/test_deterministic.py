"""`deterministic` on a GPU: no schedule changes a text or a logprob, with any weights, with graphs and without."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.messages import AddRequest, StepPlan
from octavo.step.shared_keys import FREE
from octavo.step.step_tensors import Shape
from octavo.worker import program
from octavo.worker.graph_program import Graph
from tests.equivalence.test_verify import run as run_verify
from tests.gpu.test_mixed_load import model_with_windows
from tests.support.models import tiny_model
from tests.support.places import random_model, vocabulary

COUNT, PREFIX, LONG_PREFIX = 40, 100, 700
Answers = dict[tuple[str, int], tuple[list[int], list[float]]]
SETTINGS: dict[str, Any] = {
    "device": "cuda", "deterministic": True, "skip_tokenizer_init": True, "block_size": 16, "max_model_len": 512, "max_num_seqs": 24,
    "kv_cache_memory_bytes": 1 << 28,
}  # fmt: skip


def requests() -> list[AddRequest]:
    rng, vocab = Random(5), vocabulary("cuda")
    prefix = [rng.randrange(vocab) for _ in range(PREFIX)]
    made = []
    for number in range(COUNT):
        prompt = prefix[: rng.choice([0, 33, PREFIX])] + [rng.randrange(vocab) for _ in range(rng.choice([1, 40, 300]))]
        params = SamplingParams(temperature=number % 2, seed=number, n=1 + number % 3, max_tokens=24, ignore_eos=True, logprobs=2)
        made.append(AddRequest(str(number), prompt, params))
    return made


def requests_of_long_prefixes() -> list[AddRequest]:
    """Three pieces of keys of most prompts are the same, two or none of the others; there are more of them than run without sharing."""
    rng, vocab = Random(6), vocabulary("cuda")
    prefix, other = ([rng.randrange(vocab) for _ in range(LONG_PREFIX + 100)] for _ in range(2))
    made = []
    for number in range(COUNT):
        first = prefix[: rng.choice([LONG_PREFIX - 100, LONG_PREFIX + 100, LONG_PREFIX + 100])] if number % 4 else other[:LONG_PREFIX]
        prompt = first + [rng.randrange(vocab) for _ in range(rng.choice([1, 20, 90]))]
        params = SamplingParams(temperature=number % 2, seed=number, n=1 + number % 2, max_tokens=24, ignore_eos=True, logprobs=2)
        made.append(AddRequest(str(number), prompt, params))
    return made


def serve(llm: LLM, order: list[AddRequest], at_once: int, preempt_every: int) -> Answers:
    core: Any = llm._core
    core.scheduler.preempt_every = preempt_every
    answers: Answers = {}
    waiting = order[::-1]
    while waiting or core.has_work:
        for _ in range(min(at_once, len(waiting))):
            core.add(waiting.pop())
        for delta in core.step():
            assert delta.error is None
            tokens, logprobs = answers.setdefault((delta.request_id, delta.index), ([], []))
            tokens += delta.token_ids
            logprobs += [number for one in delta.logprobs or [] for number in (one.logprob, *one.top_logprobs)]
    return answers


def under_schedules(llm: LLM, made: list[AddRequest] | None = None) -> None:
    made = made or requests()
    alone: Answers = {}
    for request in made:
        llm.reset_prefix_cache()
        alone |= serve(llm, [request], 1, 0)
    for seed, (at_once, preempt_every, cold) in enumerate([(COUNT, 0, True), (COUNT, 0, False), (1, 3, True), (7, 5, False)]):
        if cold:
            llm.reset_prefix_cache()
        assert serve(llm, Random(seed).sample(made, COUNT), at_once, preempt_every) == alone, f"schedule {seed}"
    assert llm.stats().preemptions and llm.stats().prefix_hits


# promise: deterministic
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("budget", [64, 2048])
def test_no_schedule_changes_an_answer(dtype: str, budget: int, tmp_path: Path) -> None:
    with LLM(str(random_model(tmp_path, "Qwen3ForCausalLM", "cuda")), dtype=dtype, max_num_batched_tokens=budget, **SETTINGS) as llm:
        under_schedules(llm)


# promise: deterministic
@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{"quantization": "int4"}, {"quantization": "int8"}, {"enforce_eager": True}], ids=str)
def test_no_schedule_changes_an_answer_of_quantised_weights_or_without_graphs(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = str(random_model(tmp_path, "Qwen3ForCausalLM", "cuda"))
    with LLM(folder, dtype="bfloat16", max_num_batched_tokens=256, **SETTINGS, **settings) as llm:
        under_schedules(llm)


# promise: deterministic
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt-oss", "gemma3"])
def test_no_schedule_changes_an_answer_of_windows_or_experts(name: str, tmp_path: Path) -> None:
    with LLM(str(model_with_windows(tmp_path / name, name, "cuda")), dtype="bfloat16", max_num_batched_tokens=128, **SETTINGS) as llm:
        under_schedules(llm)


# promise: deterministic
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "gpt-oss"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "no graphs"])
def test_no_schedule_changes_an_answer_where_rows_read_their_beginnings_together(
    name: str, enforce_eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[Shape] = []
    load = Graph.load

    def watched(self: Graph, plan: StepPlan) -> Shape:
        shapes.append(load(self, plan))
        return shapes[-1]

    monkeypatch.setattr(Graph, "load", watched)
    monkeypatch.setattr(program, "GPU_COST", FREE)
    make = random_model if name.startswith("Qwen") else model_with_windows
    folder = make(tmp_path / "model", name, "cuda")
    settings = SETTINGS | {"max_model_len": 1024, "enforce_eager": enforce_eager, "kv_cache_memory_bytes": 1 << 29}
    with LLM(str(folder), dtype="bfloat16", max_num_batched_tokens=512, **settings) as llm:
        under_schedules(llm, requests_of_long_prefixes())
    assert any(shape.in_teams and shape.decodes for shape in shapes) and any(shape.in_teams and not shape.decodes for shape in shapes)


@pytest.mark.gpu
def test_paging_changes_no_bit(tmp_path: Path) -> None:
    folder = str(tiny_model(tmp_path / "model", "Qwen3ForCausalLM", seed=5))
    verified = run_verify(folder, requests=40, device="cuda", dtype="bfloat16", depth=2, deterministic=True)
    assert verified.kernels == "Triton" and verified.compared.cache_values > 100_000
