"""compressed-tensors of whole numbers, written in their published layouts, against the weights they stand for."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.errors import ConfigError, LoadError
from octavo.quant.quant_config import QuantConfig
from octavo.quant.zero_point import unpack_compressed
from tests.support.packers import published

NAME = "model.layers.3.mlp.up_proj"
WORDS = QuantConfig("compressed-tensors", 4, 32, form="words")
BYTES = QuantConfig("compressed-tensors", 8, -1, sym=True, form="bytes")
SHAPES = [(16, 96, 32), (24, 192, 64), (8, 256, 128), (40, 160, -1), (5, 96, 48)]  # the last: rows that fill no word, groups of 3 * 16


# promise: model-folder-compressed
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
def test_words_are_what_their_layout_says(n: int, k: int, group_size: int, symmetric: bool, bits: int) -> None:
    source = published(n, k, group_size, bits, seed=k, symmetric=symmetric)
    config = replace(WORDS, bits=bits, group_size=group_size, sym=symmetric)
    for packed_zeros in (True, False):
        weight = unpack_compressed(source.words(NAME, symmetric, packed_zeros), NAME, config)
        assert torch.equal(weight.dequantize(), source.weight())
    packed = weight.fold()
    assert packed.bits == bits and torch.equal(packed.codes, torch.from_numpy(source.codes).to(torch.uint8))
    if symmetric:
        assert torch.equal(packed.dequantize(), source.weight())


def test_words_with_act_order_remember_where_their_columns_came_from() -> None:
    source = published(16, 128, 32, 4, seed=3, act_order=True)
    weight = unpack_compressed(source.words(NAME, symmetric=False), NAME, replace(WORDS, desc_act=True))
    assert weight.order is not None and torch.equal(weight.dequantize(), source.weight())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [-1, 32])
def test_bytes_are_what_their_layout_says(symmetric: bool, group_size: int) -> None:
    source = published(6, 64, group_size, 8, seed=1, symmetric=symmetric)
    weight = unpack_compressed(source.bytes(NAME, symmetric), NAME, replace(BYTES, group_size=group_size, sym=symmetric))
    assert torch.equal(weight.dequantize(), source.weight())


def test_one_scale_may_serve_the_whole_matrix() -> None:
    source = published(6, 64, -1, 8, seed=1, symmetric=True)
    source.scales[:] = np.float16(0.03)
    for shape in ((), (1,), (1, 1)):
        tensors = source.bytes(NAME, symmetric=True) | {f"{NAME}.weight_scale": torch.full(shape, 0.03, dtype=torch.float16)}
        assert torch.equal(unpack_compressed(tensors, NAME, BYTES).dequantize(), source.weight())


def test_a_rank_reads_its_rows_and_columns() -> None:
    source = published(24, 192, 64, 4, seed=2)
    tensors, config = source.words(NAME, symmetric=False), replace(WORDS, group_size=64)
    part = unpack_compressed(tensors, NAME, config, range(3, 11), range(64, 128)).fold()
    whole = unpack_compressed(tensors, NAME, config).fold()
    assert torch.equal(part.dequantize(), whole.dequantize()[3:11, 64:128]) and part.group == 64
    with pytest.raises(ConfigError, match=f"{NAME}: 192 columns in groups of 64 cannot be split over tensor_parallel_size 8"):
        unpack_compressed(tensors, NAME, config, None, range(24, 48))


def whole(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


SPOILT = [
    ("weight_packed", None, "is missing"),
    ("weight_packed", whole(16), r"is \[16\], expected \[any, any\]"),
    ("weight_packed", whole(16, 8).float(), "is torch.float32, expected torch.int32"),
    ("weight_packed", whole(16, 10), "has 80 input columns, not a multiple of group_size 32"),
    ("weight_packed", whole(16, 9), "groups of 32 in rows of 72"),
    ("weight_scale", None, "is missing"),
    ("weight_scale", torch.ones(4, 16), r"is \[4, 16\], expected \[16, 4\]"),
    ("weight_scale", torch.ones(1), r"is \[1\], expected \[16, 4\]"),
    ("weight_scale", torch.full((16, 4), torch.nan), "a scale or offset is not finite"),
    ("weight_zero_point", None, "is missing"),
    ("weight_zero_point", whole(16, 4), r"is \[16, 4\], expected \[2, 4\]"),
    ("weight_zero_point", torch.zeros(2, 4, dtype=torch.int8), r"is \[2, 4\], expected \[16, 4\]"),
    ("weight_shape", torch.tensor([16, 120]), r"is \[16, 120\], but its codes are \[16, 128\]"),
    ("weight_shape", torch.tensor(16), r"is \[\], expected \[2\]"),
    ("weight_g_idx", whole(64), r"is \[64\], expected \[128\]"),
    ("weight_g_idx", torch.full((128,), 2**30, dtype=torch.int32), "does not put 32 of 128 input columns into each group"),
]


@pytest.mark.parametrize(("part", "value", "message"), SPOILT)
def test_spoiled_tensors_are_refused_by_name(part: str, value: Tensor | None, message: str) -> None:
    tensors = published(16, 128, 32, 4, seed=5).words(NAME, symmetric=False)
    tensors.pop(f"{NAME}.{part}", None)
    if value is not None:
        tensors[f"{NAME}.{part}"] = value
    with pytest.raises(LoadError, match=f"{NAME}.{part}:? {message}"):
        unpack_compressed(tensors, NAME, WORDS).fold()
