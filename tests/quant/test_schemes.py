"""The packed form as a device keeps it: the same numbers, to the bit, in half a byte or one for each."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.reference.layer import packed_linear, unpack
from octavo.quant import schemes
from octavo.quant.packed import PackedWeight
from octavo.quant.quant_config import GROUPS
from octavo.quant.schemes import repack
from tests.quant.test_packed import make, shuffled

CPU = torch.device("cpu")


@st.composite
def weights(draw: st.DrawFn) -> PackedWeight:
    group, seed, bits = draw(st.sampled_from(GROUPS)), draw(st.integers(0, 999)), draw(st.sampled_from((4, 8)))
    k = group * draw(st.integers(1, 9))
    order = shuffled(k, seed) if draw(st.booleans()) else None
    return make(draw(st.integers(1, 6)), k, bits, group, seed, draw(st.integers(-30, 10)), order)


@given(weights(), st.sampled_from((torch.float32, torch.float16, torch.bfloat16)), st.data())
@settings(max_examples=100)
def test_weights_are_those_of_the_packed_form_rounded_once(packed: PackedWeight, dtype: torch.dtype, data: st.DataObject) -> None:
    device = repack(packed, CPU)
    dense = packed.dequantize().to(dtype)
    torch.testing.assert_close(unpack(device, dtype), dense, rtol=0, atol=0, equal_nan=True)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(dense) - 1))), dtype=torch.int64)
    torch.testing.assert_close(unpack(device, dtype, rows), dense[rows], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_is_that_of_the_weights_that_are_stored(bits: int) -> None:
    packed = make(6, 96, bits, 32, 3)
    dice = torch.Generator().manual_seed(1)
    x, bias = torch.randn(3, 96, generator=dice), torch.randn(6, generator=dice)
    exact = x.double() @ packed.dequantize().double().T + bias.double()
    torch.testing.assert_close(packed_linear(x, repack(packed, CPU), bias).double(), exact, rtol=1e-5, atol=1e-5)


@given(weights())
@settings(max_examples=50)
def test_codes_take_their_bits_and_rows_less_than_a_block_more(packed: PackedWeight) -> None:
    device = repack(packed, CPU)
    n, k = packed.shape
    filled = device.blocks * device.block
    assert k <= filled < k + device.block <= k + 128
    assert device.words.nbytes == n * filled * packed.bits // 8 and device.scales.nbytes == n * -(-filled // packed.group) * 4


def test_repacking_in_pieces_is_repacking(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = make(50, 96, 4, 32, seed=3)
    whole = repack(packed, CPU)
    monkeypatch.setattr(schemes, "CHUNK", 700)
    assert torch.equal(repack(packed, CPU).words, whole.words)
