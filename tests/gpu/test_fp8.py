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


def generated(folder: Path, place: Place, asked: list[list[int]], dtype: str, quantization: str, eager: bool) -> list[RequestOutput]:
    """All at once and then one by one: steps of many tokens, of several rows and of one."""
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False, logprobs=3, prompt_logprobs=2)
    settings = {"dtype": dtype, "quantization": quantization, "enforce_eager": eager, "max_num_seqs": 16, "num_gpu_blocks_override": 400}
    with open_engine(folder, place, **settings) as llm:
        return llm.generate(asked, params, use_tqdm=False) + [llm.generate([one], params, use_tqdm=False)[0] for one in asked[:2]]


def differences(found: list[RequestOutput], reference: list[RequestOutput]) -> list[float]:
    """Of the logprobs of the tokens of prompts, and of the first token of each answer."""
    pairs = [(ours, theirs) for one, other in zip(found, reference, strict=True) for ours, theirs in
             zip([*(one.prompt_logprobs or ())[1:], one.outputs[0].logprobs[0]],
                 [*(other.prompt_logprobs or ())[1:], other.outputs[0].logprobs[0]], strict=True)]  # fmt: skip
    return [abs(ours[token].logprob - theirs[token].logprob) for ours, theirs in pairs for token in theirs if token in ours]


# promise: model-folder-compressed
@PLACES
@pytest.mark.parametrize("name", KINDS)
def test_eight_bits_cost_little_and_come_out_of_every_kind_of_step(
    name: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_models, "SHAPES", WIDE)
    monkeypatch.setattr(quantized_models, "HIDDEN", 512)
    monkeypatch.setattr(quantized_models, "INNER", 1024)
    monkeypatch.setattr(quantized_models, "HEADS", 8)
    folder, _ = write_both(tmp_path, KINDS[name])
    rng = Random(3)
    asked = [[rng.randrange(320) for _ in range(rng.randint(2, 40))] for _ in range(12)]
    exact = generated(folder, place, asked, "float32", "none", eager=True)
    for eager in (False, True) if place == "cuda" else (True,):
        spread = differences(generated(folder, place, asked, "bfloat16", "auto", eager), exact)
        print(f"{name}: {len(spread)} logprobs, off by {sum(spread) / len(spread):.4f} in the mean, {max(spread):.3f} at most")
        assert len(spread) > 300 and sum(spread) / len(spread) < 0.06 and max(spread) < 0.6
