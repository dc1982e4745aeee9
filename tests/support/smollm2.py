"""SmolLM2 as transformers sees it: the default model's GGUF, dequantised by the `gguf` library, not by us.

That library takes four seconds for the header: where tensors are is read by us (`tests/loading/test_gguf.py` compares headers).
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.loading.gguf import read_gguf

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def reference_smollm2(path: Path) -> Any:
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, rms_norm_eps=1e-5, rope_theta=100000.0, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    state, stored = {}, np.memmap(path, np.uint8, "r")
    for tensor in read_gguf(path).tensors.values():
        rows = stored[tensor.offset : tensor.offset + tensor.num_bytes].reshape(*tensor.shape[:-1], -1)
        weight = torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.kind]).copy())
        name = tensor.name.removesuffix(".weight")
        if name.startswith("blk."):
            _, layer, part = name.split(".")
            if part in ("attn_q", "attn_k"):
                weight = _half_split(weight, {"attn_q": 9, "attn_k": 3}[part])
            name = f"model.layers.{layer}.{NAMES[part]}"
        else:
            name = TOP[name]
        state[f"{name}.weight"] = weight
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with no_init_weights():  # none of it would stay
        model = LlamaForCausalLM(config).eval()
    model.load_state_dict(state)
    return model


def _half_split(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp interleaves the two halves of each rotary pair; transformers keeps them apart."""
    size, columns = weight.shape
    return weight.view(heads, size // heads // 2, 2, columns).swapaxes(1, 2).reshape(size, columns)
