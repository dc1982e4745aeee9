"""A sequence that crosses into a new block in mid-decode: the table changes before a replay, and the graph must see it.

Prompts of every length from one to a block cross at every step of a batch, again and again for hundreds of tokens, and what lies in
a block that was just taken is NaN until it is written.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import RequestOutput, SamplingParams
from tests.support.greedy import compare_with_reference
from tests.support.places import PLACES, Place, open_engine, random_model, vocabulary

SIZE = 16
TOKENS = {"cpu": 24, "cuda": 560}  # every row crosses at least once; past 512 attention cuts a context into parts
FEW = slice(0, SIZE, 5)  # four rows at once have kernels of their own


def texts(folder: Path, place: Place, dtype: Any, eager: bool) -> list[RequestOutput]:
    tokens = TOKENS[place]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=2)
    prompts = [[(7 * length + 3 * at) % vocabulary(place) for at in range(length)] for length in range(1, SIZE + 1)]
    blocks = SIZE * -(-(SIZE + tokens) // SIZE) + 1
    with open_engine(
        folder, place, check=True, dtype=dtype, enforce_eager=eager, block_size=SIZE, num_gpu_blocks_override=blocks,
        max_num_seqs=SIZE, max_num_batched_tokens=512, pipeline_depth=2, enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        return [output for group in (prompts, prompts[FEW]) for output in llm.generate(group, params, use_tqdm=False)]


# promise: gpu-computes-device
@PLACES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_crossing_is_right(place: Place, dtype: str, tmp_path: Path) -> None:
    """Against transformers; on a GPU, graphs and their kernels one by one agree in every bit."""
    from transformers import AutoModelForCausalLM

    folder = random_model(tmp_path, "Qwen3ForCausalLM", place)
    outputs = texts(folder, place, dtype, eager=False)
    if place == "cuda":
        for one, other in zip(outputs, texts(folder, place, dtype, eager=True), strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            assert one.outputs[0].logprobs == other.outputs[0].logprobs
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager").to(place)
    compared = compare_with_reference(outputs, reference)
    assert compared.tokens == 20 * TOKENS[place]
    compared.accept()
