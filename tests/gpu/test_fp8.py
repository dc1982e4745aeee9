"""FP8 folders of either naming on a device, under graphs and without, against the same weights in floats."""

from pathlib import Path
from random import Random

import pytest

from octavo import RequestOutput, SamplingParams
from tests.support import quantized_models
from tests.support.places import PLACES, Place, open_engine
from tests.support.quantized_models import Kind, write_both

KINDS = {
    "fp8 in blocks": Kind("fp8", 8, 64, sym=True),
    "fp8 of whole matrices": Kind("fp8", 8, 64, sym=True, scales="tensor"),
    "compressed-tensors by rows": Kind("fp8", 8, 64, sym=True, scales="rows", compressed=True, architecture="Qwen2ForCausalLM"),
}
HIDDEN = {"cpu": 256, "cuda": 512}  # blocks of scales are 128 wide; tiles of a GPU want more
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False, logprobs=3, prompt_logprobs=2)
LIMITS = {"float32": (1e-3, 1e-2), "bfloat16": (0.7, 4.0)}  # of logprobs, in the mean and at most: activations as they are, and in 8 bits


def shapes(hidden: int) -> dict[str, tuple[int, int]]:
    """Of a layer with two heads of 64 for keys."""
    heads = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (128, hidden), "self_attn.v_proj": (128, hidden)}
    mlp = {"mlp.gate_proj": (2 * hidden, hidden), "mlp.up_proj": (2 * hidden, hidden), "mlp.down_proj": (hidden, 2 * hidden)}
    return heads | {"self_attn.o_proj": (hidden, hidden)} | mlp


def generated(folder: Path, place: Place, asked: list[list[int]], dtype: str, form: str, eager: bool) -> list[RequestOutput]:
    settings = {"dtype": dtype, "quantization": form, "enforce_eager": eager, "max_num_seqs": 16, "num_gpu_blocks_override": 400}
    with open_engine(folder, place, **settings) as llm:
        return llm.generate(asked, PARAMS, use_tqdm=False)


def differences(found: list[RequestOutput], reference: list[RequestOutput]) -> list[float]:
    """Of the logprobs of the tokens of prompts, and of the first token of each answer."""
    pairs = []
    for one, other in zip(found, reference, strict=True):
        ours, theirs = ([*(output.prompt_logprobs or ())[1:], (output.outputs[0].logprobs or [{}])[0]] for output in (one, other))
        pairs += list(zip(ours, theirs, strict=True))
    return [abs(ours[token].logprob - theirs[token].logprob) for ours, theirs in pairs for token in theirs if token in ours]


# promise: model-folder-compressed
@PLACES
@pytest.mark.parametrize("name", KINDS)
def test_texts_are_those_of_the_floats_but_for_8_bits(name: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 activations are not rounded. The logits of this model spread by 6, and rounding moves them by 8 % of that."""
    hidden = HIDDEN[place]
    for field, value in {"SHAPES": shapes(hidden), "HIDDEN": hidden, "INNER": 2 * hidden, "HEADS": hidden // 64}.items():
        monkeypatch.setattr(quantized_models, field, value)
    folder, _ = write_both(tmp_path, KINDS[name])
    rng = Random(3)
    asked = [[rng.randrange(320) for _ in range(rng.randint(2, 40))] for _ in range(12)]
    exact = generated(folder, place, asked, "float32", "none", eager=True)
    for dtype, (mean, most) in LIMITS.items():
        for eager in (False, True) if place == "cuda" else (True,):
            spread = differences(generated(folder, place, asked, dtype, "auto", eager), exact)
            print(f"{name}, {dtype}: {len(spread)} logprobs, off by {sum(spread) / len(spread):.4f} in the mean, {max(spread):.3f} at most")
            assert len(spread) > 300 and sum(spread) / len(spread) < mean and max(spread) < most
