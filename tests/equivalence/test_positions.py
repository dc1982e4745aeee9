"""The index of a token in the cache and its position are different things: an offset of all positions changes no text.

Rotations depend only on the distance of two tokens, and so does ALiBi. What a token reads, where it is stored and its sampling noise
depend on the index. A position read as an index would read, mask or sample something else; an index read as a position, in only some
of the steps, would change distances.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.messages import AddRequest
from octavo.worker.native_program import NativeProgram
from tests.equivalence.test_scheduling_is_invisible import switches
from tests.support.families import FAMILIES, VOCAB, family_model, for_a_gpu
from tests.support.greedy import same_greedy_text
from tests.support.soaked import pairs

NAMES = ["llama 3.1", "phi3, window", "gemma3", "cohere2", "glm4", "bloom"]
PROMPTS = [[(17 * i + j * j) % (VOCAB - 3) + 3 for j in range(1 + 19 * i)] for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=4, prompt_logprobs=1)
SAMPLED = SamplingParams(n=3, seed=3, max_tokens=24, ignore_eos=True)
GPU = [pytest.param(name, "gpu", marks=pytest.mark.gpu) for name in NAMES]


def answers(llm: LLM, offset: int, monkeypatch: pytest.MonkeyPatch) -> list[RequestOutput]:
    with monkeypatch.context() as patch:
        add = llm._core.add

        def add_later(request: AddRequest) -> None:
            add(replace(request, position_offset=offset))

        patch.setattr(llm._core, "add", add_later)
        return [*llm.generate(PROMPTS, GREEDY), *llm.generate(PROMPTS, SAMPLED)]


def open_engine(folder: Path, runner: str) -> LLM:
    """Steps are short, so that a prompt is computed in several."""
    return LLM(
        str(folder), dtype="float32", device="cuda" if runner == "gpu" else "cpu", native=runner == "native", skip_tokenizer_init=True,
        deterministic=runner == "gpu", max_num_batched_tokens=32, max_num_seqs=16, block_size=16, num_gpu_blocks_override=300,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "runner"), [*pairs(NAMES, ["native", "model", "device"]), *GPU])
def test_an_offset_of_all_positions_changes_no_text(name: str, runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", f"preempt_every=9,{switches('model' if runner == 'native' else runner)}")
    tiny = for_a_gpu(FAMILIES[name]) if runner == "gpu" else FAMILIES[name]
    with open_engine(family_model(tmp_path, tiny, seed=21), runner) as llm:
        assert isinstance(llm._core.executor.program, NativeProgram) == (runner == "native")
        usual = answers(llm, 0, monkeypatch)
        assert llm.stats().preemptions, "no row was written from scratch again"
        moved = answers(llm, 90, monkeypatch)
    count = len(PROMPTS)
    assert all(same_greedy_text(one, other) for one, other in zip(usual[:count], moved[:count], strict=True))
    assert [[sample.token_ids for sample in output.outputs] for output in usual[count:]] == [
        [sample.token_ids for sample in output.outputs] for output in moved[count:]
    ]
    assert (logprobs(usual) == logprobs(moved)) == (name == "bloom"), "which alone has no numbers of a position"
    assert all(abs(a - b) < 1e-3 for a, b in zip(logprobs(usual), logprobs(moved), strict=True))


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    return [each.logprob for output in outputs[: len(PROMPTS)] for choices in output.prompt_logprobs[1:] for each in choices.values()]


def test_a_prefix_at_other_positions_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(family_model(tmp_path, FAMILIES["llama 3.1"], seed=21), "native") as llm:
        params = replace(GREEDY, prompt_logprobs=None)
        add, offsets = llm._core.add, iter([0, 0, 8, 8, 0])

        def add_at(request: AddRequest) -> None:
            add(replace(request, position_offset=next(offsets)))

        monkeypatch.setattr(llm._core, "add", add_at)
        assert [llm.generate(PROMPTS[3:], params)[0].num_cached_tokens for _ in range(5)] == [0, 48, 0, 48, 48]
