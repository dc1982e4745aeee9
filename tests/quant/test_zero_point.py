"""AWQ and GPTQ tensors, written in their published layouts, against the weights they stand for."""

import pytest
import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.quant.packed import PackedWeight, concatenate
from octavo.quant.quant_config import QuantConfig
from octavo.quant.zero_point import ZeroPointWeight, unpack_awq, unpack_gptq
from tests.support.packers import Published, published

NAME = "model.layers.3.mlp.up_proj"
SHAPES = [(8, 64, 16), (16, 96, 32), (24, 192, 64), (8, 256, 128), (16, 512, 256), (40, 160, -1), (8, 96, 96)]


def awq(group_size: int, bits: int = 4) -> QuantConfig:
    return QuantConfig("awq", bits, group_size)


def gptq(group_size: int, bits: int = 4, *, symmetric: bool = False, act_order: bool = False, first_format: bool = True) -> QuantConfig:
    return QuantConfig("gptq", bits, group_size, symmetric, act_order, first_format)


def assert_same_weights(weight: ZeroPointWeight, source: Published) -> PackedWeight:
    """Dequantised it is exact. So it is folded wherever float16 holds scale * zero, as for zeros that are powers of two; elsewhere
    it is within that rounding."""
    reference, packed = source.weight(), weight.fold()
    assert torch.equal(weight.dequantize(), reference)
    scale = torch.from_numpy(source.scales).float()
    offset = scale * torch.from_numpy(source.zeros)
    allowed = torch.where(offset.half().float() == offset, 0.0, 2**-11 * offset.abs())  # [n, groups]
    error = (packed.dequantize() - reference).abs()
    assert packed.bits == source.bits and packed.shape == reference.shape
    assert bool((error <= allowed[:, source.group_of]).all())
    return packed


@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES)
def test_awq_is_what_its_layout_says(n: int, k: int, group_size: int) -> None:
    source = published(n, k, group_size, 4, seed=k)
    packed = assert_same_weights(unpack_awq(source.awq(NAME), NAME, awq(group_size)), source)
    assert torch.equal(packed.codes, torch.from_numpy(source.codes).to(torch.uint8))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("first_format", [True, False])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("n", "k", "group_size"), [*SHAPES, (8, 96, 1000), (8, 160, 64)])
def test_gptq_is_what_its_layout_says(n: int, k: int, group_size: int, act_order: bool, first_format: bool, bits: int) -> None:
    """The last shape ends with half a group, the one before is less than one."""
    source = published(n, k, group_size, bits, seed=k, act_order=act_order)
    config = gptq(group_size, bits, act_order=act_order, first_format=first_format)
    packed = assert_same_weights(unpack_gptq(source.gptq(NAME, first_format), NAME, config), source)
    assert (packed.order is None) == (source.group_of == sorted(source.group_of))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("stored_less_one", [True, False])
def test_symmetric_gptq_is_exact_and_read_by_what_it_stores(bits: int, stored_less_one: bool) -> None:
    """Some checkpoints that say `gptq` store symmetric zeros as gptq_v2 does."""
    source = published(16, 256, 64, bits, seed=bits, symmetric=True, act_order=True)
    packed = unpack_gptq(source.gptq(NAME, stored_less_one), NAME, gptq(64, bits, symmetric=True, act_order=True))
    assert torch.equal(packed.fold().dequantize(), source.weight())


def test_columns_in_their_own_order_need_no_g_idx() -> None:
    source = published(8, 128, 32, 4, seed=0)
    tensors = source.gptq(NAME, first_format=True)
    del tensors[f"{NAME}.g_idx"]
    assert_same_weights(unpack_gptq(tensors, NAME, gptq(32)), source)
    with pytest.raises(LoadError, match=f"{NAME}.g_idx is missing"):
        unpack_gptq(tensors, NAME, gptq(32, act_order=True))


def test_projections_of_one_input_are_merged_with_their_order() -> None:
    sources = [published(n, 128, 32, 4, seed=9, act_order=True) for n in (16, 8, 8)]
    for source in sources:
        source.group_of = sources[0].group_of
    parts = [unpack_gptq(source.gptq(NAME, first_format=True), NAME, gptq(32, act_order=True)).fold() for source in sources]
    assert torch.equal(concatenate(parts).dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_scales_in_bfloat16_are_read() -> None:
    source = published(8, 128, 32, 4, seed=4)
    source.scales = torch.from_numpy(source.scales).bfloat16().half().numpy()
    tensors = source.awq(NAME)
    tensors[f"{NAME}.scales"] = tensors[f"{NAME}.scales"].bfloat16()
    assert_same_weights(unpack_awq(tensors, NAME, awq(32)), source)


def spoil(tensors: dict[str, Tensor], part: str, value: Tensor | None) -> dict[str, Tensor]:
    rest = {name: tensor for name, tensor in tensors.items() if name != f"{NAME}.{part}"}
    return rest if value is None else {**rest, f"{NAME}.{part}": value}


def whole(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def half(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float16)


SPOILT_AWQ = [
    ("qweight", None, "is missing"),
    ("qweight", whole(128), r"is \[128\]"),
    ("qweight", whole(128, 0), r"is \[128, 0\]"),
    ("qweight", whole(128, 2).float(), "is torch.float32"),
    ("qweight", whole(112, 2), "has 112 input columns, not a multiple of group_size 32"),
    ("qweight", whole(100, 2), "groups of 32 in rows of 100"),
    ("qzeros", None, "is missing"),
    ("qzeros", whole(4, 16), r"is \[4, 16\], expected \[4, 2\]"),
    ("qzeros", whole(2, 2), r"is \[2, 2\], expected \[4, 2\]"),
    ("scales", None, "is missing"),
    ("scales", half(4, 8), r"is \[4, 8\], expected \[4, 16\]"),
    ("scales", half(16, 4), r"is \[16, 4\], expected \[4, 16\] \(128 input columns, 16 output rows, group_size 32\)"),
    ("scales", whole(4, 16), "is torch.int32"),
    ("scales", half(4, 16) * torch.inf, ": a scale or offset is not finite"),
]
SPOILT_GPTQ = [
    ("qweight", None, "is missing"),
    ("qweight", whole(16, 16, 1), r"is \[16, 16, 1\]"),
    ("qweight", whole(16, 16).long(), "is torch.int64"),
    ("qweight", whole(16, 12), "has 12 output rows, not a multiple of 8"),
    ("qweight", whole(13, 16), "groups of 32 in rows of 104"),
    ("qzeros", None, "is missing"),
    ("qzeros", whole(4, 4), r"is \[4, 4\], expected \[4, 2\]"),
    ("scales", half(8, 16), r"is \[8, 16\], expected \[4, 16\] \(128 input columns, 16 output rows, 4 bits, group_size 32\)"),
    ("scales", half(4, 16) * torch.nan, ": a scale or offset is not finite"),
    ("g_idx", whole(64), r"is \[64\], expected \[128\]"),
    ("g_idx", whole(128), "does not put 32 of 128 input columns into each group"),
    ("g_idx", torch.arange(128).int() // 32 - 1, "does not put 32 of 128"),
    ("g_idx", half(128), "is torch.float16"),
]


@pytest.mark.parametrize(("part", "value", "message"), SPOILT_AWQ)
def test_awq_tensors_that_do_not_fit_are_refused_by_name(part: str, value: Tensor | None, message: str) -> None:
    tensors = published(16, 128, 32, 4, seed=0).awq(NAME)
    with pytest.raises(LoadError, match=f"^{NAME}.{part}:? ?{message}"):
        unpack_awq(spoil(tensors, part, value), NAME, awq(32)).fold()


@pytest.mark.parametrize(("part", "value", "message"), SPOILT_GPTQ)
def test_gptq_tensors_that_do_not_fit_are_refused_by_name(part: str, value: Tensor | None, message: str) -> None:
    tensors = published(16, 128, 32, 4, seed=0, act_order=True).gptq(NAME, first_format=True)
    with pytest.raises(LoadError, match=f"^{NAME}.{part}:? ?{message}"):
        unpack_gptq(spoil(tensors, part, value), NAME, gptq(32, act_order=True)).fold()


@pytest.mark.parametrize("group_size", [8, 24, 64, 128])
def test_a_group_size_that_is_not_the_tensors_is_refused_by_name(group_size: int) -> None:
    source = published(16, 384, 32, 4, seed=0)
    cases = (unpack_awq, source.awq(NAME), awq(group_size)), (unpack_gptq, source.gptq(NAME, True), gptq(group_size))
    for unpack, tensors, config in cases:
        with pytest.raises(LoadError, match=rf"^{NAME}.(qweight|qzeros).*\b{group_size}\b"):
            unpack(tensors, NAME, config)
