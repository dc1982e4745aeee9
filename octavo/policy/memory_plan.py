"""How large the KV pool is and how long a sequence may get: from cache specs, a memory size and the user's wishes."""

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.policy.cache_spec import CacheGeometry, LayerCacheSpec

GIB = 2**30
MOST_CPU_POOL = 4 * GIB
MOST_BLOCKS = 2**20  # unless asked for: the block pool keeps a little of each, and a toy model would get millions


def default_pool_bytes(memory_bytes: int) -> int:
    """A quarter of the memory the process may use, at most 4 GiB."""
    return min(memory_bytes // 4, MOST_CPU_POOL)


def plan_cache(specs: list[LayerCacheSpec], config: EngineConfig, memory_bytes: int, model_max_len: int) -> CacheGeometry:
    """The geometry, or an error with the numbers and the largest `max_model_len` that fits."""
    size = config.block_size
    per_token = sum(spec.bytes_per_token for spec in specs)
    pool_bytes = config.kv_cache_memory_bytes or min(default_pool_bytes(memory_bytes), MOST_BLOCKS * size * per_token)
    num_blocks = config.num_gpu_blocks_override or pool_bytes // (per_token * size)
    needed = num_blocks * size * per_token
    if needed > memory_bytes:
        raise ConfigError(
            f"a KV pool of {num_blocks:,} blocks of {size} tokens takes {needed / GIB:.1f} GiB, this process may use "
            f"{memory_bytes / GIB:.1f} GiB in all; lower kv_cache_memory_bytes or num_gpu_blocks_override"
        )
    longest = min(model_max_len, (num_blocks - 1) * size + 1)  # the last token is never computed
    if num_blocks < 2 or longest < 2:
        raise ConfigError(
            f"the KV pool of {pool_bytes / GIB:.3f} GiB holds {max(num_blocks, 0)} blocks of {size} tokens at {per_token} bytes a token; "
            f"it needs 2 at least: raise kv_cache_memory_bytes to {2 * per_token * size} or more, or lower block_size"
        )
    wanted = config.max_model_len
    if wanted is not None and wanted > model_max_len:
        raise ConfigError(f"max_model_len is {wanted}, the model's own maximum is {model_max_len}")
    if wanted is not None and wanted > longest and config.num_gpu_blocks_override is None:
        raise ConfigError(
            f"max_model_len is {wanted}, but the KV pool of {pool_bytes / GIB:.2f} GiB holds {(num_blocks - 1) * size} tokens "
            f"({num_blocks} blocks of {size}, {per_token} bytes a token): the largest max_model_len that fits is {longest}; "
            f"lower it or raise kv_cache_memory_bytes to {(-(-wanted // size) + 1) * size * per_token} or more"
        )
    return CacheGeometry(num_blocks, size, wanted or longest, per_token)
