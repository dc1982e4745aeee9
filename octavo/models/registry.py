"""Model families by the name a config.json gives them, imported when chosen; and what a model will keep of each token.

Importing this does not import torch: a memory plan asks here.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from octavo.errors import LoadError
from octavo.model_config import ModelConfig
from octavo.policy.cache_spec import Buffer, LayerCacheSpec

if TYPE_CHECKING:
    import torch

    from octavo.attention.backend import AttentionBackend
    from octavo.layers.comm import Comm
    from octavo.models.decoder import Decoder
    from octavo.quant.base import QuantScheme

# architecture -> "module:Class"
MODELS = {
    "LlamaForCausalLM": "octavo.models.dense:DenseModel",
    "Qwen2ForCausalLM": "octavo.models.dense:DenseModel",
    "Qwen3ForCausalLM": "octavo.models.dense:DenseModel",
}


def build_model(
    config: ModelConfig,
    dtype: "torch.dtype",
    backend: "type[AttentionBackend]",
    comm: "Comm",
    max_len: int,
    scheme: "QuantScheme | None" = None,
) -> "Decoder":
    """The model with uninitialised parameters, able to see positions below `max_len`. `scheme`: of its matrices, if not dense."""
    if config.architecture not in MODELS:
        raise LoadError(f"architecture {config.architecture} is not supported; there are {', '.join(MODELS)}")
    module, _, name = MODELS[config.architecture].partition(":")
    model: Decoder = getattr(import_module(module), name)(config, dtype, backend, comm, max_len, *([] if scheme is None else [scheme]))
    return model


def cache_specs(config: ModelConfig, dtype: str) -> list[LayerCacheSpec]:
    """`dtype`: of the cache. Codes of 8 bits have a scale for each head of a token."""
    token = Buffer((config.num_kv_heads, config.head_dim), dtype)
    buffers = {"k": token, "v": token}
    if dtype == "int8":
        scale = Buffer((config.num_kv_heads,), "float32")
        buffers |= {"k_scale": scale, "v_scale": scale}
    return [LayerCacheSpec(layer, buffers, window) for layer, window in enumerate(config.windows)]

