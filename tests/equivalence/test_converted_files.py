"""Files that llama.cpp's converter wrote give the tokens that llama.cpp gave for them. `test_llama_cpp.py` makes fresh ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests.support.converted import CASES, PROMPTS
from tests.support.greedy import LOGIT_TOLERANCE
from tests.support.stored_gguf import ANSWERS, STORED, unpacked


# promise: gguf-of-the-converter
@pytest.mark.parametrize("name", sorted(STORED))
def test_a_stored_file_gives_what_llama_cpp_gave(name: str, tmp_path: Path) -> None:
    expected, case = json.loads(ANSWERS.read_text())[name], CASES[name]
    params = [SamplingParams(temperature=0, max_tokens=len(ids), ignore_eos=True, logprobs=0) for ids in expected["answers"]]
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_batched_tokens": 64, "num_gpu_blocks_override": 300}
    with LLM(str(unpacked(name, tmp_path)), max_model_len=case.context, native=not case.packed, **settings) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == expected["prompts"]
    for output, ids, logprobs in zip(outputs, expected["answers"], expected["logprobs"], strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == ids and completion.logprobs is not None
        assert [each[token].logprob for token, each in zip(ids, completion.logprobs)] == pytest.approx(logprobs, abs=LOGIT_TOLERANCE)
