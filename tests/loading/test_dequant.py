"""Dequantisation: the same bits as the reference library, for every kind, on random bytes."""

import time

import numpy as np
import pytest
import torch

from octavo.kernels.reference.dequant import DENSE, SUPPORTED_KINDS, dequantize
from octavo.loading.gguf import KINDS
from octavo.loading.resolve import open_checkpoint, resolve_model
from tests.support.gguf_scales import HALVES, put

SIZES = {name: (group, num_bytes) for name, group, num_bytes in KINDS.values()}
ODD = [0.0, -0.0, 2**-24, -(2**-24), 2**-14, 0.1, -1.0, 65504.0, -65504.0, np.inf, -np.inf, np.nan]


def assert_bits_equal_the_reference(raw: np.ndarray, kind: str, shape: tuple[int, ...]) -> None:
    """NaN only has to fall in the same places: which NaN it is depends on the machine."""
    import gguf

    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw if kind != "F32" else raw.view(np.float32), gguf.GGMLQuantizationType[kind])
    ours = dequantize(torch.from_numpy(raw.reshape(-1)), kind, shape)
    assert ours.dtype == torch.float32 and ours.shape == shape == expected.shape
    number = ~np.isnan(expected)
    assert np.array_equal(np.isnan(ours.numpy()), ~number)
    assert np.array_equal(ours.numpy().view(np.uint32)[number], expected.view(np.uint32)[number])


@pytest.mark.parametrize("kind", SUPPORTED_KINDS)
@pytest.mark.parametrize("shape", [(32,), (7, 96), (3, 5, 64)])
def test_bits_equal_the_reference(kind: str, shape: tuple[int, ...]) -> None:
    group, group_bytes = SIZES[kind]
    shape = (*shape[:-1], shape[-1] * max(1, group // 32))  # whole groups of 256, too
    dice = np.random.default_rng(len(shape))
    for _ in range(20):
        raw = dice.integers(0, 256, (*shape[:-1], shape[-1] // group * group_bytes), dtype=np.uint8)  # infinities and NaN among them
        assert_bits_equal_the_reference(raw, kind, shape)


# promise: gguf-all-types
@pytest.mark.parametrize("kind", [kind for kind in SUPPORTED_KINDS if kind not in DENSE])
def test_bits_equal_the_reference_at_sane_and_odd_scales(kind: str) -> None:
    group, group_bytes = SIZES[kind]
    dice = np.random.default_rng(group_bytes)
    scales = np.array([*ODD, *dice.normal(0, 0.02, 28)], np.float16)
    raw = dice.integers(0, 256, (len(scales), len(scales), group_bytes), dtype=np.uint8)  # groups by scale and by offset
    raw[:, ::7, 4:], raw[:, ::11, 4:] = 0, 255  # the codes and inner scales at their ends
    for axis in range(len(HALVES[kind])):
        put(raw, kind, np.broadcast_to(np.expand_dims(scales, 1 - axis), raw.shape[:2]).copy(), axis)
    assert_bits_equal_the_reference(raw.reshape(len(scales), -1), kind, (len(scales), len(scales) * group))


@pytest.mark.timed("the CPU time of dequantising the default model")
def test_the_default_model_is_dequantised_fast_and_right() -> None:
    import gguf

    source = resolve_model(None)
    checkpoint = open_checkpoint(source)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # CPU time of one thread says the same on a busy machine
    start = time.process_time()
    count = sum(checkpoint.read(name).to(torch.bfloat16).numel() for name in checkpoint.names())
    seconds = time.process_time() - start
    torch.set_num_threads(threads)
    assert seconds < 2  # 0.55 measured
    assert count == 134_515_008
    tensor = source.gguf.tensors["blk.29.ffn_down.weight"]
    raw = np.memmap(source.path, np.uint8, "r", tensor.offset, (576, tensor.num_bytes // 576))
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[tensor.kind])
    assert np.array_equal(checkpoint.read("model.layers.29.mlp.down_proj.weight").numpy(), expected)
