"""Qwen3-Next: recurrent layers, gated attention and experts (`hybrid_family.py`). It uses no torch.

The projections of a recurrent layer are grouped by k head, in folders and in older GGUF files. Newer ones have the names of Qwen3.5.

    in_proj_qkvz   [k_heads][q k v z]     v and z have the rows of all v heads of the k head
    in_proj_ba     [k_heads][b a]
"""

from functools import partial
from typing import Any

from octavo.model_config import ConfigReader
from octavo.models.dense_family import MODEL, DenseConfig, cut, with_defaults
from octavo.models.description import MLPShape
from octavo.models.family import Family, GGUFForm, HeldTogether, Rules
from octavo.models.hybrid_family import (
    DELTA,
    Q_GATE,
    QKV,
    RULES,
    A,
    B,
    Z,
    delta_net_of,
    describe,
    divided,
    gguf_config,
    hybrid_config,
    q_and_gate,
    read_hybrid,
    shared,
)
from octavo.models.mixture_family import deal, layers_with_experts, read_experts, with_shared_expert
from octavo.models.row_order import OfGroup, RowOrder

NEXT = "Qwen3NextForCausalLM"
DEFAULTS: dict[str, Any] = {
    "intermediate_size": 5632, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip
GROUPED = (
    HeldTogether(f"{DELTA}.in_proj_qkvz", (QKV, Z), gguf="blk.*.ssm_in"),
    HeldTogether(f"{DELTA}.in_proj_ba", (B, A), gguf="blk.*.ssm_ba"),
)
NEXT_RULES = Rules(RULES, left_out=("mtp.", "model.mtp."), together=[Q_GATE, *GROUPED])


def read(reader: ConfigReader, architecture: str) -> DenseConfig:
    reader, fields = read_hybrid(with_defaults(reader, DEFAULTS), architecture)
    layers = fields["num_layers"]
    inner, experts = read_experts(reader, layers, "moe_intermediate_size")
    moe, plain = MLPShape(inner, experts=with_shared_expert(reader, experts)), MLPShape(fields["inner"])
    fields |= {"mlps": [moe if there else plain for there in layers_with_experts(reader, layers)]}
    return hybrid_config(reader, fields)


def _places(config: DenseConfig) -> dict[str, RowOrder]:
    spec = delta_net_of(config)
    if spec is None:
        return q_and_gate(config)
    times = spec.v_heads // spec.k_heads
    sizes, heads = (spec.k_dim, spec.k_dim, times * spec.v_dim, times * spec.v_dim), (times, times)
    grouped = {QKV: OfGroup(spec.k_heads, sizes, (0, 1, 2)), Z: OfGroup(spec.k_heads, sizes, (3,))}
    gates = {module: OfGroup(spec.k_heads, heads, (part,)) for part, module in enumerate((B, A))}
    return q_and_gate(config) | grouped | gates


FAMILY = Family(
    name="qwen3_next",
    architectures=(NEXT,),
    model=MODEL,
    rules=NEXT_RULES,
    read=read,
    describe=partial(describe, NEXT_RULES, "qwen3_next"),
    gguf=GGUFForm({"qwen3next": NEXT}, gguf_config, lambda architecture, config: {}, experts=True),
    shared=shared,
    divided=divided,
    cut=cut,
    deal=deal,
    places=_places,
)
