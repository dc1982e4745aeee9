"""Blocks of GGUF files packed straight into panels: the same bytes as by way of codes in torch, for merged and permuted rows too."""

import numpy as np
import pytest
import torch

from octavo.errors import LoadError
from octavo.kernels.cpu.gguf_blocks import BLOCK_KINDS, largest_of_blocks, write_floats
from octavo.kernels.cpu.library import BF16, F16, F32, Q4, Q8, NativeLibrary, find_library
from octavo.kernels.cpu.packing import Blocks, PackedMatrix, pack_blocks, pack_codes
from octavo.kernels.reference.dequant import dequantize
from octavo.quant.packed import concatenate, factor_for, fold_gguf
from tests.support.gguf_scales import HALVES, put

K = 512


def library() -> NativeLibrary:
    found = find_library()
    assert isinstance(found, NativeLibrary), found
    return found


def blocks(kind: str, rows: int, order: np.ndarray | None = None) -> Blocks:
    form, dice = BLOCK_KINDS[kind], np.random.default_rng(rows)
    raw = dice.integers(0, 256, (rows, K // form.num_codes, form.num_bytes), dtype=np.uint8)
    for which in range(len(HALVES[kind])):
        put(raw, kind, dice.normal(0, 0.01, raw.shape[:2]).astype(np.float16), which)
    return Blocks(f"f.gguf: {kind}", raw.reshape(-1), kind, (rows, K), order)


def by_codes(parts: list[Blocks], rows: np.ndarray | None, bias: np.ndarray | None) -> PackedMatrix:
    folded = [fold_gguf(torch.from_numpy(part.raw), part.kind, part.shape, part.name) for part in parts]
    folded = [one if part.rows is None else one.rows(torch.from_numpy(part.rows)) for one, part in zip(folded, parts)]
    weight = folded[0] if len(folded) == 1 else concatenate(folded)
    tables = (weight.codes.contiguous().numpy(), weight.scale.contiguous().numpy(), weight.offset.contiguous().numpy())
    return pack_codes(library(), *tables, weight.group, Q4 if weight.bits == 4 else Q8, weight.factor, bias, None, rows)


def assert_same(parts: list[Blocks], rows: np.ndarray | None = None, bias: np.ndarray | None = None) -> None:
    factor = max(factor_for(part.name, largest_of_blocks(part.raw, part.kind, library())) for part in parts)
    found, expected = pack_blocks(library(), parts, factor, bias, rows), by_codes(parts, rows, bias)
    for field in ("kind", "group", "n", "k", "factor"):
        assert getattr(found.struct, field) == getattr(expected.struct, field), field
    for ours, theirs in zip(found.arrays, expected.arrays, strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_each_kind_is_packed_as_its_codes_are(kind: str) -> None:
    assert_same([blocks(kind, 37)], bias=np.arange(37, dtype=np.float32))  # the last panel is not full


@pytest.mark.parametrize("kinds", [("Q4_K", "Q4_K"), ("Q4_K", "Q6_K", "Q8_0"), ("Q4_1", "Q5_K")])
def test_parts_of_a_matrix_take_the_most_bits_and_the_smallest_group(kinds: tuple[str, ...]) -> None:
    parts = [blocks(kind, 16 + index) for index, kind in enumerate(kinds)]
    assert_same(parts)
    count = sum(part.shape[0] for part in parts)
    assert_same(parts, np.concatenate([np.random.default_rng(0).permutation(count), [-1] * 5]))


def test_rows_of_a_part_may_stand_in_another_order() -> None:
    order = np.random.default_rng(1).permutation(32)
    assert_same([blocks("Q4_K", 32, order), blocks("Q6_K", 16)])
    assert_same([blocks("Q4_K", 32, order)], np.concatenate([np.arange(32)[::-1], [-1, -1]]))


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize(("to", "dtype"), [(F32, torch.float32), (BF16, torch.bfloat16), (F16, torch.float16)])
def test_blocks_become_the_floats_of_torch(kind: str, to: int, dtype: torch.dtype) -> None:
    part = blocks(kind, 37)
    put(part.raw.reshape(-1, BLOCK_KINDS[kind].num_bytes)[:3], kind, np.array([60000, 1e-7, np.nan], np.float16))  # too large, too small
    found = torch.empty(part.shape, dtype=dtype)
    write_floats(part.raw, kind, library(), to, found.data_ptr())
    expected = dequantize(torch.from_numpy(part.raw.copy()), kind, part.shape).to(dtype)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(0), expected.nan_to_num(0))


def test_a_scale_that_is_no_number_is_refused_by_the_name_of_its_tensor() -> None:
    for odd in (np.inf, np.nan):
        part = blocks("Q4_K", 8)
        put(part.raw.reshape(16, -1)[7], "Q4_K", np.array(odd, np.float16))
        with pytest.raises(LoadError, match=r"f.gguf: Q4_K: a scale or offset is not finite"):
            factor_for(part.name, largest_of_blocks(part.raw, part.kind, library()))
