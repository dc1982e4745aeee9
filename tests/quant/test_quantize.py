"""Floats into the packed form: how far off a weight may be, and that 4 bits are better than plain rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import octavo.quant.packed as module
from octavo.errors import LoadError
from octavo.quant.packed import GROUPS, quantize


def draw(n: int, k: int, seed: int, kind: str = "normal") -> torch.Tensor:
    dice = torch.Generator().manual_seed(seed)
    numbers = torch.randn(n, k, generator=dice)
    return {"normal": numbers, "heavy": numbers**3, "shifted": numbers * 0.01 + 5, "flat": numbers.round() * 0}[kind]


def plain_rounding(weight: torch.Tensor, group: int) -> torch.Tensor:
    """From the lowest to the highest of a group in 15 steps."""
    grouped = weight.view(weight.shape[0], -1, group)
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    step = ((high - low) / 15).clamp_min(1e-30)
    return (((grouped - low) / step).round() * step + low).view_as(weight)


def error_of(dense: torch.Tensor, weight: torch.Tensor, group: int) -> torch.Tensor:
    """[n, groups]"""
    return (dense.double() - weight.double()).view(weight.shape[0], -1, group).norm(dim=-1)


@given(st.sampled_from(GROUPS), st.integers(0, 999), st.sampled_from(["normal", "heavy", "flat"]), st.integers(-80, 80))
@settings(max_examples=60)
def test_8_bits_are_within_half_a_step_and_keep_zero(group: int, seed: int, kind: str, exponent: int) -> None:
    weight = draw(5, 2 * group, seed, kind) * 2.0**exponent
    weight[:, ::9] = 0
    packed = quantize(weight, 8, group)
    largest = weight.view(5, 2, group).abs().amax(-1).repeat_interleave(group, 1)
    off = (packed.dequantize() - weight).abs()
    assert packed.bits == 8 and packed.group == group
    assert bool((off <= largest / 127 * (0.5 + 2**-11)).all())  # of the step that float16 kept
    assert bool((packed.dequantize()[:, ::9] == 0).all())


@given(st.sampled_from(GROUPS), st.integers(0, 999), st.sampled_from(["normal", "heavy", "shifted", "flat"]), st.integers(-80, 80))
@settings(max_examples=60)
def test_4_bits_are_never_worse_than_plain_rounding(group: int, seed: int, kind: str, exponent: int) -> None:
    """In each group, but for what float16 takes from its scale and offset."""
    weight = draw(5, 2 * group, seed, kind) * 2.0**exponent
    packed = quantize(weight, 4, group)
    ours, plain = (error_of(dense, weight, group) / 2.0**exponent for dense in (packed.dequantize(), plain_rounding(weight, group)))
    taken = (packed.scale.abs() * 15 + packed.offset.abs()).float() * (packed.factor / 2.0**exponent * 2**-11 * group**0.5)
    assert bool((ours <= plain + taken).all())


@pytest.mark.parametrize(("group", "less"), [(32, 0.10), (64, 0.07)])
def test_4_bits_have_a_tenth_less_squared_error_than_plain_rounding(group: int, less: float) -> None:
    weight = draw(128, 1024, seed=0) * 0.02
    ours = (quantize(weight, 4, group).dequantize() - weight).square().sum()
    assert ours < (1 - less) * (plain_rounding(weight, group) - weight).square().sum()


@pytest.mark.parametrize("bits", [4, 8])
def test_neither_chunks_nor_the_dtype_of_the_floats_can_be_seen(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw(37, 128, seed=1).bfloat16()
    whole = quantize(weight.float(), bits, 64)
    monkeypatch.setattr(module, "CHUNK", 5 * 128)
    pieces = quantize(weight, bits, 64)
    assert torch.equal(pieces.dequantize(), whole.dequantize()) and torch.equal(pieces.codes, whole.codes)


def test_what_cannot_be_quantised_is_refused_by_name() -> None:
    weight = draw(4, 128, seed=2)
    for value in (torch.nan, torch.inf):
        for bits in (4, 8):
            spoilt = weight.clone()
            spoilt[2, 3] = value
            with pytest.raises(LoadError, match=r"^lm_head: a scale or offset is not finite"):
                quantize(spoilt, bits, name="lm_head")
    wrong = [(weight, 3, 32, "3 bits"), (weight, 4, 48, "groups of 48")]
    wrong += [(weight[:, :100], 4, 32, r"is \[4, 100\]"), (weight[:0], 4, 32, r"is \[0, 128\]")]
    for matrix, bits, group, message in wrong:
        with pytest.raises(LoadError, match=f"^lm_head.*{message}"):
            quantize(matrix, bits, group, "lm_head")
