"""The native program gives the text of the torch program for every family, at every level, and under the shadow."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.kernels.cpu.library import Q4
from octavo.worker.native_program import NativeProgram
from tests.models.test_family import count_given_back, verify_it
from tests.support.families import FAMILIES, VOCAB, Tiny, family_model
from tests.support.greedy import same_greedy_text
from tests.support.mixtures import MIXTURES, tiny_mixture, to_mxfp4
from tests.support.native import levels_here
from tests.support.soaked import rarely

PROMPTS = [[(17 * i + j * j) % (VOCAB - 3) + 3 for j in range(1 + 19 * i)] for i in range(4)]
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=4, prompt_logprobs=1)
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "max_num_batched_tokens": 32, "max_num_seqs": 4,
    "num_gpu_blocks_override": 200,
}  # fmt: skip



def levels_of(names: Collection[str]) -> list[Any]:
    """Each name with one of the levels in turn, from the highest down; by hand each with all levels."""
    here = levels_here()
    return [(name, (here[-1 - number % len(here)],)) for number, name in enumerate(names)] + rarely(*((name, here) for name in names))


def answers(folder: Path, tiny: Tiny, **settings: Any) -> tuple[list[Any], bool, int]:
    """Returns what is generated, whether natively, and how many blocks windows gave back."""
    longest = tiny.engine.get("max_model_len", 256) - PARAMS.max_tokens
    with LLM(str(folder), **SETTINGS | tiny.engine | settings) as llm:
        given_back = count_given_back(llm._core.scheduler.kv)
        outputs = llm.generate([prompt[:longest] for prompt in PROMPTS], PARAMS, use_tqdm=False)
        return outputs, isinstance(llm._core.executor.program, NativeProgram), given_back[0]


# promise: family-native
@pytest.mark.parametrize(("name", "levels"), levels_of(FAMILIES))
def test_a_family_gives_the_text_of_the_torch_program(name: str, levels: tuple[str, ...], tmp_path: Path) -> None:
    tiny = FAMILIES[name]
    folder = family_model(tmp_path, tiny, seed=21)
    expected, native, given_back = answers(folder, tiny, native=False)
    assert not native
    for level in levels:
        found, native, behind = answers(folder, tiny, cpu_isa=level)
        assert native and (behind > 0) == (given_back > 0)
        for one, other in zip(found, expected, strict=True):
            assert same_greedy_text(one, other)
            mine, theirs = one.prompt_logprobs[1:], other.prompt_logprobs[1:]
            assert all(abs(a[token].logprob - b[token].logprob) < 1e-3 for a, b in zip(mine, theirs) for token in set(a) & set(b))


# promise: family-native
@pytest.mark.parametrize(("architecture", "levels"), levels_of(MIXTURES))
def test_a_mixture_gives_the_text_of_the_torch_program(architecture: str, levels: tuple[str, ...], tmp_path: Path) -> None:
    tiny = Tiny(architecture, {})
    folder = tiny_mixture(tmp_path, architecture, seed=23)
    expected, _, _ = answers(folder, tiny, native=False)
    for level in levels:
        found, native, _ = answers(folder, tiny, cpu_isa=level)
        assert native and all(same_greedy_text(one, other) for one, other in zip(found, expected, strict=True))


def test_experts_stay_codes_that_a_table_gives_the_numbers_of(tmp_path: Path) -> None:
    """gpt-oss as on the hub: the native program multiplies MXFP4 as it is, and torch the floats that it stands for."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    floats = tiny_mixture(tmp_path / "floats", "GptOssForCausalLM", seed=1, inner=32, hidden_size=64, **heads)
    folder, tiny = to_mxfp4(floats, tmp_path / "blocks"), Tiny("GptOssForCausalLM", {})
    expected, _, _ = answers(folder, tiny, native=False)
    with LLM(str(folder), **SETTINGS) as llm:
        program = llm._core.executor.program
        assert isinstance(program, NativeProgram)
        stacks = [getattr(layer.mixture.contents, name) for layer in program.layers for name in ("experts_gate_up", "experts_down")]
        assert all(stack.kind == Q4 and stack.table for stack in stacks)
        found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    pairs = [pair for one, other in zip(found, expected) for pair in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:])]
    apart = [abs(mine[token].logprob - theirs[token].logprob) for mine, theirs in pairs for token in set(mine) & set(theirs)]
    assert len(apart) > 100 and sum(apart) / len(apart) < 0.05, "numbers that experts read are rounded to 8 bits, in steps of few tokens"


@pytest.mark.parametrize("name", ["gemma3", "cohere2", "bloom", *rarely("gemma2", "olmo2", "granite")])
def test_paging_is_proven_for_a_family(name: str, tmp_path: Path) -> None:
    """A step in one call also gives the bits of its layers one by one, where they have several block tables."""
    verified = verify_it(family_model(tmp_path, FAMILIES[name], seed=22), dtype="float32")
    assert verified.compared.output_values > 0 and verified.kernels != "torch"


@pytest.mark.soak
def test_each_rank_has_the_slopes_of_its_heads(tmp_path: Path) -> None:
    tiny = FAMILIES["bloom, six heads"]
    folder = family_model(tmp_path, tiny, seed=24)
    texts = []
    for size in (1, 2):
        with LLM(str(folder), **SETTINGS, tensor_parallel_size=size) as llm:
            texts.append(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    assert all(same_greedy_text(one, other) for one, other in zip(*texts, strict=True))
