"""FP8 folders of either naming on a device, in bfloat16: what 8-bit weights and activations cost, in long steps and in short ones."""

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
    "compressed-tensors in blocks": Kind("fp8", 8, 64, sym=True, compressed=True),
}
WIDE = {
    "self_attn.q_proj": (512, 512), "self_attn.k_proj": (128, 512), "self_attn.v_proj": (128, 512), "self_attn.o_proj": (512, 512),
    "mlp.gate_proj": (1024, 512), "mlp.up_proj": (1024, 512), "mlp.down_proj": (512, 1024),
}  # fmt: skip


PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False, logprobs=3, prompt_logprobs=2)
LONG, SHORT = (0.7, 4.0), (0.15, 0.8)  # of logprobs, in the mean and at most: with activations in 8 bits, and in bfloat16


def generated(folder: Path, place: Place, batches: list[list[list[int]]], dtype: str, form: str, eager: bool) -> list[RequestOutput]:
    settings = {"dtype": dtype, "quantization": form, "enforce_eager": eager, "max_num_seqs": 16, "num_gpu_blocks_override": 400}
    with open_engine(folder, place, enable_prefix_caching=False, **settings) as llm:
        return [output for batch in batches for output in llm.generate(batch, PARAMS, use_tqdm=False)]


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
def test_eight_bits_cost_what_they_cost_and_steps_of_a_few_tokens_less(
    name: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve prompts at once, decoded side by side; and short ones, one at a time, which are read and decoded without rounding."""
    for field, value in {"SHAPES": WIDE, "HIDDEN": 512, "INNER": 1024, "HEADS": 8}.items():
        monkeypatch.setattr(quantized_models, field, value)
    folder, _ = write_both(tmp_path, KINDS[name])
    rng = Random(3)
    together = [[[rng.randrange(320) for _ in range(rng.randint(2, 40))] for _ in range(12)]]
    alone = [[[rng.randrange(320) for _ in range(length)]] for length in (8, 3, 8, 5, 7, 8)]
    for batches, (mean, most) in ((together, LONG), (alone, SHORT)):
        exact = generated(folder, place, batches, "float32", "none", eager=True)
        for eager in (False, True) if place == "cuda" else (True,):
            spread = differences(generated(folder, place, batches, "bfloat16", "auto", eager), exact)
            print(f"{name}: {len(spread)} logprobs, off by {sum(spread) / len(spread):.4f} in the mean, {max(spread):.3f} at most")
            assert len(spread) > 40 and sum(spread) / len(spread) < mean and max(spread) < most
