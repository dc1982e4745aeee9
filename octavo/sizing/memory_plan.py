"""How much memory each part needs, before any of it is allocated. `octavo plan` prints the plan, and the engine starts from it.

    weights       all weights of the model
    KV cache      the block pool: reserved at start, allocated as blocks are written; on a GPU, allocated at start. Of a recurrent
                  model also the state slots of checkpoints, a share of it (`state_cache_share`)
    activations   the peak of one step, or what loading needs beyond the weights and the pool, if that is more
    graphs        steps captured on a GPU
    rows          token ids and block tables of every row, of a recurrent model also two state slots, and the rotation tables
    other         Python and its libraries, the tokenizer, the pool's own lists, memory that malloc retains; on a GPU, CUDA's own

A plan covers the memory of one device: that of the process on a CPU, a share of the device memory on a GPU. If GPU and CPU share
one memory (`unified`), a plan has the parts of both, and each byte is counted once.

Values that a user set are planned as set, and refused if they do not fit. Values left open, the size of the pool and the maximum
sequence length, become the largest that fit. Memory grows with each of them, so `largest` finds them by bisection.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from octavo.attention.mixer import StepLoad
from octavo.config import ResolvedConfig
from octavo.errors import ConfigError, in_flag
from octavo.models.description import ModelDescription
from octavo.policy.cache_group import CacheGroup
from octavo.policy.cache_spec import ITEM_BYTES, CacheGeometry, LayerCacheSpec, blocks_for, one_group, slot_bytes, split_layers, token_bytes
from octavo.sizing.activations import FLOAT32, step_bytes
from octavo.sizing.cache_size import MOST_BLOCKS, CacheSize, default_pool_bytes
from octavo.sizing.gpu_size import CONTEXT, FLASHINFER, GPU_LIBRARIES, gpu_graph_bytes, gpu_row_bytes, gpu_step_bytes
from octavo.sizing.model_size import largest_matrix
from octavo.sizing.native_size import native_step_bytes

MIB, GIB = 2**20, 2**30
LIBRARIES = 150 * MIB  # measured: Python with torch and the rest imported
MOST_KEPT = 64 * MIB  # retained by malloc, out of two fifths of the activations: larger tensors are returned to the system at once
LEFT_PER_WORD, MOST_LEFT = 300, 16 * MIB  # memory left over from reading the vocabulary, which native buffers reuse as they grow
BYTES_PER_WORD = 600  # of the vocabulary: the tokenizer, and the tokens in the header of a GGUF file
BYTES_PER_BLOCK = 270  # the pool's lists, and the index of sealed blocks
BYTES_PER_ROW = 100  # lengths, sampling parameters, noise key


@dataclass(frozen=True, slots=True)
class Memory:
    total: int  # what this process may use
    others: int = 0  # the part of it that other processes use
    gpu: int | None = None  # bytes of the GPU that `total` is a share of
    lacking: int = 0  # memory that was reported as free but could not be allocated
    unified: bool = False  # the GPU shares the CPU's memory: host allocations of this process reduce it, too

    @staticmethod
    def of_gpu(total: int, free: int, utilization: float, unified: bool = False) -> "Memory":
        """`free`: memory that other processes do not use."""
        return Memory(int(total * utilization), total - free, total, unified=unified)

    @property
    def free(self) -> int:
        return self.total - self.others - self.lacking

    def share(self, ranks: int) -> "Memory":
        """Returns how much memory one of several ranks on this host may use."""
        return replace(self, total=self.total // ranks, others=self.others // ranks)


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """The properties of a model that the plan needs."""

    model: ModelDescription
    dtype: str
    weights: int  # bytes
    specs: list[LayerCacheSpec]
    kv_cache_dtype: str
    loading: int = 0  # peak bytes while weights are read, weights included
    native_threads: int = 0  # of the native program; 0: torch computes
    device: str = "cpu"
    arm: bool = False  # torch copies a matrix before it multiplies by it, and malloc retains nothing
    slab: int = 0  # bytes of the weights that a step on a GPU dequantises at once
    one_table: str | None = None  # why all layers share one block table, so that windows free nothing
    all_specs: list[LayerCacheSpec] | None = None  # of all stages of a pipeline, if these are of one

    @property
    def keeps_codes(self) -> bool:
        return self.native_threads > 0 or self.device == "cuda"

    @property
    def bytes_per_token(self) -> int:
        """Of all layers: the bytes that a contiguous cache stores per token."""
        return sum(spec.bytes_per_token for spec in self.specs)

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        return split_layers(self.specs) if self.one_table is None else one_group(self.specs)


@dataclass(frozen=True, slots=True)
class Use:
    weights: int
    kv_cache: int
    activations: int
    rows: int
    other: int
    graphs: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.graphs + self.rows + self.other


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    geometry: CacheGeometry
    use: Use
    memory: Memory
    refusal: str | None = None  # why it does not fit, and which settings to change
    concurrency: float = 0.0  # how many sequences of the maximum length fit into the pool

    def accepted(self) -> CacheGeometry:
        """Returns the geometry of a plan that fits. Otherwise raises a ConfigError that names the settings to change."""
        if self.refusal is not None:
            raise ConfigError(self.refusal)
        return self.geometry

    @property
    def account(self) -> str:
        """The memory needed, by purpose, and the memory available."""
        use, memory = self.use, self.memory
        gone = [f"other processes hold {shown(memory.others)}"] if memory.others else []
        gone += [f"{shown(memory.lacking)} could not be allocated"] if memory.lacking else []
        of_gpu = "" if memory.gpu is None else f" of the GPU's {shown(memory.gpu)} (--gpu-memory-utilization)"
        shared = ""
        if memory.unified and memory.gpu is not None:
            shared, of_gpu = f"GPU and CPU share {shown(memory.gpu)} of memory, of which ", " (--gpu-memory-utilization)"
        return (
            f"this needs {shown(use.total)}: weights {shown(use.weights)}, KV cache {shown(use.kv_cache)}, "
            f"activations {shown(use.activations)}, {f'graphs {shown(use.graphs)}, ' if use.graphs else ''}rows {shown(use.rows)}, "
            f"other {shown(use.other)}; {shared}this process may use {shown(memory.total)}{of_gpu}"
            f"{', of which ' + ' and '.join(gone) if gone else ''}"
        )


def shown(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"


def flag_size(size: int) -> str:
    """Formats a size exactly as a flag accepts it, with a readable form: 40k, 512m, 368639k (360.0 MiB)."""
    return in_flag(size) + (f" ({shown(size)})" if size > MIB and size % MIB else "")


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number from `low` to `high` that fits, if all numbers below one that fits also fit."""
    if high < low or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def check_max_model_len(wanted: int | None, most: int) -> None:
    """Refuses a context length above the model's own maximum, `most`. None: the engine chooses."""
    if wanted is not None and wanted > most:
        raise ConfigError(f"--max-model-len is {wanted}, but the model's own maximum is {most}: lower it to {most} or less")


def plan_memory(needs: ModelNeeds, config: ResolvedConfig, memory: Memory) -> MemoryPlan:
    """Returns the plan, with a refusal if it does not fit. Raises `ConfigError` for settings that are wrong on any machine."""
    check_max_model_len(config.max_model_len, needs.model.max_position)
    planner = _Planner(needs, memory)
    plan = planner.plan(config)
    return plan if planner.fits(config, plan) else replace(plan, refusal=planner.refusal(config, plan))


def plan_stages(needs: list[ModelNeeds], config: ResolvedConfig, memory: Memory) -> list[MemoryPlan]:
    """Returns the plan of each stage of a pipeline. All use the smallest pool and limits, since they share block tables.

    `memory`: of each stage
    """
    plans = [plan_memory(one, config, memory) for one in needs]
    if len(plans) == 1 or any(plan.refusal is not None for plan in plans):
        return plans
    blocks, length = (min(getattr(plan.geometry, name) for plan in plans) for name in ("num_blocks", "max_model_len"))
    common = replace(config, num_gpu_blocks_override=blocks, max_model_len=length)
    return [plan_memory(one, common, memory) for one in needs]


def fullest(plans: list[MemoryPlan]) -> int:
    """Returns the stage that is refused, or else the one that needs the most memory."""
    return max(range(len(plans)), key=lambda stage: (plans[stage].refusal is not None, plans[stage].use.total))


class _Planner:
    """Computes the memory, resolves values left open, and finds which settings to change."""

    def __init__(self, needs: ModelNeeds, memory: Memory) -> None:
        self.needs = needs
        self.memory = memory
        self.most = needs.model.max_position
        self.groups = needs.groups
        self.per_token = token_bytes(needs.specs, self.groups)  # of a block; with one group, of all layers
        self.state = slot_bytes(needs.specs)  # of a state slot
        self.fewest = 1 + len(self.groups)  # blocks: the null block, and one of each group
        # with unified memory, the matrix that the host has read is held in addition to what is already on the device
        self.loading = needs.loading + (largest_matrix(needs.model) * FLOAT32 if memory.unified else 0)

    def use(self, config: ResolvedConfig, num_blocks: int, max_len: int) -> Use:
        needs, model, size = self.needs, self.needs.model, config.block_tokens
        tokens = (num_blocks - 1) * size * max(group.links for group in self.groups)  # of the largest group
        table_blocks = -(-max_len // size)
        contiguous = config.attention_backend == "contiguous"  # a region for every row, and on a GPU one more for padding
        regions = config.max_num_seqs + (needs.device == "cuda")
        kv_cache = config.block_size * (regions * table_blocks * needs.bytes_per_token if contiguous else num_blocks * self.per_token)
        kv_cache += self._cache(config).kept_states(num_blocks) * self.state
        if needs.device == "cuda":
            return self._gpu_use(config, kv_cache, num_blocks, max_len)
        load = StepLoad(
            tokens=min(config.max_num_batched_tokens, tokens),
            rows=min(config.max_num_seqs, num_blocks - 1),  # each sampled row holds a block
            context=max_len,
            gathered=min(tokens, config.max_num_seqs * max_len),
        )
        if needs.native_threads:
            step, kept = native_step_bytes(model, load, needs.native_threads), 0
            step -= min(step, MOST_LEFT, LEFT_PER_WORD * model.vocab_size)
        else:
            step = step_bytes(model, needs.dtype, needs.kv_cache_dtype, load, needs.arm)
            kept = 0 if needs.arm else min(MOST_KEPT, step * 2 // 5)
        row = 8 * (max_len + len(self.groups) * table_blocks) + BYTES_PER_ROW + 2 * self.state
        return Use(
            weights=needs.weights,
            kv_cache=kv_cache,
            activations=max(step, needs.loading - needs.weights - kv_cache),  # the pool is still empty while weights are read
            rows=config.max_num_seqs * row + max_len * model.position_numbers * FLOAT32,
            other=LIBRARIES + kept + BYTES_PER_WORD * model.vocab_size + BYTES_PER_BLOCK * num_blocks,
        )

    def _gpu_use(self, config: ResolvedConfig, kv_cache: int, num_blocks: int, max_len: int) -> Use:
        needs, model, item, rows = self.needs, self.needs.model, ITEM_BYTES[self.needs.dtype], config.max_num_seqs
        tokens = min(config.max_num_batched_tokens, (num_blocks - 1) * config.block_tokens)
        load = StepLoad(max(tokens, rows), rows, max_len, gathered=0)  # padded to all rows
        on_host = LIBRARIES + BYTES_PER_WORD * model.vocab_size + BYTES_PER_BLOCK * num_blocks if self.memory.unified else 0
        graphs = 0 if config.enforce_eager else gpu_graph_bytes(model, item, load) + needs.slab
        limits = config.max_num_batched_tokens, max_len, len(self.groups), -(-max_len // config.block_tokens)
        return Use(
            weights=needs.weights,
            kv_cache=kv_cache,
            activations=max(gpu_step_bytes(model, item, load) + needs.slab, self.loading - needs.weights - kv_cache),  # the pool is last
            graphs=graphs,
            rows=gpu_row_bytes(model, rows, *limits) + 2 * rows * self.state,
            other=CONTEXT + GPU_LIBRARIES + (FLASHINFER if config.attention_backend == "flashinfer" else 0) + on_host,
        )

    def plan(self, config: ResolvedConfig) -> MemoryPlan:
        """Uses the values that were set, and for others the largest that fit."""
        wanted = config.max_model_len
        asked = self._asked_blocks(config)
        most = self._default_blocks(config) if asked is None else asked
        self._check_blocks(config, most)
        blocks = most
        if asked is None:
            least = self.fewest if wanted is None else min(most, self._blocks_for(config, wanted) + 1)
            blocks = self._most_blocks(config, most) or least
        max_len = wanted or largest(2, self._reach(config, blocks), lambda length: self._holds(config, blocks, length)) or 2
        ranks, tokens = config.decode_context_parallel_size, config.max_num_batched_tokens
        states = self._cache(config).num_states(blocks, config.max_num_seqs)
        geometry = CacheGeometry(blocks, config.block_tokens, max_len, self.per_token, self.groups, ranks, self.state, states)
        return MemoryPlan(geometry, self.use(config, blocks, max_len), self.memory, None, geometry.concurrency(tokens))

    def _cache(self, config: ResolvedConfig) -> CacheSize:
        return CacheSize.of(config, self.per_token, self.needs.specs, self.needs.all_specs)

    def fits(self, config: ResolvedConfig, plan: MemoryPlan | None = None) -> bool:
        plan = plan or self.plan(config)
        short = plan.geometry.max_model_len > self._reach(config, plan.geometry.num_blocks)
        # an explicit number of blocks is accepted as it is: requests that are too long for it are refused individually
        return plan.use.total <= self.memory.free and (not short or config.num_gpu_blocks_override is not None)

    def _default_blocks(self, config: ResolvedConfig) -> int:
        """The upper bound when no size is set: on a GPU the pool may take all free memory."""
        if self.memory.gpu is None:
            return min(self._cache(config).blocks_in(default_pool_bytes(self.memory.total)), MOST_BLOCKS)
        return min(max(self._cache(config).blocks_in(self.memory.free), self.fewest), MOST_BLOCKS)

    def _asked_blocks(self, config: ResolvedConfig) -> int | None:
        if config.num_gpu_blocks_override is not None or config.kv_cache_memory_bytes is None:
            return config.num_gpu_blocks_override
        return self._cache(config).blocks_in(config.kv_cache_memory_bytes)

    def _holds(self, config: ResolvedConfig, num_blocks: int, max_len: int) -> bool:
        return self.use(config, num_blocks, max_len).total <= self.memory.free

    def _most_blocks(self, config: ResolvedConfig, most: int) -> int | None:
        """The largest pool that leaves room for a step over a sequence as long as the pool, or of the configured length."""
        length = config.max_model_len
        return largest(self.fewest, most, lambda blocks: self._holds(config, blocks, length or self._reach(config, blocks)))

    def _reach(self, config: ResolvedConfig, num_blocks: int) -> int:
        """The longest sequence that fits into a pool: block 0 is the null block, and the last token is never computed."""
        if len(self.groups) == 1 and not self.groups[0].frees:
            return min(self.most, (num_blocks - 1) * config.block_tokens + 1)
        return largest(1, self.most, lambda length: self._blocks_for(config, length - 1) < num_blocks) or 1

    def _blocks_for(self, config: ResolvedConfig, num_tokens: int) -> int:
        return blocks_for(self.groups, config.block_tokens, num_tokens, config.max_num_batched_tokens)

    def _check_blocks(self, config: ResolvedConfig, num_blocks: int) -> None:
        size, per_token, fewest = config.block_size, self.per_token, self.fewest
        if num_blocks < fewest or self.most < 2:
            raise ConfigError(
                f"a KV cache of {shown(config.kv_cache_memory_bytes or default_pool_bytes(self.memory.total))} has room for "
                f"{max(num_blocks, 0)} blocks of {size} tokens at {per_token:,} bytes per token, and needs at least {fewest}: "
                f"raise --kv-cache-memory-bytes to {flag_size(self._cache(config).bytes_for(fewest))} or more, or lower --block-size"
            )

    # -- messages

    def refusal(self, config: ResolvedConfig, plan: MemoryPlan) -> str:
        if plan.use.total > self.memory.free:
            return f"{plan.account}: {self._advice(config)}{self._larger_share(config, plan)}"
        size, blocks, wanted = config.block_tokens, plan.geometry.num_blocks, plan.geometry.max_model_len
        larger = self.with_room(config, plan)  # only the pool is too small
        if not self.fits(larger):
            asked = self.plan(larger)
            return f"{asked.account}: {self._advice(config)}{self._larger_share(config, asked)}"
        enough = larger.kv_cache_memory_bytes
        return (
            f"--max-model-len is {wanted}, but the KV cache of {shown(plan.use.kv_cache)} holds {self._reach(config, blocks) - 1} "
            f"tokens ({blocks} blocks of {size}, {self.per_token:,} bytes per token): "
            f"the largest --max-model-len that fits is {self._most_of(config, 'max_model_len', 2, wanted)}; "
            f"lower it, or raise --kv-cache-memory-bytes to {flag_size(enough or 0)} or more"
        )

    def with_room(self, config: ResolvedConfig, plan: MemoryPlan) -> ResolvedConfig:
        """Returns settings with a pool that holds the longest sequence of the plan."""
        blocks = self._blocks_for(config, plan.geometry.max_model_len) + 1
        return replace(config, kv_cache_memory_bytes=self._cache(config).bytes_for(blocks))

    def _larger_share(self, config: ResolvedConfig, plan: MemoryPlan) -> str:
        """The share of a GPU that would be enough, if there is one. The plan is repeated with that share, since it may need more then."""
        gpu, others = self.memory.gpu, self.memory.others
        if gpu is None or self.memory.lacking:
            return ""
        needed = plan.use.total
        while (thousandths := -(-(needed + others + 1) * 1000 // gpu)) <= 1000:
            share = _Planner(self.needs, Memory.of_gpu(gpu, gpu - others, thousandths / 1000, self.memory.unified))
            made = share.plan(config)
            if not share.fits(config, made) and made.use.total <= share.memory.free:
                made = share.plan(share.with_room(config, made))  # the pool is too small and has to grow, too
            if made.use.total <= share.memory.free:
                return f"; or raise --gpu-memory-utilization to {thousandths / 1000} or more"
            needed = made.use.total
        return ""

    def _advice(self, config: ResolvedConfig) -> str:
        """Which settings to change and to what value, one setting if that is enough, and the longest sequence after the change."""
        if config.max_model_len is not None and (longest := self._most_of(config, "max_model_len", 2, config.max_model_len)):
            rows = self._most_of(config, "max_num_seqs", 1, config.max_num_seqs)
            other_way = f", or lower --max-num-seqs to {rows} or less" if rows else ""
            return f"the largest --max-model-len that fits is {longest}; lower it{other_way}"
        for base, also in ((config, ""), (replace(config, max_model_len=None), "--max-model-len and ")):
            smaller = self._with_a_smaller_pool(base)
            if smaller is not None:
                name, value, turned = smaller
                limit = flag_size(value) if name == "kv_cache_memory_bytes" else value
                return f"lower {also}{_flag(name)} to {limit} or less; {self._longest(turned)}"
        seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
        for name, low, asked in (("max_num_seqs", 1, seqs), ("max_num_batched_tokens", seqs, tokens)):
            if (most := self._most_of(config, name, low, asked)) is not None:
                return f"lower {_flag(name)} to {most} or less; {self._longest(_with(config, name, most))}"
        narrower = "set --dtype to bfloat16, " if self.needs.dtype == "float32" else ""
        return f"{narrower}take a smaller model or free memory; no --max-model-len fits"

    def _with_a_smaller_pool(self, config: ResolvedConfig) -> tuple[str, int, ResolvedConfig] | None:
        """The setting that determined the pool size, its largest value that fits, and the settings with that value."""
        asked = self._asked_blocks(config)
        if asked is None:
            return None
        blocks = self._most_blocks(config, asked) or self.fewest
        name, value = "num_gpu_blocks_override", blocks
        if config.num_gpu_blocks_override is None:
            name, value = "kv_cache_memory_bytes", self._cache(config).bytes_for(blocks)
        turned = _with(config, name, value)
        return (name, value, turned) if self.fits(turned) else None

    def _longest(self, config: ResolvedConfig) -> str:
        return f"the largest --max-model-len that fits is then {self._most_of(config, 'max_model_len', 2, self.most)}"

    def _most_of(self, config: ResolvedConfig, name: str, low: int, high: int) -> int | None:
        """The largest value of a setting with which everything fits."""
        return largest(low, high, lambda value: self.fits(_with(config, name, value)))


def _with(config: ResolvedConfig, name: str, value: int) -> ResolvedConfig:
    changed: dict[str, Any] = {name: value}
    return replace(config, **changed)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
