"""GGUF files as llama.cpp's own converter writes them: Octavo gives the tokens that llama.cpp gives.

This needs llama.cpp, which `bench/peers/environments.py` builds on first use (minutes):

    pytest -m soak tests/equivalence/test_llama_cpp.py
"""

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, RequestOutput, SamplingParams
from octavo.loading.gguf import read_gguf
from tests.support.converted import CASES, PROMPTS, TEXT, Case
from tests.support.greedy import LOGIT_TOLERANCE, compare_with_reference
from tests.support.llama_cpp import LlamaCpp, add_tokenizer, convert
from tests.support.mixtures import YARN, tiny_mixture

pytestmark = pytest.mark.soak
TOKENS = 40


def greedy(model: Path, case: Case, prompts: list[Any], **settings: Any) -> list[RequestOutput]:
    settings = {"dtype": "float32", "device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 64} | settings
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=4)
    with LLM(str(model), max_model_len=case.context, num_gpu_blocks_override=300, **settings) as llm:
        return llm.generate(prompts, params, use_tqdm=False)


def converted(folder: Path, case: Case) -> Path:
    add_tokenizer(folder, case.vocab_size, TEXT)
    return convert(folder, folder.with_suffix(".gguf"))


# promise: gguf-of-the-converter
@pytest.mark.parametrize("name", CASES)
def test_a_converted_file_gives_the_tokens_llama_cpp_gives(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = converted(case.make(tmp_path / "model"), case)
    header = read_gguf(path)
    assert header.metadata["general.architecture"] == case.word
    assert {*case.tensors} <= {*header.tensors} and header.metadata | case.keys == header.metadata
    reference = LlamaCpp(converted(tmp_path / "floats", case) if case.packed else path, case.context)
    for native in (False,) if case.packed else (False, True):
        outputs = greedy(path, case, PROMPTS, native=native)
        assert [output.prompt_token_ids for output in outputs] == reference.tokenize(PROMPTS)
        comparison = compare_with_reference(outputs, reference)
        assert comparison.tokens == TOKENS * len(PROMPTS)
        comparison.accept(10 * LOGIT_TOLERANCE if case.deep else LOGIT_TOLERANCE)


def test_llama_cpp_differs_in_gpt_oss_by_rounding_the_ramp_of_yarn(tmp_path: Path) -> None:
    """Its files do not say that the ramp is not rounded, and llama.cpp rounds it always. Ours equals it once it is told to round."""
    case = CASES["gpt-oss"]
    folder = tiny_mixture(tmp_path / "model", "GptOssForCausalLM", seed=1, rope_parameters=YARN | {"truncate": True})
    reference = LlamaCpp(converted(folder, case), case.context)
    compare_with_reference(greedy(folder, case, PROMPTS), reference).accept()
    with pytest.raises(AssertionError, match="behind"):
        compare_with_reference(greedy(folder.with_suffix(".gguf"), case, PROMPTS), reference)
