"""What is compiled ahead: products with codes, too, where matrices are kept as codes."""

from dataclasses import replace

import torch

from octavo.kernels.kernel_shapes import PackedShape
from octavo.kernels.triton.packed.products import packed_calls
from octavo.models.registry import describe, read_config
from octavo.worker.kernel_calls import KernelCalls
from octavo.worker.kernel_shapes import kernel_shapes

SHAPE = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_codes_are_compiled_for_as_they_are_kept(device: str) -> None:
    model, place = describe(read_config({"architectures": ["LlamaForCausalLM"], **SHAPE}, "a test")), torch.device(device)
    shapes = kernel_shapes(model, kept=[])
    assert shapes is not None
    packed = (PackedShape(192, 64, 4, 32), PackedShape(256, 64, 4, 32, gated=True))
    floats, codes = (len(KernelCalls(replace(shapes, packed=kept), torch.float32, 16, 64, place).calls()) for kept in ((), packed))
    assert codes - floats == len(packed_calls(packed, torch.float32, place)) > 4
