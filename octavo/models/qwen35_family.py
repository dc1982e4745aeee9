"""Qwen3.5, without experts or with: recurrent layers and gated attention (`hybrid_family.py`). It uses no torch.

A model for text and images has its text part under prefixes. Its images, and the layers that predict further tokens, are left out.
"""

from functools import partial
from typing import Any

from octavo.model_config import ConfigReader
from octavo.models.dense_family import MODEL, DenseConfig, cut, with_defaults
from octavo.models.description import MLPShape
from octavo.models.family import Family, GGUFForm, Rules, Stack
from octavo.models.hybrid_family import (
    Q_GATE,
    RULES,
    describe,
    divided,
    gguf_config,
    hybrid_config,
    q_and_gate,
    read_hybrid,
    shared,
    tiled_columns,
    tiled_rows,
)
from octavo.models.mixture_family import MLP, deal, read_experts, with_shared_expert

PLAIN, MOE = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
PLAIN_WITH_IMAGES, MOE_WITH_IMAGES = "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"
OF_THE_WHOLE = ("eos_token_id", "bos_token_id", "dtype", "torch_dtype", "tie_word_embeddings")  # outside the text part of the config
MOE_DEFAULTS: dict[str, Any] = {
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "intermediate_size": 512,
}  # fmt: skip
EXPERT = f"{MLP}.experts.*"

QWEN35_RULES = Rules(
    RULES,
    prefixes={"model.language_model.": "model."},
    left_out=("model.visual.", "mtp.", "model.mtp."),
    stacks=[
        Stack(f"{MLP}.experts.gate_up_proj", (f"{EXPERT}.gate_proj", f"{EXPERT}.up_proj"), in_rows=True),
        Stack(f"{MLP}.experts.down_proj", (f"{EXPERT}.down_proj",), in_rows=True),
    ],
    together=[Q_GATE],
)


def read(reader: ConfigReader, architecture: str) -> DenseConfig:
    if architecture in (PLAIN_WITH_IMAGES, MOE_WITH_IMAGES):
        whole = {key: reader.raw[key] for key in OF_THE_WHOLE if reader.raw.get(key) is not None}
        reader = ConfigReader(reader.object("text_config") | whole, f"{reader.source}: text_config")
    experts = architecture in (MOE, MOE_WITH_IMAGES)
    reader, fields = read_hybrid(with_defaults(reader, MOE_DEFAULTS if experts else {}), architecture)
    if experts:
        inner, chosen = read_experts(reader, fields["num_layers"], "moe_intermediate_size")
        fields |= {"mlps": [MLPShape(inner, experts=with_shared_expert(reader, chosen))] * fields["num_layers"]}
    return hybrid_config(reader, fields)


FAMILY = Family(
    name="qwen3_5",
    architectures=(PLAIN, PLAIN_WITH_IMAGES, MOE, MOE_WITH_IMAGES),
    model=MODEL,
    rules=QWEN35_RULES,
    read=read,
    describe=partial(describe, QWEN35_RULES, "qwen3_5"),
    gguf=GGUFForm({"qwen35": PLAIN, "qwen35moe": MOE}, gguf_config, tiled_rows, columns=tiled_columns),
    shared=shared,
    divided=divided,
    cut=cut,
    deal=deal,
    places=q_and_gate,
)
