"""Models with recurrent layers of all shapes, with prompts of 1 to 1,000 tokens: the text and logprobs of transformers in any schedule."""

from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, BeamSearchParams, RequestOutput, SamplingParams
from octavo.messages import Beams
from tests.equivalence.test_hybrids import GREEDY, open_llm, prompts_of, said, second_turns
from tests.support.beams import search
from tests.support.families import Tiny, family_model, reference_model
from tests.support.greedy import LOGIT_TOLERANCE, TIE, compare_with_reference
from tests.support.hybrids import HYBRIDS, delta_heads
from tests.support.soaked import rarely

LENGTHS = (1, 3, 4, 63, 64, 65, 1000)
SHAPES = {  # k heads, v heads, and their sizes
    "qwen3-next, 1 of 256 and 4 of 16": ("qwen3-next", (1, 4, 256, 16)),
    "qwen3.5, 4 of 16 and 4 of 256": ("qwen3.5", (4, 4, 16, 256)),
    "qwen3.5 moe, 3 of 128 and 6 of 128": ("qwen3.5 moe", (3, 6, 128, 128)),
    "qwen3-next, 2 of 256 and 8 of 48": ("qwen3-next", (2, 8, 256, 48)),
}
OFTEN = "qwen3-next, 1 of 256 and 4 of 16"
SAMPLED = SamplingParams(temperature=0.8, max_tokens=6, seed=11, n=4, ignore_eos=True, logprobs=2)
BEAMS = BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True)


def tiny_of(shape: str) -> Tiny:
    name, heads = SHAPES[shape]
    return replace(HYBRIDS[name], options=HYBRIDS[name].options | delta_heads(*heads) | {"max_position_embeddings": 2048})


@torch.inference_mode()
def assert_logprobs(outputs: list[RequestOutput], model: Any) -> None:
    """Of all samples, however they were drawn."""
    for output in outputs:
        first = len(output.prompt_token_ids) - 1
        logits = model(torch.tensor([output.prompt_token_ids + sample.token_ids for sample in output.outputs]), use_cache=False).logits
        for sample, rows in zip(output.outputs, logits.log_softmax(-1), strict=True):
            assert sample.logprobs is not None and len(sample.logprobs) == len(sample.token_ids)
            for row, choices in zip(rows[first:], sample.logprobs, strict=False):
                assert all(abs(float(row[token]) - found.logprob) < LOGIT_TOLERANCE for token, found in choices.items())


def beams_of(llm: LLM, prompt: list[int]) -> list[list[int]]:
    (found,) = llm.beam_search([{"prompt_token_ids": prompt}], BEAMS)
    return [sequence.tokens[len(prompt) :] for sequence in found.sequences]


@torch.inference_mode()
def assert_beams(answers: list[list[int]], prompt: list[int], model: Any) -> None:
    def logprobs_of(answers: list[list[int]]) -> list[list[tuple[int, float]]]:
        logits = model(torch.tensor([[*prompt, *answer] for answer in answers]), use_cache=False).logits[:, -1]
        return [list(enumerate(row)) for row in logits.log_softmax(-1).tolist()]

    wanted = search(logprobs_of, 6, Beams(4), ())
    assert answers == [ids for ids, _ in wanted.answers] or wanted.nearest <= TIE


# promise: family-folder
@pytest.mark.parametrize(
    ("shape", "native"),
    [(OFTEN, True), *rarely((OFTEN, False), *product([shape for shape in SHAPES if shape != OFTEN], (True, False)))],
)
def test_prompts_of_every_length_give_the_tokens_of_transformers(
    shape: str, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = family_model(tmp_path / "model", tiny_of(shape), seed=51)
    model, prompts, others = reference_model(folder, tiny_of(shape)), prompts_of(LENGTHS), prompts_of((17,) * 25, seed=6)
    some = prompts[4:6]
    memory = {"kv_cache_memory_bytes": 64 << 20}
    with open_llm(folder, native, enable_prefix_caching=False, max_num_seqs=32, **memory) as llm:
        alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in prompts]
        sampled = llm.generate(some, SAMPLED, use_tqdm=False)
        answers = [llm.generate(prompts + others, GREEDY, use_tqdm=False)[: len(prompts)]]  # among 32
    with open_llm(folder, native, max_num_batched_tokens=16, **memory) as llm:
        answers.append(llm.generate(prompts, GREEDY, use_tqdm=False))
        second = llm.generate(second_turns(alone), GREEDY, use_tqdm=False)
        assert [output.num_cached_tokens for output in second] == [(length + 7) // 16 * 16 for length in LENGTHS]
        searched = [beams_of(llm, some[0])]
    monkeypatch.setenv("OCTAVO_DEBUG", "preempt.every=3,check=1")
    with open_llm(folder, native, max_num_batched_tokens=128, pipeline_depth=2, **memory) as llm:
        answers.append(llm.generate(prompts, GREEDY, use_tqdm=False))
        forked = llm.generate(some, SAMPLED, use_tqdm=False)
        searched.append(beams_of(llm, some[0]))
        assert llm._core.scheduler.stats.preemptions > 5
    if native:
        assert all(said(outputs) == said(alone) for outputs in answers) and said(forked) == said(sampled)
    compared = [*alone, *second, *([] if native else chain(*answers))]
    compare_with_reference(compared, model, batch_size=len(compared) // 7 * 6).accept()  # the longest prompts in a batch of their own
    assert_logprobs(sampled if native else [*sampled, *forked], model)
    assert searched[0] == searched[1]
    assert_beams(searched[0], some[0], model)
