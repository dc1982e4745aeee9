"""Tiny models with latent attention, of odd shapes."""

from dataclasses import replace
from typing import Any

from tests.support.families import Tiny, sizes

_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip


def _latent(heads: int, rank: int, rotated: int, plain: int, values: int, q_rank: int | None) -> dict[str, Any]:
    return {
        **sizes(3, 12 * heads, heads, heads), "kv_lora_rank": rank, "qk_rope_head_dim": rotated, "qk_nope_head_dim": plain,
        "v_head_dim": values, "q_lora_rank": q_rank,
    }  # fmt: skip


def _experts(count: int, chosen: int, inner: int = 20, shared: int = 1, dense: int = 1) -> dict[str, int]:
    return {
        "n_routed_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": inner, "n_shared_experts": shared,
        "first_k_dense_replace": dense,
    }  # fmt: skip


LATENTS = {
    "deepseek v2 lite": Tiny(
        "DeepseekV2ForCausalLM",
        _latent(3, 24, 8, 12, 20, None) | _experts(6, 2, shared=2)
        | {"rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "rms_norm_eps": 1e-3},
    ),
    "deepseek v2": Tiny(
        "DeepseekV2ForCausalLM",
        _latent(4, 36, 12, 16, 13, 28) | _experts(12, 3)
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 3.0},
    ),
    "deepseek v3": Tiny(
        "DeepseekV3ForCausalLM",
        _latent(4, 40, 16, 11, 24, 20) | _experts(16, 3, dense=2)
        | {
            "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
            "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.6}, "rms_norm_eps": 1e-3,
        },
    ),
    "glm 4.7 flash": Tiny(
        "Glm4MoeLiteForCausalLM",
        _latent(5, 48, 8, 20, 28, 32) | _experts(8, 3) | {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
}  # fmt: skip

# Of whole groups of 32 columns, which quantised weights need.
ALIGNED = Tiny(
    "DeepseekV3ForCausalLM",
    _latent(4, 64, 16, 32, 32, 32) | _experts(8, 2, inner=32)
    | {"hidden_size": 64, "intermediate_size": 64, "n_group": 2, "topk_group": 1},
)  # fmt: skip


def for_a_gpu(tiny: Tiny) -> Tiny:
    """Returns the model with matrices of whole tiles. Latents keep their odd numbers of heads."""
    given = tiny.options
    fields = {
        "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "kv_lora_rank": given["kv_lora_rank"] + 12,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 48, "q_lora_rank": given["q_lora_rank"] and 64,
    }  # fmt: skip
    return replace(tiny, options=given | fields)


def long(tiny: Tiny) -> Tiny:
    """Returns the model with room for more than two pieces of attention."""
    return replace(tiny, options=tiny.options | {"max_position_embeddings": 1024})
