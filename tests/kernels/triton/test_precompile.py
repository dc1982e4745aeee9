"""What is compiled ahead: products with codes, too, where matrices are kept as codes."""

import torch

from octavo.kernels.triton.packed.precompile import PackedShape, packed_calls
from octavo.kernels.triton.precompile import KernelCalls
from octavo.model_config import ModelConfig

SHAPE = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_codes_are_compiled_for_as_they_are_kept(device: str) -> None:
    config, place = ModelConfig.from_dict({"architectures": ["LlamaForCausalLM"], **SHAPE}, "a test"), torch.device(device)
    packed = [PackedShape(192, 64, 4, 32), PackedShape(256, 64, 4, 32, gated=True)]
    floats, codes = (len(KernelCalls(config, torch.float32, 16, 64, place, packed=kept).calls()) for kept in ([], packed))
    assert codes - floats == len(packed_calls(packed, torch.float32, place)) > 4
