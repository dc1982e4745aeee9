"""GGUF kinds in the packed form against the reference library's floats, on random bytes."""

import gguf
import numpy as np
import pytest
import torch

from octavo.errors import LoadError
from octavo.kernels.cpu.gguf_blocks import BLOCK_KINDS
from octavo.kernels.reference.dequant import QUANTISED, group_size
from octavo.quant.packed import PackedWeight, fold_gguf
from tests.support.gguf_scales import HALVES, put

FORM = {  # bits and group of each kind
    "Q4_0": (4, 32), "Q4_1": (4, 32), "Q5_0": (8, 32), "Q5_1": (8, 32), "Q8_0": (8, 32),
    "Q2_K": (4, 16), "Q3_K": (4, 16), "Q4_K": (4, 32), "Q5_K": (8, 32), "Q6_K": (8, 16),
    "IQ4_NL": (4, 32), "IQ4_XS": (4, 32), "MXFP4": (4, 32), "IQ1_S": (8, 32), "IQ1_M": (8, 16), "IQ2_XXS": (8, 32), "IQ2_XS": (8, 16),
    "IQ2_S": (8, 16), "IQ3_XXS": (8, 32), "IQ3_S": (8, 32), "TQ1_0": (4, 128), "TQ2_0": (4, 128),
}  # fmt: skip
EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "TQ1_0", "TQ2_0")
N, GROUPS = 24, 8


def random_bytes(kind: str, halves: np.ndarray) -> np.ndarray:
    """[N, bytes]: codes and inner scales are random, the float16 numbers of a group are drawn from `halves`."""
    dice = np.random.default_rng(len(kind) + QUANTISED[kind][0])
    raw = dice.integers(0, 256, (N, GROUPS, QUANTISED[kind][0]), dtype=np.uint8)
    for which in range(len(HALVES[kind])):
        put(raw, kind, dice.choice(halves, (N, GROUPS)), which)
    return raw.reshape(N, -1)


def fold(raw: np.ndarray, kind: str) -> tuple[PackedWeight, torch.Tensor]:
    """And the floats of the reference library."""
    dense = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    packed = fold_gguf(torch.from_numpy(raw.reshape(-1)), kind, tuple(dense.shape), "blk.0.attn_q.weight")
    assert packed.shape == dense.shape and packed.order is None
    assert (packed.bits, packed.group) == FORM[kind] and int(packed.codes.max()) < 2**packed.bits
    return packed, dense


@pytest.mark.parametrize("kind", EXACT)
def test_simple_kinds_are_exact(kind: str) -> None:
    """For every float16 scale below 512, the subnormal ones among them."""
    below_512 = np.arange(np.float16(512).view(np.uint16), dtype=np.uint16).view(np.float16)
    packed, dense = fold(random_bytes(kind, np.concatenate([below_512, -below_512])), kind)
    assert torch.equal(packed.dequantize(), dense)


@pytest.mark.parametrize("kind", [kind for kind in QUANTISED if kind not in EXACT])
def test_other_kinds_are_within_the_rounding_of_a_float16_scale(kind: str) -> None:
    """2^-11 of the weight where codes count from a middle, else of |scale * code| + |offset|; scales differ up to 16,000-fold."""
    dice = np.random.default_rng(1)
    halves = (dice.choice([-1, 1], 500) * 2.0 ** dice.uniform(-12, 2, 500)).astype(np.float16)
    packed, dense = fold(random_bytes(kind, np.append(halves, [0.0, -0.0]).astype(np.float16)), kind)
    scale, offset = (table.float().repeat_interleave(packed.group, 1) * packed.factor for table in (packed.scale, packed.offset))
    has_offsets = kind in ("Q2_K", "Q4_K", "Q5_K")
    size = (scale * packed.codes).abs() + offset.abs() if has_offsets else dense.abs()
    error = (packed.dequantize() - dense).abs()
    assert bool((error <= size * 2**-11 * (1 + 2**-10)).all())
    assert error.max() > 0  # or it would belong to the exact ones


@pytest.mark.parametrize("kind", [kind for kind in QUANTISED if kind != "MXFP4"])  # whose scales are powers of two
def test_a_scale_that_is_no_number_is_refused_by_name(kind: str) -> None:
    for odd in (np.inf, -np.inf, np.nan):
        raw = random_bytes(kind, np.array([0.01], np.float16))
        put(raw[3, : QUANTISED[kind][0]], kind, np.array(odd, np.float16))
        with pytest.raises(LoadError, match=r"blk.7.ffn_up.weight: a scale or offset is not finite"):
            fold_gguf(torch.from_numpy(raw.reshape(-1)), kind, (N, GROUPS * group_size(kind)), "blk.7.ffn_up.weight")


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_the_native_library_folds_to_the_same_bits(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Scales take all values: subnormal ones, zeros of both signs, and those that others of the matrix make subnormal."""
    every = np.arange(np.float16(512).view(np.uint16), dtype=np.uint16).view(np.float16)
    raw = random_bytes(kind, np.concatenate([every, -every]))
    native = fold(raw, kind)[0]
    monkeypatch.setattr("octavo.kernels.cpu.gguf_blocks.find_library", lambda: "not here")
    torch_alone = fold(raw, kind)[0]
    assert native.factor == torch_alone.factor and torch.equal(native.codes, torch_alone.codes)
    for one, other in ((native.scale, torch_alone.scale), (native.offset, torch_alone.offset)):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


NO_MATRIX = [("Q4_K", (24, 1024)), ("Q4_K", (24, 8, 256)), ("Q4_K", (384, 128)), ("Q8_0", (24, 2048)), ("F16", (4, 4))]


@pytest.mark.parametrize(("kind", "shape"), NO_MATRIX)
def test_bytes_that_are_not_the_matrix_are_refused_by_name(kind: str, shape: tuple[int, ...]) -> None:
    raw = torch.from_numpy(random_bytes("Q4_K", np.array([0.01], np.float16)).reshape(-1))
    with pytest.raises(LoadError, match=f"blk.7.ffn_up.weight: .*{kind}"):
        fold_gguf(raw, kind, shape, "blk.7.ffn_up.weight")
