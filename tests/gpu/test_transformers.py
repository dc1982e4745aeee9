"""Greedy text on a device against transformers on the same device: one to four rows, batches, chunks, with and without graphs."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from octavo import SamplingParams
from tests.support.greedy import compare_with_reference
from tests.support.places import PLACES, SHAPES, Place, open_engine, random_model, vocabulary

ROWS, BATCHED = 24, 256  # prompts longer than a step may be are computed in chunks
COUNTS = {"cpu": (16, 20, 60), "cuda": (48, 64, 700)}  # prompts in a batch, tokens of each, the longest prompt


def prompts(place: Place, count: int, longest: int) -> list[list[int]]:
    rng = Random(3)
    return [[rng.randrange(vocabulary(place)) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def reference(folder: Path, place: Place, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager").to(place)


# promise: gpu-computes-device
@PLACES
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *((architecture, "float32") for architecture in SHAPES),
        *(pytest.param(architecture, "bfloat16", marks=pytest.mark.soak) for architecture in SHAPES),
    ],
)  # fmt: skip
def test_texts_are_those_of_transformers(architecture: str, dtype: Any, place: Place, tmp_path: Path) -> None:
    """In float32 but for ties; in bfloat16 a token differs only where the best two logits are closer than 0.1."""
    folder = random_model(tmp_path, architecture, place)
    count, tokens, longest = COUNTS[place]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=4)
    asked, model = prompts(place, count + 10, longest), reference(folder, place, dtype)
    few = [asked[count : count + 1], asked[count + 1 : count + 3], asked[count + 3 : count + 6], asked[count + 6 :]]  # 1 to 4 rows
    for eager in (False, True) if place == "cuda" else (True,):
        settings = {"dtype": dtype, "enforce_eager": eager, "max_num_seqs": ROWS, "max_num_batched_tokens": BATCHED}
        with open_engine(folder, place, num_gpu_blocks_override=ROWS * 64, pipeline_depth=2, **settings) as llm:
            outputs = [output for group in (asked[:count], *few) for output in llm.generate(group, params, use_tqdm=False)]
        compared = compare_with_reference(outputs, model)
        assert compared.tokens == tokens * len(asked)
        compared.accept()
