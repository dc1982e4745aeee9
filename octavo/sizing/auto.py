"""Resolves settings that were left at `auto`, once the device is known. No other module does this.

                              CPU      GPU
    max_num_seqs              256      512
    max_num_batched_tokens    2,048    8,192
    pipeline_depth            1        2: the host plans while the device works
    kv_cache_layout           nhd      nhd
    max_pinned_blocks         a quarter of the pool, once its size is known

With recurrent layers, max_num_seqs is also bounded by the memory of their states, once the size of the pool is known.

Explicit settings are kept, and defaults adapt to them: a step must hold at least one token of every row.
"""

from dataclasses import asdict, replace
from typing import Any, Literal

from octavo.config import EngineConfig, ResolvedConfig
from octavo.log import logger
from octavo.models.description import ModelDescription
from octavo.policy.cache_spec import slot_bytes
from octavo.sizing.gpu_size import graph_refusal
from octavo.sizing.memory_plan import Memory, ModelNeeds, largest, plan_memory, shown
from octavo.sizing.native_size import native_refusal

MAX_NUM_SEQS = {"cpu": 256, "cuda": 512}  # on a GPU one read of the weights serves all rows of a step, so many rows pay off
BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
PIPELINE_DEPTH = {"cpu": 1, "cuda": 2}
LEAST_ROWS = 4  # of a recurrent model, whatever its states take


def resolved(config: EngineConfig, device: Literal["cpu", "cuda"]) -> ResolvedConfig:
    """Returns settings with every value resolved."""
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if seqs is None:
        seqs = min(MAX_NUM_SEQS[device], tokens or BATCHED_TOKENS[device])
    settled: dict[str, Any] = {
        "device": device,
        "kv_cache_layout": "nhd" if config.kv_cache_layout == "auto" else config.kv_cache_layout,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": tokens or max(BATCHED_TOKENS[device], seqs),
        "pipeline_depth": config.pipeline_depth or PIPELINE_DEPTH[device],
    }
    return ResolvedConfig(**{**asdict(config), **settled})


def most_pinned(config: EngineConfig, num_blocks: int) -> int:
    """Returns how many blocks may be pinned. `num_blocks`: of the pool, including the null block"""
    return (num_blocks - 1) // 4 if config.max_pinned_blocks is None else config.max_pinned_blocks


def suited(config: ResolvedConfig, model: ModelDescription) -> ResolvedConfig:
    """Turns off the optimised programs that cannot run this model, and logs why. The eager program remains; it runs every model."""
    if config.wants_native and (why := native_refusal(model)) is not None:
        logger.info("Native kernels are off for this model, torch computes: %s", why)
        config = replace(config, native=False)
    if config.device == "cuda" and not config.enforce_eager and (why := graph_refusal(model)) is not None:
        logger.info("CUDA graphs are off for this model: %s", why)
        config = replace(config, enforce_eager=True)
    return config


def with_room_for_states(
    config: ResolvedConfig, asked: EngineConfig, needs: ModelNeeds, memory: Memory
) -> tuple[ResolvedConfig, str | None]:
    """Lowers `max_num_seqs`, unless it was set, until the states of all rows take at most half as much memory as the KV cache.

    Returns the settings, and why they were changed.
    """
    state, most = slot_bytes(needs.specs), config.max_num_seqs
    if not state or asked.max_num_seqs is not None:
        return config, None

    def fits(rows: int) -> bool:
        return 2 * rows * state <= plan_memory(needs, replace(config, max_num_seqs=rows), memory).use.kv_cache // 2

    rows = largest(LEAST_ROWS, most, fits) or min(LEAST_ROWS, most)
    if rows == most:
        return config, None
    why = f"a sequence has two states of {shown(state)}, and those of all sequences may take half as much memory as the KV cache"
    return replace(config, max_num_seqs=rows), f"max_num_seqs is {rows} instead of {most}: {why}"
