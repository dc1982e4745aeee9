"""Weights in floats of 8 bits with scales of every published shape, against their formulas."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.errors import ConfigError, LoadError
from octavo.kernels.reference.fp8 import widen
from octavo.quant.fp8 import on_device, unpack_fp8
from octavo.quant.quant_config import QuantConfig

NAME = "model.layers.0.mlp.down_proj"
FP8 = QuantConfig("fp8", 8, -1, sym=True)
CPU = torch.device("cpu")
N, K = 200, 320  # the last blocks of 128 x 128 are smaller


def stored(scale: Tensor, suffix: str = "weight_scale") -> dict[str, Tensor]:
    values = torch.randn(N, K, generator=torch.Generator().manual_seed(1)) * 100
    return {f"{NAME}.weight": values.to(torch.float8_e4m3fn), f"{NAME}.{suffix}": scale}


def scales(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) * 0.01 + 0.0001


def in_full(scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    if block is None:
        return scale.reshape(-1, 1).expand(N, K)
    return scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:N, :K]


FORMS = [
    (scales(), None, "weight_scale"),
    (scales(1), None, "weight_scale"),
    (scales(N), None, "weight_scale"),
    (scales(N, 1).bfloat16(), None, "weight_scale"),
    (scales(2, 3), (128, 128), "weight_scale_inv"),
    (scales(4, 5), (64, 64), "weight_scale"),
]


@pytest.mark.parametrize(("scale", "block", "suffix"), FORMS)
def test_floats_are_exact_and_codes_within_half_a_step(scale: Tensor, block: tuple[int, int] | None, suffix: str) -> None:
    tensors = stored(scale, suffix)
    weight = unpack_fp8(tensors, NAME, replace(FP8, block=block))
    exact = tensors[f"{NAME}.weight"].float() * in_full(scale.float(), block)
    assert torch.equal(weight.dequantize(), exact)
    packed = weight.fold()
    assert (packed.bits, packed.group) == (8, 32)
    largest = exact.view(N, -1, 32).abs().amax(-1, keepdim=True).expand(-1, -1, 32).reshape(N, K)
    error = (packed.dequantize() - exact).abs()
    assert bool((error <= largest * (1 / 254 + 2**-11)).all())
    assert error.square().mean().sqrt() < 0.01 * exact.square().mean().sqrt()  # rounding to e4m3 itself costs 0.026


def test_a_rank_reads_its_rows_and_columns() -> None:
    tensors, config = stored(scales(2, 3), "weight_scale_inv"), replace(FP8, block=(128, 128))
    whole = unpack_fp8(tensors, NAME, config).dequantize()
    part = unpack_fp8(tensors, NAME, config, range(100, 200), range(160, 320))
    assert torch.equal(part.dequantize(), whole[100:, 160:]) and part.fold().group == 32
    assert unpack_fp8(tensors, NAME, config, None, range(80, 160)).fold().group == 16
    with pytest.raises(ConfigError, match=f"{NAME}: 320 columns in groups of 32 cannot be split over tensor_parallel_size 8"):
        unpack_fp8(tensors, NAME, config, None, range(40, 80))


SPOILT = [
    ("weight", torch.zeros(N, K), None, "is torch.float32, expected torch.float8_e4m3fn"),
    ("weight", torch.zeros(N, 40).to(torch.float8_e4m3fn), None, "groups of 32 in rows of 40"),
    ("weight_scale", None, None, f"or {NAME}.weight_scale_inv is missing"),
    ("weight_scale", torch.ones(K), None, r"is \[320\], expected \[200, 1\]"),
    ("weight_scale", torch.ones(1).int(), None, "is torch.int32, expected"),
    ("weight_scale", torch.ones(2, 2), (128, 128), r"is \[2, 2\], expected \[2, 3\] \(200 output rows and 320 input columns in blocks"),
    ("weight_scale", torch.tensor(torch.inf), None, "a scale is not finite"),
    ("weight_scale_inv", torch.ones(1), None, "exists twice"),
]


@pytest.mark.parametrize(("part", "value", "block", "message"), SPOILT)
def test_spoiled_tensors_are_refused_by_name(part: str, value: Tensor | None, block: tuple[int, int] | None, message: str) -> None:
    tensors = stored(torch.ones(2, 3) if block else torch.ones(1))
    tensors.pop(f"{NAME}.{part}", None)
    if value is not None:
        tensors[f"{NAME}.{part}"] = value
    with pytest.raises(LoadError, match=f"{NAME}.{part.removesuffix('_inv')}:? {message}"):
        unpack_fp8(tensors, NAME, replace(FP8, block=block)).fold()


@pytest.mark.parametrize("bits", [0x7F, 0xFF])
def test_a_weight_that_is_no_number_is_refused_by_name(bits: int) -> None:
    tensors = stored(torch.ones(1))
    tensors[f"{NAME}.weight"].view(torch.uint8)[150, 3] = bits
    weight = unpack_fp8(tensors, NAME, FP8)
    for keep in (weight.fold, lambda: on_device([weight], CPU)):
        with pytest.raises(LoadError, match=f"{NAME}.weight: a weight is not a number"):
            keep()


@pytest.mark.parametrize(("scale", "block", "suffix"), FORMS)
def test_a_device_keeps_exact_floats_or_codes(scale: Tensor, block: tuple[int, int] | None, suffix: str) -> None:
    """Kernels know scales of rows and of whole blocks of 128 x 128. The last blocks of this matrix are smaller."""
    weight = unpack_fp8(stored(scale, suffix), NAME, replace(FP8, block=block))
    kept = on_device([weight, weight], CPU)
    assert (kept is None) == (block is not None)
    if kept is not None:
        assert torch.equal(widen(kept), torch.cat([weight.dequantize()] * 2)) and not kept.blocks
    narrow = unpack_fp8(stored(scale, suffix), NAME, replace(FP8, block=block), range(30, 130), range(64, 128))
    part = on_device([narrow], CPU)
    assert part is not None and torch.equal(widen(part), narrow.dequantize())  # of one block, its rows have a scale each


def test_whole_blocks_stay_blocks_when_parts_are_joined() -> None:
    values = torch.randn(384, 512, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    tensors = {f"{NAME}.weight": values, f"{NAME}.weight_scale_inv": scales(3, 4)}
    config = replace(FP8, block=(128, 128))
    whole = unpack_fp8(tensors, NAME, config)
    parts = [unpack_fp8(tensors, NAME, config, rows, range(128, 384)) for rows in (range(128), range(256, 384))]
    kept = on_device(parts, CPU)
    assert kept is not None and kept.blocks and kept.scale.shape == (2, 2)
    assert torch.equal(widen(kept), torch.cat([whole.dequantize()[:128, 128:384], whole.dequantize()[256:, 128:384]]))
    index = torch.tensor([200, 3])
    assert torch.equal(widen(kept, index), widen(kept)[index])
    assert on_device([unpack_fp8(tensors, NAME, config, range(64, 192))], CPU) is None  # begins within a block
