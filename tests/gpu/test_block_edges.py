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
TOKENS = {"cpu": 40, "cuda": 600}  # past 512, where attention cuts a context into parts
MANY, FEW = SIZE, 4  # rows at once: the fewest have kernels of their own


def texts(folder: Path, place: Place, dtype: Any, eager: bool) -> list[RequestOutput]:
    tokens = TOKENS[place]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=2)
    prompts = [[(7 * length + 3 * at) % vocabulary(place) for at in range(length)] for length in range(1, SIZE + 1)]
    blocks = MANY * -(-(SIZE + tokens) // SIZE) + 1
    with open_engine(
        folder, place, check=True, dtype=dtype, enforce_eager=eager, block_size=SIZE, num_gpu_blocks_override=blocks,
        max_num_seqs=MANY, max_num_batched_tokens=512, pipeline_depth=2, enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        groups = [prompts, *(prompts[start : start + FEW] for start in range(0, MANY, FEW))]
        return [output for group in groups for output in llm.generate(group, params, use_tqdm=False)]


@PLACES
def test_every_crossing_is_right(place: Place, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = random_model(tmp_path, "Qwen3ForCausalLM", place)
    outputs = texts(folder, place, "float32", eager=False)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(place)
    compared = compare_with_reference(outputs, reference)
    assert compared.tokens == 2 * MANY * TOKENS[place]
    compared.accept()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_and_their_kernels_one_by_one_agree_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    folder = random_model(tmp_path, "Qwen3ForCausalLM", "cuda")
    replayed, launched = (texts(folder, "cuda", dtype, eager) for eager in (False, True))
    for one, other in zip(replayed, launched, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
