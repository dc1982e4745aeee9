"""`CacheSize`: the bytes of a KV cache with a number of blocks. Of a recurrent model, the state slots of checkpoints have a share of it."""

from dataclasses import dataclass
from math import ceil

from octavo.config import ResolvedConfig
from octavo.policy.cache_spec import LayerCacheSpec, one_group, token_bytes

MOST_CPU_POOL = 4 * 2**30
MOST_BLOCKS = 2**20  # unless set: the block pool stores some bytes per block, and a toy model would get millions of blocks


@dataclass(frozen=True, slots=True)
class CacheSize:
    per_block: int  # bytes
    state: int  # bytes of a state slot; 0: the model has no recurrent layers
    share: float  # of the cache, for checkpoints
    of_all: tuple[int, int]  # bytes of a block and of a state slot in all stages of a pipeline, which have equal numbers of both

    @staticmethod
    def of(config: ResolvedConfig, per_token: int, specs: list[LayerCacheSpec], all_specs: list[LayerCacheSpec] | None) -> "CacheSize":
        """`per_token`: bytes of a block per token; `all_specs`: of all stages, if `specs` are of one"""
        share, state = config.state_cache_share * config.enable_prefix_caching, sum(spec.state_bytes for spec in specs)
        of_all = per_token, state
        if all_specs is not None:
            of_all = token_bytes(all_specs, one_group(all_specs)), sum(spec.state_bytes for spec in all_specs)
        return CacheSize(config.block_size * per_token, state, share, (config.block_size * of_all[0], of_all[1]))

    def kept_states(self, num_blocks: int) -> int:
        """Returns how many state slots there are for checkpoints beside this many blocks."""
        per_block, state = self.of_all
        return int(num_blocks * per_block * self.share / (1 - self.share)) // state if state else 0

    def num_states(self, num_blocks: int, rows: int) -> int:
        """Returns how many state slots there are: the null slot, two for each row, and those of checkpoints."""
        return 1 + 2 * rows + self.kept_states(num_blocks) if self.of_all[1] else 0

    def blocks_in(self, size: int) -> int:
        """Returns how many blocks a cache of this size has beside its checkpoints."""
        return int(size / self._bytes) if self._bytes else MOST_BLOCKS

    def bytes_for(self, num_blocks: int) -> int:
        """Returns the size of a cache that has this many blocks."""
        size = ceil(num_blocks * self._bytes)
        return size + 1 if self._bytes > self.per_block else size

    @property
    def _bytes(self) -> float:
        """Of a block, with the checkpoints beside it. A stage of recurrent layers has nothing else."""
        per_block, state = self.of_all
        return self.per_block + (per_block / state * self.share / (1 - self.share) * self.state if state else 0)


def default_pool_bytes(memory_bytes: int) -> int:
    """A quarter of the memory the process may use, at most 4 GiB."""
    return min(memory_bytes // 4, MOST_CPU_POOL)
