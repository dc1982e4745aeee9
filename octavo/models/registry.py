"""All families, and their functions for a model. This module does not import torch, since memory plans use it."""

import reprlib
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError, LoadError
from octavo.model_config import ConfigReader, ModelConfig
from octavo.models import (
    bloom_family,
    cohere_family,
    deepseek_v2_family,
    deepseek_v3_family,
    gemma_family,
    glm_family,
    glm_lite_family,
    gpt_oss_family,
    granite_family,
    llama_family,
    mixture_family,
    olmo_family,
    phi_family,
    qwen3_next_family,
    qwen35_family,
    qwen_family,
    smollm_family,
)
from octavo.models.description import ModelDescription
from octavo.models.family import FAMILIES, Family, register
from octavo.models.split import Part, check_split, part_of_vector, parts_of_rank
from octavo.policy.cache_spec import LayerCacheSpec

if TYPE_CHECKING:
    import torch

    from octavo.attention.backend import NewBackend
    from octavo.comm.comm import Comm
    from octavo.models.decoder import Decoder
    from octavo.quant.schemes import QuantScheme

register(llama_family.FAMILY)
register(qwen_family.FAMILY)
register(phi_family.FAMILY)
register(gemma_family.FAMILY)
register(olmo_family.FAMILY)
register(granite_family.FAMILY)
register(smollm_family.FAMILY)
register(mixture_family.MIXTRAL_FAMILY)
register(mixture_family.QWEN_FAMILY)
register(gpt_oss_family.FAMILY)
register(cohere_family.FAMILY)
register(glm_family.FAMILY)
register(bloom_family.FAMILY)
register(qwen35_family.FAMILY)
register(qwen3_next_family.FAMILY)
register(deepseek_v2_family.FAMILY)
register(deepseek_v3_family.FAMILY)
register(glm_lite_family.FAMILY)

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = 80  # longer than the name of any architecture of transformers


def families() -> list[Family]:
    return list({family.name: family for family in FAMILIES.values()}.values())


def family_of(config: ModelConfig) -> Family:
    if config.architecture not in FAMILIES:
        raise LoadError(f"architecture {config.architecture} is not supported; there are {', '.join(FAMILIES)}")
    return FAMILIES[config.architecture]


def read_config(raw: dict[str, Any], source: str) -> ModelConfig:
    """Reads a config.json with the family that has its architecture. `source`: the file, for messages"""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise LoadError(f"{source}: architectures is {_SHOWN.repr(names)}; supported: {', '.join(FAMILIES)}")
    config: ModelConfig = FAMILIES[name].read(ConfigReader(raw, source), name)
    return config


@lru_cache(maxsize=8)
def describe(config: ModelConfig) -> ModelDescription:
    return family_of(config).describe(config)


def dealt_config(config: ModelConfig, ranks: int) -> ModelConfig:
    """Returns the config with the experts of one of several ranks. Refuses a model whose experts cannot be divided."""
    family = family_of(config)
    if ranks == 1:
        return config
    if family.deal is None:
        raise ConfigError(f"enable_expert_parallel is set, and models of the family {family.name} have no experts: leave it out")
    if all(layer.mlp.experts is None for layer in describe(config).kinds):
        raise ConfigError("enable_expert_parallel is set, and this model has no experts: leave it out")
    dealt: ModelConfig = family.deal(config, ranks)
    return dealt


def rank_config(config: ModelConfig, size: int, context: int = 1, expert_ranks: int = 1) -> ModelConfig:
    """Returns the config of one of `size` ranks, which is the same for all. Refuses a model that cannot be divided among them.

    `context`: how many neighbouring ranks have the same k and v heads, and share the tokens of a context; `expert_ranks`: equal to `size`
    if each has whole experts, otherwise 1
    """
    family = family_of(config)
    if size == 1:
        return config
    config = dealt_config(config, expert_ranks)
    if family.shared is None or family.divided is None:
        why = family.unshared
        raise ConfigError(f"models of the family {family.name} cannot be split ({why}): set tensor_parallel_size to 1, not {size}")
    shared = family.shared(config)
    check_split(shared.values(), config.vocab_size, size, context)
    divided: ModelConfig = family.divided(config, {name: one.of_rank(size, context) for name, one in shared.items()}, context)
    return divided


def stage_config(config: ModelConfig, layers: range) -> ModelConfig:
    """Returns the config of a stage that has these layers of a model."""
    family = family_of(config)
    if len(layers) == config.num_layers:
        return config
    if family.cut is None:
        raise ConfigError(f"layers of the family {family.name} cannot be split into stages: set pipeline_parallel_size to 1")
    cut: ModelConfig = family.cut(config, layers)
    return cut


def rank_parts(config: ModelConfig, size: int, rank: int, context: int = 1, expert_ranks: int = 1) -> dict[str, Part]:
    """Returns the part that a rank has of each weight in the checkpoint of the whole model, whose config is given.

    Whole experts of a rank are numbered from 0.
    """
    whole, own = describe(dealt_config(config, expert_ranks)), describe(rank_config(config, size, context, expert_ranks))
    rules = family_of(config).rules
    pairs = [(vector, mine) for vector, mine in zip(whole.vectors, own.vectors, strict=True) if vector.size != mine.size]
    vectors = {rules.weight(vector.module): part_of_vector(vector, mine, size, rank) for vector, mine in pairs}
    return parts_of_rank(whole, own, size, rank) | vectors


def cache_specs(config: ModelConfig, dtype: str) -> list[LayerCacheSpec]:
    """Returns what each layer stores per token, in a cache of this dtype, and per sequence."""
    mixers = [layer.mixer for layer in describe(config).layers]
    return [LayerCacheSpec(index, mixer.buffers(dtype), mixer.window, mixer.state()) for index, mixer in enumerate(mixers)]


def build_model(
    config: ModelConfig,
    dtype: "torch.dtype",
    backend: "NewBackend",
    comm: "Comm",
    max_len: int,
    scheme: "QuantScheme | None" = None,
) -> "Decoder":
    """Builds the model with uninitialised parameters, for positions below `max_len`. `scheme`: of its matrices, if not dense."""
    module, _, name = family_of(config).model.partition(":")
    model: Decoder = getattr(import_module(module), name)(config, dtype, backend, comm, max_len, *([] if scheme is None else [scheme]))
    return model
