"""stories260K, a real model small enough for a test: its greedy text is known to the letter."""

import json
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.text.tokenizer import Tokenizer
from tests.support.models import stories260k
from tests.support.stories import stories_tokenizer_metadata

REFS = Path("tests/data/refs")


@pytest.mark.parametrize("depth", [1, 2])
def test_greedy_story_is_the_golden_one(tmp_path: Path, depth: int) -> None:
    expected = json.loads((REFS / "stories260K_expected.json").read_text())["expected_text"]
    reference = np.load(REFS / "stories260K_greedy_ref.npz")
    folder = stories260k(tmp_path / "stories")
    with LLM(str(folder), dtype="float32", skip_tokenizer_init=True, pipeline_depth=depth, kv_cache_memory_bytes=2**24) as llm:
        (output,) = llm.generate([[1]], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True), use_tqdm=False)
    ids = output.outputs[0].token_ids
    assert [1, *ids] == reference["ids"].tolist()
    tokenizer = Tokenizer.from_gguf(stories_tokenizer_metadata(Path("tests/data/models/tok512.bin")), "tok512.bin")
    assert tokenizer.decode(ids).startswith(expected)
