"""gpt-oss: MoE layers; attention with sinks, and a window on every other layer. It uses no torch.

    attention   biases on q, k, v and the output; a sink for each head; yarn rotation, whose ramp is not rounded
    experts     biases on the router and on all experts; weights are the softmax over the logits of the chosen experts; the gate is
                clamped: gate * sigmoid(1.702 gate) * (up + 1)

Folders have one tensor for all experts of a layer, in floats or in MXFP4 (`loading/views.py`).
"""

from dataclasses import replace
from functools import partial
from typing import Any

from octavo.model_config import ConfigReader
from octavo.models.dense_family import (
    ATTENTION_RULES,
    EMBEDDING_RULES,
    MODEL,
    DenseConfig,
    check_activation,
    cut,
    dense_config,
    divided,
    gguf_fields,
    interleaved_qk,
    layer_windows,
    read_fields,
    read_layer_types,
)
from octavo.models.description import MLPShape
from octavo.models.family import Family, GGUFForm, Rule, Rules, Stack
from octavo.models.gguf_keys import GGUFKeys
from octavo.models.mixture_family import deal, describe, expert_rules, gguf_experts, read_experts, shared

ARCHITECTURE = "GptOssForCausalLM"
MLP = "model.layers.*.mlp"
EXPERT = f"{MLP}.experts.*"
STACKS = (
    Stack(f"{MLP}.experts.gate_up_proj", (f"{EXPERT}.gate_proj", f"{EXPERT}.up_proj")),
    Stack(f"{MLP}.experts.down_proj", (f"{EXPERT}.down_proj",)),
)
RULES = Rules(
    [
        *EMBEDDING_RULES,
        *ATTENTION_RULES,
        Rule("model.layers.*.input_layernorm", "layers.*.attention_norm", gguf="blk.*.attn_norm"),
        Rule("model.layers.*.post_attention_layernorm", "layers.*.mlp_norm", gguf="blk.*.post_attention_norm"),
        Rule("model.layers.*.self_attn.sinks", "layers.*.attention.sinks", gguf="blk.*.attn_sinks", bare=True),
        *expert_rules(f"{MLP}.router", f"{MLP}.experts", "gate_proj", "up_proj", "down_proj"),
    ],
    stacks=STACKS,
)
CLAMPED = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}  # the only supported clamped gate


def read(reader: ConfigReader, architecture: str) -> DenseConfig:
    check_activation(reader)
    for key, value in CLAMPED.items():
        if reader.number(key, value, 0, 1e6) != value:
            raise reader.fail(key, str(value))
    fields = read_fields(reader, architecture)
    layers = fields["num_layers"]
    inner, experts = read_experts(reader, layers, "intermediate_size")
    bias = reader.flag("attention_bias", True)
    fields |= {
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": True,
        "sinks": True,
        "mlps": [MLPShape(inner, "clamped", replace(experts, scores="chosen"))] * layers,
        "wide_norms": True,
        "windows": layer_windows(reader, read_layer_types(reader, layers, lambda layer: layer % 2 == 0)),
    }
    return dense_config(fields | {"rope": reader.rope(fields["head_dim"])})


def _gguf(keys: GGUFKeys) -> dict[str, Any]:
    """GGUF files do not contain the fact that the ramp of yarn is not rounded."""
    fields, experts = gguf_fields(keys, windowed=True, experts=True), gguf_experts(keys)
    rope = {**fields["rope_parameters"], "truncate": False}
    sizes = {"intermediate_size": experts["moe_intermediate_size"], "sliding_window": keys.integer("attention.sliding_window")}
    return {**fields, **experts, **sizes, "rope_parameters": rope}


FAMILY = Family(
    name="gpt_oss",
    architectures=(ARCHITECTURE,),
    model=MODEL,
    rules=RULES,
    read=read,
    describe=partial(describe, RULES, "gpt_oss"),
    gguf=GGUFForm({"gpt-oss": ARCHITECTURE}, _gguf, interleaved_qk([]), experts=True),
    shared=shared,
    divided=divided,
    cut=cut,
    deal=deal,
)
