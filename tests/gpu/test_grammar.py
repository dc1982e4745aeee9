"""Masks of grammars on a device: beside rows without one, in chunks, after preemption, and with all that sampling does.

On a GPU graphs and single kernels must agree in every bit; on the twins, padded steps must say what the CPU's own runner says.
"""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from octavo import RequestOutput, SamplingParams
from octavo.outputs import CompletionOutput
from tests.support.hand_made_grammar import hand_made, obeys, use_hand_made_grammars
from tests.support.places import Place, open_engine, random_model, vocabulary

SIZE, ROWS, BATCHED, BLOCKS = 16, 12, 64, 40
ASKS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.8, "seed": 7, "n": 3},
    {"temperature": 0.9, "top_k": 5, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.01, "presence_penalty": 0.5},
    {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {5: 3.0}},
]  # fmt: skip
GRAMMARS = [(2, 30), (3, 17), (31, 40), (64, 25), (1, 9)]  # modulus, length; each ask has them all, and goes once without one


def asked(place: Place) -> list[tuple[dict[str, Any], tuple[int, int] | None]]:
    """On the twins three of the grammars are enough."""
    grammars = GRAMMARS if place == "cuda" else GRAMMARS[::2]
    return [(ask, grammar) for grammar in [*grammars, None] for ask in ASKS]


def run(folder: Path, place: Place, dtype: Any, **settings: Any) -> list[RequestOutput]:
    rng, vocab, all_asked = Random(17), vocabulary(place), asked(place)
    prompts = [[rng.randrange(vocab) for _ in range(rng.choice([1, SIZE - 1, 40, 150]))] for _ in all_asked]  # the longest take three steps
    always: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(**ask, **always, structured_outputs=hand_made(*grammar) if grammar else None) for ask, grammar in all_asked]
    with open_engine(
        folder, place, check=True, dtype=dtype, block_size=SIZE, num_gpu_blocks_override=BLOCKS, max_model_len=20 * SIZE,
        max_num_seqs=ROWS, max_num_batched_tokens=BATCHED, pipeline_depth=2, **settings,
    ) as llm:  # fmt: skip
        use_hand_made_grammars(llm, vocab)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats().preemptions > 0
    for output, (_, grammar) in zip(outputs, all_asked, strict=True):
        for sample in output.outputs:
            assert (sample.finish_reason == "stop" and obeys(sample.token_ids, *grammar)) if grammar else len(sample.token_ids) == 60
    return outputs


def samples(outputs: list[RequestOutput]) -> list[CompletionOutput]:
    return [sample for output in outputs for sample in output.outputs]


def numbers(sample: CompletionOutput) -> list[float]:
    return [choice.logprob for choices in sample.logprobs or [] for choice in choices.values()]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_and_their_kernels_one_by_one_say_the_same_under_grammars(dtype: str, tmp_path: Path) -> None:
    folder = random_model(tmp_path, "Qwen3ForCausalLM", "cuda")
    replayed, launched = (run(folder, "cuda", dtype, enforce_eager=eager) for eager in (False, True))
    assert samples(replayed) == samples(launched)


@pytest.mark.soak
def test_padded_steps_say_what_the_cpus_own_say_under_grammars(tmp_path: Path) -> None:
    folder = random_model(tmp_path, "Qwen3ForCausalLM", "cpu")
    padded, plain = (samples(run(folder, "cpu", "float32", runner=runner)) for runner in ("device", "model"))
    assert [(one.token_ids, one.finish_reason) for one in padded] == [(one.token_ids, one.finish_reason) for one in plain]
    for one, other in zip(padded, plain, strict=True):
        assert numbers(one) == pytest.approx(numbers(other), abs=1e-4)
