"""FP8 folders of either naming on a device, under graphs and without, against the same weights in floats."""

from collections.abc import Callable
from math import sqrt
from pathlib import Path
from random import Random

import pytest
from safetensors.torch import load_file, save_file

from octavo import RequestOutput, SamplingParams
from octavo.kernels.reference import fp8
from tests.support import quantized_models
from tests.support.places import PLACES, Place, open_engine
from tests.support.quantized_models import Kind, write_both
from tests.support.rounding import E4M3, PRODUCTS, assert_near, both, share_of_float, share_of_float32

KINDS = {
    "fp8 in blocks": Kind("fp8", 8, 64, sym=True),
    "fp8 of whole matrices": Kind("fp8", 8, 64, sym=True, scales="tensor"),
    "compressed-tensors by rows": Kind("fp8", 8, 64, sym=True, scales="rows", compressed=True, architecture="Qwen2ForCausalLM"),
}
HIDDEN = {"cpu": 256, "cuda": 512}  # blocks of scales are 128 wide; tiles of a GPU want more
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False, logprobs=3, prompt_logprobs=2)
LAYERS = quantized_models.LAYERS
# In float32 activations are not rounded, and only the order of sums differs. Otherwise they are rounded to e4m3 (3 bits) in steps of more
# than 8 rows. bfloat16 rounds to 7 bits in 20 places of a layer: factors and results of products, norms, the residual stream. That adds
# 1 % to the bound.
SHARES = {"float32": share_of_float32(1024), "bfloat16": both(E4M3, sqrt(20 / PRODUCTS) * share_of_float(7))}


def shapes(hidden: int) -> dict[str, tuple[int, int]]:
    """Of a layer with two heads of 64 for keys."""
    heads = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (128, hidden), "self_attn.v_proj": (128, hidden)}
    mlp = {"mlp.gate_proj": (2 * hidden, hidden), "mlp.up_proj": (2 * hidden, hidden), "mlp.down_proj": (hidden, 2 * hidden)}
    return heads | {"self_attn.o_proj": (hidden, hidden)} | mlp


def large_enough(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = HIDDEN[place]
    for field, value in {"SHAPES": shapes(hidden), "HIDDEN": hidden, "INNER": 2 * hidden, "HEADS": hidden // 64}.items():
        monkeypatch.setattr(quantized_models, field, value)


def prompts() -> list[list[int]]:
    rng = Random(3)
    return [[rng.randrange(320) for _ in range(rng.randint(2, 40))] for _ in range(12)]


def generated(folder: Path, place: Place, asked: list[list[int]], dtype: str, form: str, eager: bool) -> list[RequestOutput]:
    settings = {"dtype": dtype, "quantization": form, "enforce_eager": eager, "max_num_seqs": 16, "num_gpu_blocks_override": 400}
    with open_engine(folder, place, **settings) as llm:
        return llm.generate(asked, PARAMS, use_tqdm=False)


# promise: model-folder-compressed
@PLACES
@pytest.mark.parametrize("name", KINDS)
def test_logprobs_are_those_of_the_floats_but_for_8_bits(
    name: str, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """tests/support/rounding.py derives the bounds."""
    large_enough(place, monkeypatch)
    folder, _ = write_both(tmp_path, KINDS[name])
    asked = prompts()
    exact = generated(folder, place, asked, "float32", "none", eager=True)
    for dtype, share in SHARES.items():
        for eager in (False, True) if place == "cuda" else (True,):
            found = generated(folder, place, asked, dtype, "auto", eager)
            record_property(f"{name}, {dtype}, {'eager' if eager else 'graphs'}", assert_near(found, exact, share, LAYERS))


@PLACES
def test_scales_of_other_blocks_are_seen(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one matrix of one layer."""
    large_enough(place, monkeypatch)
    folder, _ = write_both(tmp_path, KINDS["fp8 in blocks"])
    asked, name = prompts()[:6], "model.layers.0.self_attn.o_proj.weight_scale_inv"
    exact = generated(folder, place, asked, "float32", "none", eager=True)
    weights = {key: weight.clone() for key, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights | {name: weights[name].roll(1, 0).contiguous()}, folder / "model.safetensors")
    with pytest.raises(AssertionError, match="of the bound"):
        assert_near(generated(folder, place, asked, "float32", "auto", eager=True), exact, SHARES["float32"], LAYERS)


def test_scales_of_activations_that_are_off_by_a_tenth_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large_enough("cpu", monkeypatch)
    folder, _ = write_both(tmp_path, KINDS["fp8 in blocks"])
    exact, rounded = generated(folder, "cpu", prompts(), "float32", "none", eager=True), fp8._rounded
    monkeypatch.setattr(fp8, "_rounded", lambda x, span: 1.1 * rounded(x, span))
    with pytest.raises(AssertionError, match="of the bound"):
        assert_near(generated(folder, "cpu", prompts(), "bfloat16", "auto", eager=True), exact, SHARES["bfloat16"], LAYERS)
