"""Rows that read keys in teams on a GPU, through graphs, say what they say alone."""

from pathlib import Path
from typing import Any

import pytest

from octavo import SamplingParams
from octavo.messages import StepPlan
from octavo.step.shared_keys import FREE, ReadCost
from octavo.step.step_tensors import Shape
from octavo.worker import program
from octavo.worker.graph_program import Graph
from tests.support.places import open_engine, random_model, vocabulary

NEVER = ReadCost(1 << 40, 0)


# promise: shared-reads
@pytest.mark.gpu
def test_samples_of_shared_prompts_are_the_same_in_teams_and_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, vocab = random_model(tmp_path / "model", "Qwen3ForCausalLM", "cuda"), vocabulary("cuda")
    common, other = ([(step * number) % vocab for number in range(1, 401)] for step in (37, 101))
    prompts = [(other if number % 5 == 4 else common)[: 400 - 60 * (number % 3)] + [number] for number in range(24)]
    shapes: list[Shape] = []
    load = Graph.load

    def watched(self: Graph, plan: StepPlan) -> Shape:
        shapes.append(load(self, plan))
        return shapes[-1]

    monkeypatch.setattr(Graph, "load", watched)
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 2**28, "max_num_seqs": 64, "max_model_len": 1024}
    answers = []
    for cost in (FREE, NEVER):
        monkeypatch.setattr(program, "GPU_COST", cost)
        shapes.clear()
        with open_engine(folder, "cuda", check=True, **settings) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0.7, seed=5, n=2, max_tokens=24, ignore_eos=True, logprobs=1))
        answers.append([sample for output in outputs for sample in output.outputs])
        assert any(shape.in_teams and shape.decodes for shape in shapes) == (cost is FREE)
    for together, alone in zip(*answers, strict=True):
        assert together.token_ids == alone.token_ids
        assert together.cumulative_logprob == pytest.approx(alone.cumulative_logprob, abs=1e-3)
