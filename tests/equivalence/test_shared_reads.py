"""Rows that read keys together say what they say alone: under the proof of paging, as samples and as beams."""

from typing import Any

import pytest

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.config import EngineConfig
from octavo.engine.verify import verify
from octavo.loading.resolve import load_model_config, resolve_model
from octavo.messages import StepPlan
from octavo.step.shared_keys import FREE, ReadCost, SharedKeys
from octavo.worker import native_program, program
from octavo.worker.step_sharing import StepSharing
from tests.support.models import tiny_model

BOTH = pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
NEVER = ReadCost(1 << 40, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("tiny") / "model", "Qwen3ForCausalLM", seed=5))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[SharedKeys]:
    """What steps read together."""
    kept: list[SharedKeys] = []
    of = StepSharing.of

    def watched(self: StepSharing, plan: StepPlan) -> list[SharedKeys]:
        groups = of(self, plan)
        kept.extend(keys for keys in groups if len(keys.nodes))
        return groups

    monkeypatch.setattr(StepSharing, "of", watched)
    return kept


@BOTH
def test_the_proof_of_paging_reads_together_what_it_can(folder: str, native: bool, found: list[SharedKeys]) -> None:
    source = resolve_model(folder)
    config = EngineConfig(model=folder, dtype="float32", device="cpu", native=native, block_size=4)
    assert verify(config, source, load_model_config(source), 1, 24).preemptions
    assert len(found) > 20 and max(len(keys.nodes) for keys in found) > 1


# promise: shared-reads
@BOTH
def test_samples_and_beams_are_the_same_whether_or_not_they_read_together(
    folder: str, native: bool, found: list[SharedKeys], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "native": native, "block_size": 4, "num_gpu_blocks_override": 300}
    common = [*range(100, 130)]
    prompts = [common[:length] + [10 + length] for length in (8, 30, 19, 30, 8, 2)]
    greedy, several = SamplingParams(temperature=0, max_tokens=12), SamplingParams(n=3, seed=1, max_tokens=12)
    answers = []
    for cost in (FREE, NEVER):
        monkeypatch.setattr(native_program, "NATIVE_COST", cost)
        monkeypatch.setattr(program, "TORCH_COST", cost)
        with LLM(folder, skip_tokenizer_init=True, **settings) as llm:
            outputs = [*llm.generate(prompts, greedy), *llm.generate(prompts, several)]
            said = [sample.token_ids for output in outputs for sample in output.outputs]
            searched = llm.beam_search(prompts[:3], BeamSearchParams(4, 10))
            answers.append((said, [beam.tokens for output in searched for beam in output.sequences]))
        assert bool(found) == (cost != NEVER)
        found.clear()
    assert answers[0] == answers[1]
