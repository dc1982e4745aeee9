"""The native program gives the text of the torch program for every dense family, at every level, and under the shadow."""

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.worker.native_program import NativeProgram
from tests.models.test_family import count_given_back, verify_it
from tests.support.families import FAMILIES, VOCAB, Tiny, family_model
from tests.support.greedy import same_greedy_text
from tests.support.native import levels_here

PROMPTS = [[(17 * i + j * j) % (VOCAB - 3) + 3 for j in range(1 + 19 * i)] for i in range(4)]
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=4, prompt_logprobs=1)
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "max_num_batched_tokens": 32, "max_num_seqs": 4,
    "num_gpu_blocks_override": 200,
}  # fmt: skip


def answers(folder: Path, tiny: Tiny, **settings: Any) -> tuple[list[Any], bool, int]:
    """Returns what is generated, whether natively, and how many blocks windows gave back."""
    longest = tiny.engine.get("max_model_len", 256) - PARAMS.max_tokens
    with LLM(str(folder), **SETTINGS | tiny.engine | settings) as llm:
        given_back = count_given_back(llm._core.scheduler.kv)
        outputs = llm.generate([prompt[:longest] for prompt in PROMPTS], PARAMS, use_tqdm=False)
        return outputs, isinstance(llm._core.executor.program, NativeProgram), given_back[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gives_the_text_of_the_torch_program(name: str, tmp_path: Path) -> None:
    tiny = FAMILIES[name]
    folder = family_model(tmp_path, tiny, seed=21)
    expected, native, given_back = answers(folder, tiny, native=False)
    assert not native
    for level in levels_here():
        found, native, behind = answers(folder, tiny, cpu_isa=level)
        assert native and (behind > 0) == (given_back > 0)
        for one, other in zip(found, expected, strict=True):
            assert same_greedy_text(one, other)
            mine, theirs = one.prompt_logprobs[1:], other.prompt_logprobs[1:]
            assert all(abs(a[token].logprob - b[token].logprob) < 1e-3 for a, b in zip(mine, theirs) for token in set(a) & set(b))


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2", "granite"])
def test_paging_is_proven_for_a_family(name: str, tmp_path: Path) -> None:
    """A step in one call also gives the bits of its layers one by one, where they have several block tables."""
    verified = verify_it(family_model(tmp_path, FAMILIES[name], seed=22), dtype="float32")
    assert verified.compared.output_values > 0 and verified.kernels != "torch"
