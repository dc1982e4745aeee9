"""Beam search against transformers in float32: the same answers in the same order, on every program, after hits and preemptions.

Searches may part where a decision is closer than `TIE`; such places are counted, and few.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from octavo import LLM, BeamSearchOutput, BeamSearchParams
from octavo.messages import Beams
from tests.support.beams import search
from tests.support.models import tiny_model

TIE = 1e-4
ENDS = [2, *range(40, 70)]  # so many that most searches come to some
TOKENS = 20
SEARCHES = [
    BeamSearchParams(width, TOKENS, length_penalty=penalty, early_stopping=early)
    for width, penalty, early in (
        (2, 1.0, False), (3, 0.5, True), (4, 2.0, False), (4, 1.0, "never"), (5, 1.5, True),
        (6, 0.8, False), (7, 1.0, True), (8, 2.0, "never"), (8, 0.5, False), (2, 2.0, True),
    )
]  # fmt: skip
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("model", {}), "torch": ("model", {"native": False}), "twins": ("device", {"native": False, "pipeline_depth": 2})
}  # fmt: skip
ON_GPU = ("device", {"device": "cuda"})
GPU = pytest.param("gpu", 4, marks=pytest.mark.gpu)
LONG = [pytest.param(program, 20, marks=pytest.mark.soak) for program in PROGRAMS]


@dataclass
class Reference:
    folder: Path
    model: Any
    known: dict[tuple[int, ...], list[list[int]]]

    def prompts(self, params: BeamSearchParams, each: int) -> list[list[int]]:
        """Some share their beginning with others."""
        rng = Random(f"{params}")
        beginning = [rng.randrange(70, 320) for _ in range(40)]
        lengths = [rng.randrange(0, 40) for _ in range(each)]
        return [beginning[:length] + [rng.randrange(70, 320) for _ in range(rng.randint(1, 20))] for length in lengths]

    @torch.inference_mode()
    def answers(self, prompt: list[int], params: BeamSearchParams) -> list[list[int]]:
        key = (*prompt, -1, params.beam_width, SEARCHES.index(params))
        if key not in self.known:
            found = self.model.generate(
                torch.tensor([prompt]), num_beams=params.beam_width, num_return_sequences=params.beam_width, do_sample=False,
                length_penalty=params.length_penalty, early_stopping=params.early_stopping, max_new_tokens=TOKENS,
                eos_token_id=ENDS, pad_token_id=0, attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            )  # fmt: skip
            self.known[key] = [_cut(answer[len(prompt) :]) for answer in found.tolist()]
        return self.known[key]

    @torch.inference_mode()
    def nearest(self, prompt: list[int], params: BeamSearchParams) -> float:
        """Returns how close the closest decision of this search is."""

        def logprobs_of(outputs: list[list[int]]) -> list[list[tuple[int, float]]]:
            logits = self.model(torch.tensor([[*prompt, *output] for output in outputs])).logits[:, -1]
            return [list(enumerate(row)) for row in logits.log_softmax(-1).tolist()]

        return search(logprobs_of, TOKENS, Beams(params.beam_width, params.length_penalty, params.early_stopping), ENDS).nearest


def _cut(answer: list[int]) -> list[int]:
    end = next((at for at, token in enumerate(answer) if token in ENDS), len(answer))
    return answer[: end + 1]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    from transformers import AutoModelForCausalLM

    folder = tiny_model(tmp_path_factory.mktemp("tiny") / "model", "Qwen3ForCausalLM", seed=5)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | {"eos_token_id": ENDS}))
    return Reference(folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), {})


def engine(reference: Reference, program: str, monkeypatch: pytest.MonkeyPatch, switches: str = "", **settings: Any) -> LLM:
    runner, own = ON_GPU if program == "gpu" else PROGRAMS[program]
    monkeypatch.setenv("OCTAVO_DEBUG", f"runner={runner},check=1{switches}")
    usual = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 400, "max_num_seqs": 32}
    return LLM(str(reference.folder), **(usual | own | settings))


def compare(reference: Reference, llm: LLM, each: int) -> None:
    ties = ended = 0
    for params in SEARCHES:
        prompts = reference.prompts(params, each)
        for prompt, output in zip(prompts, llm.beam_search(prompts, params, use_tqdm=False), strict=True):
            wanted = reference.answers(prompt, params)
            ended += sum(answer[-1] in ENDS for answer in wanted)
            if _said(prompt, output) != [answer[:-1] if answer[-1] in ENDS else answer for answer in wanted]:
                nearest = reference.nearest(prompt, params)
                assert nearest <= TIE, f"{params} after {prompt}: nothing was closer than {nearest:.2e}"
                ties += 1
    print(f"{each * len(SEARCHES)} searches, {ties} ties, {ended} answers with an end")
    assert ties <= -(-each * len(SEARCHES) // 20) and ended > each * len(SEARCHES)


def _said(prompt: list[int], output: BeamSearchOutput) -> list[list[int]]:
    assert all(answer.tokens[: len(prompt)] == prompt for answer in output.sequences)
    return [answer.tokens[len(prompt) :] for answer in output.sequences]


# promise: beam-search
@pytest.mark.parametrize(("program", "each"), [("native", 2), GPU, *LONG])
def test_answers_are_those_of_transformers(program: str, each: int, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(reference, program, monkeypatch) as llm:
        compare(reference, llm, each)
        stats = llm.stats()
        assert stats.prefix_hits > 0


@pytest.mark.parametrize(("program", "each"), [*((program, 2) for program in PROGRAMS if program != "twins"), GPU, *LONG])
def test_answers_are_the_same_after_preemptions(
    program: str, each: int, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(reference, program, monkeypatch, ",preempt.every=6", num_gpu_blocks_override=60) as llm:
        compare(reference, llm, each)
        preemptions = llm.stats().preemptions
    print(f"{preemptions} preemptions")
    assert preemptions > each * len(SEARCHES) // 2  # all searches of a kind run at once, and one is preempted now and then
