"""The packed form: what its numbers mean, and that cutting and merging matrices does not change them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.errors import LoadError
from octavo.quant.packed import PackedWeight, concatenate, mergeable, pack
from octavo.quant.quant_config import GROUPS, whole_group


def make(n: int, k: int, bits: int, group: int, seed: int, exponent: int = 0, order: torch.Tensor | None = None) -> PackedWeight:
    dice = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (n, k), generator=dice, dtype=torch.uint8)
    scale, offset = torch.randn(2, n, k // group, generator=dice).half()
    return PackedWeight(bits, group, codes, scale, offset, 2.0**exponent, order)


def with_table(packed: PackedWeight, seed: int) -> PackedWeight:
    """The same codes, which stand for other numbers."""
    dice = torch.Generator().manual_seed(seed)
    return replace(packed, bits=4, codes=packed.codes % 16, table=torch.randint(0, 256, (16,), generator=dice, dtype=torch.uint8))


def shuffled(k: int, seed: int) -> torch.Tensor:
    return torch.randperm(k, generator=torch.Generator().manual_seed(seed)).int()


def columns(group: int) -> st.SearchStrategy[int]:
    return st.integers(1, 3).map(lambda groups: groups * group)


@st.composite
def weights(draw: st.DrawFn) -> PackedWeight:
    group, seed = draw(st.sampled_from(GROUPS)), draw(st.integers(0, 999))
    k = draw(columns(group))
    order = shuffled(k, seed) if draw(st.booleans()) else None
    packed = make(draw(st.integers(1, 6)), k, draw(st.sampled_from((4, 8))), group, seed, draw(st.integers(-30, 10)), order)
    return with_table(packed, seed) if draw(st.booleans()) else packed


@given(weights())
@settings(max_examples=60)
def test_each_weight_is_its_formula(packed: PackedWeight) -> None:
    dense = packed.dequantize()
    n, k = packed.shape
    order = range(k) if packed.order is None else packed.order.tolist()
    scale, offset = packed.scale.tolist(), packed.offset.tolist()
    values = list(range(256)) if packed.table is None else packed.table.tolist()
    codes = [[values[code] for code in row] for row in packed.codes.tolist()]
    for row in range(n):
        for j in range(0, k, 7):
            group = j // packed.group
            value = (scale[row][group] * codes[row][j] + offset[row][group]) * packed.factor  # in float64
            assert dense[row, order[j]].item() == pytest.approx(value, rel=2**-20, abs=2**-20 * packed.factor)
    assert dense.dtype == torch.float32
    plain = packed.without_table()
    assert plain.table is None and torch.equal(plain.dequantize(), dense)


@given(weights(), st.integers(0, 6), st.integers(0, 6), st.integers(0, 99))
@settings(max_examples=60)
def test_rows_of_the_weights_are_the_weights_of_the_rows(packed: PackedWeight, start: int, stop: int, seed: int) -> None:
    dense = packed.dequantize()
    some = torch.randint(packed.shape[0], (5,), generator=torch.Generator().manual_seed(seed))
    for index in (slice(start, stop), some):
        assert torch.equal(packed.rows(index).dequantize(), dense[index])


@given(st.data())
@settings(max_examples=60)
def test_merged_weights_are_the_weights_of_the_parts(data: st.DataObject) -> None:
    """Any mixture of bits, groups and factors; all parts see the input in one order."""
    groups = data.draw(st.lists(st.sampled_from(GROUPS), min_size=1, max_size=4))
    k = data.draw(columns(128))
    order = shuffled(k, k) if data.draw(st.booleans()) else None
    parts = [
        make(data.draw(st.integers(1, 5)), k, data.draw(st.sampled_from((4, 8))), group, seed, data.draw(st.integers(-8, 8)), order)
        for seed, group in enumerate(groups)
    ]
    merged = concatenate(parts)
    assert torch.equal(merged.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert (merged.bits, merged.group) == (max(part.bits for part in parts), min(groups))


def test_merged_parts_keep_the_table_that_all_of_them_have() -> None:
    one, other = make(3, 64, 4, 32, 0), make(2, 64, 4, 16, 1)
    same, different = [with_table(one, 1), with_table(other, 1)], [with_table(one, 1), with_table(other, 2)]
    for parts, bits in ((same, 4), (different, 8), ([same[0], other], 8)):
        merged = concatenate(parts)
        assert merged.bits == bits and (merged.table is None) is (bits == 8)
        assert torch.equal(merged.dequantize(), torch.cat([part.dequantize() for part in parts]))


@given(weights())
@settings(max_examples=30)
def test_order_says_which_column_a_code_is_for(packed: PackedWeight) -> None:
    order = shuffled(packed.shape[1], 1)
    assert torch.equal(replace(packed, order=order).dequantize()[:, order.long()], replace(packed, order=None).dequantize())


@given(st.integers(-60, 60), st.integers(0, 999))
def test_what_float16_can_hold_at_any_magnitude_is_held_exactly(exponent: int, seed: int) -> None:
    """Scales over 30 binades with 11 significant bits each, anywhere in the range of float32."""
    dice = torch.Generator().manual_seed(seed)
    digits = torch.randint(1024, 2048, (2, 3, 4), generator=dice).float()
    scale, offset = digits * 2.0 ** (exponent - torch.randint(0, 30, (2, 3, 4), generator=dice).float())
    packed = pack("w", 4, torch.zeros(3, 64, dtype=torch.uint8), scale, offset)
    assert packed.group == 16
    assert torch.equal(packed.scale.float() * packed.factor, scale)
    assert torch.equal(packed.offset.float() * packed.factor, offset)


@given(st.integers(-60, 60), st.floats(1, 2, width=32))
@example(0, 2 - 2**-23)  # rounds up to a power of two, past the largest float16 if that was near
def test_other_scales_are_off_by_a_rounding(exponent: int, digits: float) -> None:
    scale = digits * 2.0 ** (exponent - torch.arange(28.0)).view(1, 28)
    packed = pack("w", 8, torch.zeros(1, 28 * 16, dtype=torch.uint8), scale, -scale)
    for kept, exact in ((packed.scale, scale), (packed.offset, -scale)):
        assert bool(((kept.float() * packed.factor - exact).abs() <= scale * 2**-11).all())


def test_sizes_are_those_of_the_packed_bytes() -> None:
    assert make(32, 256, 4, 32, 0).nbytes == 32 * 256 // 2 + 2 * 2 * 32 * 8
    assert make(32, 256, 8, 128, 0, order=shuffled(256, 0)).nbytes == 32 * 256 + 2 * 2 * 32 * 2 + 4 * 256


def test_a_published_group_is_made_of_whole_groups() -> None:
    assert [whole_group("w", size, 1024) for size in (16, 32, 96, 128, 256, 1024)] == [16, 32, 32, 128, 128, 128]
    assert whole_group("w", 128, 1024 + 32) == 32
    for size, k in ((8, 1024), (40, 1024), (128, 1000)):
        with pytest.raises(LoadError, match=f"layer.0: groups of {size} in rows of {k} "):
            whole_group("layer.0", size, k)


def test_what_does_not_fit_together_is_refused() -> None:
    good = make(4, 64, 4, 32, 0)
    for wrong, message in (
        ({"bits": 3}, "3 bits"),
        ({"group": 24}, "groups of 24"),
        ({"codes": good.codes[:, :48]}, r"codes \[4, 48\]"),
        ({"codes": good.codes.int()}, "codes torch.int32"),
        ({"scale": good.scale[:, :1]}, r"scale torch.float16 \[4, 1\], expected torch.float16 \[4, 2\]"),
        ({"offset": good.offset.float()}, "offset torch.float32"),
        ({"order": shuffled(32, 0)}, r"order torch.int32 \[32\]"),
        ({"table": torch.zeros(8, dtype=torch.uint8)}, r"table torch.uint8 \[8\]"),
        ({"bits": 8, "table": torch.zeros(16, dtype=torch.uint8)}, "a table for codes of 8 bits"),
    ):
        with pytest.raises(LoadError, match=message):
            replace(good, **wrong)
    assert mergeable([good, make(2, 64, 8, 16, 1)])
    for other in (make(4, 128, 4, 32, 0), replace(good, order=shuffled(64, 0))):
        assert not mergeable([good, other]) and not mergeable([other, good, good])
    with pytest.raises(LoadError, match=r"layer.0: a scale or offset is not finite"):
        pack("layer.0", 4, good.codes, good.scale.float(), good.offset.float() * torch.nan)
