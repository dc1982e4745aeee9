"""Model families by the name a config.json gives them, imported when chosen; and what a model will need, before it is built."""

from importlib import import_module

import torch

from octavo.attention.backend import AttentionBackend, load_backend
from octavo.errors import LoadError
from octavo.layers.comm import Comm, NullComm
from octavo.model_config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.policy.cache_spec import ITEM_BYTES, Buffer, LayerCacheSpec

# architecture -> "module:Class"
MODELS = {
    "LlamaForCausalLM": "octavo.models.dense:DenseModel",
    "Qwen2ForCausalLM": "octavo.models.dense:DenseModel",
    "Qwen3ForCausalLM": "octavo.models.dense:DenseModel",
}


def build_model(config: ModelConfig, dtype: torch.dtype, backend: type[AttentionBackend], comm: Comm, max_len: int) -> Decoder:
    """The model with uninitialised parameters, able to see positions below `max_len`."""
    if config.architecture not in MODELS:
        raise LoadError(f"architecture {config.architecture} is not supported; there are {', '.join(MODELS)}")
    module, _, name = MODELS[config.architecture].partition(":")
    model: Decoder = getattr(import_module(module), name)(config, dtype, backend, comm, max_len)
    return model


def cache_specs(config: ModelConfig, dtype: str) -> list[LayerCacheSpec]:
    token = Buffer((config.num_kv_heads, config.head_dim), dtype)
    return [LayerCacheSpec(layer, {"k": token, "v": token}, window) for layer, window in enumerate(config.windows)]


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Counted on a model without memory, so that it cannot disagree with the real one."""
    with torch.device("meta"):
        model = build_model(config, torch.float32, load_backend("cpu"), NullComm(), max_len=1)
    return sum(parameter.numel() for parameter in model.parameters()) * ITEM_BYTES[dtype]
