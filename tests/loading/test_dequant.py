"""Dequantisation: the same bits as the reference library, for every kind, on random bytes."""

import time

import numpy as np
import pytest
import torch

from octavo.kernels.reference.dequant import SUPPORTED_KINDS, dequantize
from octavo.loading.gguf import KINDS
from octavo.loading.resolve import open_checkpoint, resolve_model

SIZES = {name: (group, num_bytes) for name, group, num_bytes in KINDS.values()}


@pytest.mark.parametrize("kind", SUPPORTED_KINDS)
@pytest.mark.parametrize("shape", [(32,), (7, 96), (3, 5, 64)])
def test_bits_equal_the_reference(kind: str, shape: tuple[int, ...]) -> None:
    import gguf

    group, group_bytes = SIZES[kind]
    dice = np.random.default_rng(len(shape))
    for _ in range(20):
        raw = dice.integers(0, 256, (*shape[:-1], shape[-1] // group * group_bytes), dtype=np.uint8)  # infinities and NaN among them
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(raw if kind != "F32" else raw.view(np.float32), gguf.GGMLQuantizationType[kind])
        ours = dequantize(torch.from_numpy(raw.reshape(-1)), kind, shape)
        assert ours.dtype == torch.float32 and ours.shape == shape == expected.shape
        finite = ~np.isnan(expected)
        assert np.array_equal(np.isnan(ours.numpy()), ~finite)
        assert np.array_equal(ours.numpy().view(np.uint32)[finite], expected.view(np.uint32)[finite])


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
