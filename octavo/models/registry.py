"""All families, and what they say about a model. Importing this does not import torch, since memory plans use it."""

import reprlib
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.errors import LoadError
from octavo.model_config import ConfigReader, ModelConfig
from octavo.models import dense_family
from octavo.models.family import FAMILIES, Family, register
from octavo.policy.cache_spec import LayerCacheSpec
from octavo.policy.description import ModelDescription

if TYPE_CHECKING:
    import torch

    from octavo.attention.backend import AttentionBackend
    from octavo.layers.comm import Comm
    from octavo.models.decoder import Decoder
    from octavo.quant.schemes import QuantScheme

register(dense_family.FAMILY)


def families() -> list[Family]:
    return list({family.name: family for family in FAMILIES.values()}.values())


def family_of(config: ModelConfig) -> Family:
    if config.architecture not in FAMILIES:
        raise LoadError(f"architecture {config.architecture} is not supported; there are {', '.join(FAMILIES)}")
    return FAMILIES[config.architecture]


def read_config(raw: dict[str, Any], source: str) -> ModelConfig:
    """Reads a config.json, by the family that knows its architecture. `source`: the file, for messages."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise LoadError(f"{source}: architectures is {reprlib.repr(names)}; supported: {', '.join(FAMILIES)}")
    config: ModelConfig = FAMILIES[name].read(ConfigReader(raw, source), name)
    return config


@lru_cache(maxsize=8)
def describe(config: ModelConfig) -> ModelDescription:
    return family_of(config).describe(config)


def cache_specs(config: ModelConfig, dtype: str) -> list[LayerCacheSpec]:
    """Returns what each layer keeps of a token, in a cache of this dtype."""
    mixers = [layer.mixer for layer in describe(config).layers]
    return [LayerCacheSpec(index, mixer.buffers(dtype), mixer.window) for index, mixer in enumerate(mixers)]


def build_model(
    config: ModelConfig,
    dtype: "torch.dtype",
    backend: "type[AttentionBackend]",
    comm: "Comm",
    max_len: int,
    scheme: "QuantScheme | None" = None,
) -> "Decoder":
    """Builds the model with uninitialised parameters, for positions below `max_len`. `scheme`: of its matrices, if not dense."""
    module, _, name = family_of(config).model.partition(":")
    model: Decoder = getattr(import_module(module), name)(config, dtype, backend, comm, max_len, *([] if scheme is None else [scheme]))
    return model
