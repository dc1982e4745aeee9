"""Verifies that paging changes no bit: a contiguous cache next to the paged one, compared bit for bit at every step.

    paged store    the cache that the engine uses: blocks, tables, sharing, copies, eviction
    shadow         one contiguous region per row, for all cache groups, of the tokens stored on this rank. It never recomputes: it
                   appends the k, v of the forward; when a block is sealed it archives its bytes under its key; on a hit it copies
                   them from there, on a fork from the parent's row

In every layer of every step, each row gathered through its block table must equal its region; then the same
attention function runs over the regions, and must give the same output. The first difference raises `VerifyError`.
`worker/shadow_program.py` runs a program with these checks, and `worker/state_shadow.py` verifies the states of recurrent layers.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from octavo.attention.backend import AttentionBackend, FewBackend, LatentBackend, QKNorm, Rope
from octavo.attention.capabilities import Capabilities
from octavo.attention.contiguous import ContiguousBackend
from octavo.attention.forward_batch import Cache, ForwardBatch
from octavo.attention.spec import AttentionSpec
from octavo.comm.comm import Comm
from octavo.errors import VerifyError
from octavo.kernels.reference.partial_attention import kept_positions
from octavo.messages import RowWrite, StepPlan
from octavo.policy.block_pool import NULL_BLOCK, BlockKey, Event
from octavo.policy.cache_group import FULL, CacheGroup
from octavo.policy.cache_spec import LayerCacheSpec
from octavo.policy.state_pool import StateEvent
from octavo.step.step_tensors import StepTensors
from octavo.worker.kv_store import CPU, Caches, ContiguousStore, KVStore, PagedStore, poison
from octavo.worker.model_runner import ModelRunner
from octavo.worker.state_shadow import StateShadow
from octavo.worker.twice import Compared, as_bits, same_bits

Backend = type[AttentionBackend]


class Shadow:
    def __init__(
        self, specs: list[LayerCacheSpec], num_rows: int, max_len: int, block_size: int, device: torch.device = CPU,
        groups: tuple[CacheGroup, ...] = (FULL,), context: Comm | None = None, num_states: int = 0,
    ) -> None:  # fmt: skip
        """`context`: the ranks that share the tokens of a block, if several do. `num_states`: slots of a recurrent model"""
        self._rank, self._ranks = (context.rank, context.size) if context else (0, 1)
        self.spans = [group.links * block_size for group in groups]  # tokens in a block
        whole = math.lcm(*self.spans)  # so that regions begin at a block boundary of every group
        length = -(-max_len // whole) * whole
        self.blocks = length // block_size  # per region
        own = 1 + 2 * num_rows + num_states if num_states else 0  # a step has no more checkpoints than there are slots
        self.regions = ContiguousStore(specs, num_rows + 1, length // self._ranks, device, own)  # the last row is for padding
        self.block_size = block_size
        self.compared = Compared()
        self.watches = False  # if not set, a shadowed backend only calls the backend
        self.step = 0
        self._layers = [[at for at, spec in enumerate(specs) if spec.layer in group.layers or not group.layers] for group in groups]
        self._group_of = {layer: number for number, layers in enumerate(self._layers) for layer in layers}
        self._tables: dict[int, list[list[int]]] = {}  # row -> blocks in each group, according to the plans
        self._ends: dict[int, int] = {}  # row -> how many positions were computed or found, with drafts
        self._rows_of: dict[int, dict[int, int]] = {}  # block -> {row: index in its table}
        self._key_of: dict[int, BlockKey] = {}  # block -> its key, while it is sealed
        self._archive: dict[BlockKey, Caches] = {}  # key -> bytes of that block, per layer of its group and buffer
        self._covered: dict[bytes, int] = {}  # digest of a block that was sealed -> how many tokens it covers
        self._recurrent = num_states > 0
        self.states = StateShadow(self.regions.states, num_rows, self._covered, self.compared)

    def on_event(self, event: Event, block: int, key: BlockKey | None) -> None:
        """Handles events of the block pool: a sealed block is archived, an evicted one is removed from the archive."""
        if event == "seal":
            assert key is not None
            self._key_of[block] = key
            row, index = next(iter(self._rows_of[block].items()))
            self._archive[key], self._covered[key[1]] = self._bytes(key[0], row, index), (index + 1) * self.spans[key[0]]
        elif event == "evict":
            del self._archive[self._key_of.pop(block)]

    def apply(self, plan: StepPlan) -> None:
        """Follows a plan: forks, rows that start from a hit, blocks with a new owner."""
        self.step = plan.step
        self.compared.steps += 1
        self.compared.copies += len(plan.copies)
        shared = self._unsealed(plan)
        self.regions.apply(plan)
        forked = [self._tables[fork.source] for fork in plan.row_forks]  # all reads before any write
        for fork, tables in zip(plan.row_forks, forked):
            self._set_tables(fork.row, tables)
            self.compared.forks += not fork.moves
        for write in plan.row_writes:
            self._set_tables(write.row, write.tables)
            self._restore(write.row, write.tables, shared)
        for row, length in plan.lengths:
            self._set_tables(row, [table[: -(-(length - 1) // span)] for table, span in zip(self._tables[row], self.spans)])
        for row, group, index, block in plan.new_blocks:
            self._set_block(row, self._tables[row][group], index, block)
        if self._recurrent:
            self.states.apply(plan, {write.row: self._digest(write) for write in plan.row_writes})

    def _digest(self, write: RowWrite) -> bytes | None:
        """Returns the digest of the tokens that a row begins with, if their last block is sealed."""
        key = self._key_of.get(write.tables[0][(write.start - 1) // self.spans[0]]) if write.start else None
        return None if key is None else key[1]

    def spoil_rejected(self, plan: StepPlan, caches: Caches) -> None:
        """Fills the slots of rejected drafts with NaN, before the plan that starts with the first of them. caches: the paged ones"""
        forked = [self._ends[fork.source] for fork in plan.row_forks]  # all reads before any write
        self._ends |= {fork.row: end for fork, end in zip(plan.row_forks, forked)}
        self._ends |= {write.row: write.start for write in plan.row_writes}
        self._ends |= {row: min(self._ends[row], length - 1) for row, length in plan.lengths}
        for row, start, count in zip(plan.row, plan.start, plan.num_query):
            rejected = range(start, self._ends[row])
            self.compared.rejected += len(rejected)
            for position in rejected if self._ranks == 1 else ():  # otherwise the slot may be on another rank
                for layers, table, span in zip(self._layers, self._tables[row], self.spans):
                    slot = position % span
                    poison([caches[layer] for layer in layers], table[position // span], slice(slot, slot + 1))
            self._ends[row] = start + count

    def _set_tables(self, row: int, tables: list[list[int]]) -> None:
        for block in _held(self._tables.get(row, [])):
            self._rows_of[block].pop(row, None)
        self._tables[row] = [list(table) for table in tables]
        for table in tables:
            for index, block in enumerate(table):
                if block != NULL_BLOCK:
                    self._rows_of[block][row] = index

    def _set_block(self, row: int, table: list[int], index: int, block: int) -> None:
        if block == NULL_BLOCK:  # freed behind a window
            self._rows_of[table[index]].pop(row)
            table[index] = NULL_BLOCK
            return
        for replaced in table[index:]:  # copied on write: the row leaves the shared block
            self._rows_of[replaced].pop(row)
        table[index:] = [block]
        self._rows_of[block] = {row: index}

    def _unsealed(self, plan: StepPlan) -> dict[int, Caches]:
        """Returns the bytes of unsealed blocks that rows start with, copied from the regions of rows that contain them.

        Restored beams share blocks that one of them has computed, and of blocks with the same tokens only the first is sealed.
        """
        tables = [(group, table) for write in plan.row_writes for group, table in enumerate(write.tables)]
        blocks = {block: group for group, table in tables for block in table if block != NULL_BLOCK and block not in self._key_of}
        return {block: self._bytes(group, *next(iter(self._rows_of[block].items()))) for block, group in blocks.items()}

    def _bytes(self, group: int, row: int, index: int) -> Caches:
        """Returns a copy of a block of a row, for each layer of its group."""
        return [{name: buffer[row, self._span(group, index)].clone() for name, buffer in cache.items()} for cache in self._caches(group)]

    def _restore(self, row: int, tables: list[list[int]], shared: dict[int, Caches]) -> None:
        """Fills the region of a row from the archive. Freed blocks behind a window become zero, since old contents may be NaN."""
        for group, table in enumerate(tables):
            for index, block in enumerate(table):
                held = None if block == NULL_BLOCK else shared[block] if block in shared else self._archive[self._key_of[block]]
                for number, cache in enumerate(self._caches(group)):
                    for name, buffer in cache.items():
                        buffer[row, self._span(group, index)] = 0 if held is None else held[number][name]

    def _caches(self, group: int) -> Caches:
        return [self.regions.caches[layer] for layer in self._layers[group]]

    def _span(self, group: int, index: int) -> slice:
        """Returns the slice of a region that belongs to a block."""
        size = self.spans[group] // self._ranks
        return slice(index * size, (index + 1) * size)

    def compare_caches(self, layer: int, cache: dict[str, Tensor], rows: Tensor, context_len: Tensor, tables: Tensor) -> None:
        """Every row gathered through its block table must equal its region. rows, context_len: [R]; tables: [R, B]

        Blocks freed behind a window are not compared: nothing reads them, and the table must contain the null block there.
        """
        group = self._group_of[layer]
        span = self.spans[group]
        for entry, (row, length) in enumerate(zip(rows.tolist(), context_len.tolist(), strict=True)):
            if row < 0:
                continue
            first = self._tables[row][group].count(NULL_BLOCK)
            blocks, start = tables[entry, : -(-length // span)].long(), self._span(group, first).start
            positions = kept_positions(length, span // self._ranks, self._rank, self._ranks)[start:]
            if blocks[:first].any():
                raise VerifyError(f"the table names a block that was given back: step {self.step}, layer {layer}, row {row}")
            for name, buffer in cache.items():
                paged = buffer[blocks[first:]].flatten(0, 1)[: len(positions)]  # [positions, kv_heads, head_dim]
                plain = self.regions.caches[layer][name][row, start : start + len(positions)]
                if not same_bits(paged, plain):
                    position = int(positions[int((as_bits(paged) != as_bits(plain)).flatten(1).any(1).nonzero()[0])])
                    where = f"step {self.step}, layer {layer}, row {row}, {name} of position {position}"
                    block = f"block {int(tables[entry, position // span])}, offset {position % span}"
                    raise VerifyError(f"the caches differ: {where} ({block})")
                self.compared.cache_values += paged.numel()
        self.compared.rows += int((rows >= 0).sum())

    def contiguous(self, step: StepTensors) -> StepTensors:
        """Returns the step over the regions: these are consecutive blocks, so the table of a row counts up from its first one."""
        length, numbers = self.blocks * self.block_size, torch.arange(step.tables.shape[2], dtype=torch.int32)
        tables = torch.stack([step.row[:, None] * (length // span) + numbers for span in self.spans])
        token_rows = step.row.long().repeat_interleave(step.query_start.diff())
        slots = token_rows * length + step.cache_index
        states = None if step.states is None else self.states.own_slots(step.states)
        return replace(step, tables=tables, slots=slots.repeat(len(self.spans), 1), states=states)

    def compare_outputs(self, layer: int, paged: Tensor, plain: Tensor, what: str = "attention differs over equal caches") -> None:
        if not same_bits(paged, plain):
            raise VerifyError(f"{what}: step {self.step}, layer {layer}")
        self.compared.output_values += paged.numel()

    def compare_ways(self, at_once: tuple[Tensor, Tensor], by_layers: tuple[Tensor, Tensor]) -> None:
        """Compares states and logits of one step computed in two ways."""
        if not all(map(same_bits, at_once, by_layers)):
            raise VerifyError(f"a step in one call differs from its layers one by one: step {self.step}")


class ShadowedStore:
    """A paged store whose plans the shadow follows, too."""

    def __init__(self, store: KVStore, shadow: Shadow) -> None:
        self.caches, self.states = store.caches, store.states
        self._store = store
        self._shadow = shadow

    def apply(self, plan: StepPlan) -> None:
        self._store.apply(plan)
        self._shadow.apply(plan)
        self._shadow.spoil_rejected(plan, self.caches)


def shadowed(paged_backend: Backend, shadow: Shadow, layers: Iterator[int], plain_backend: Backend = ContiguousBackend) -> Backend:
    """Returns the backend with verification in every layer. `layers` identifies them: they are built in order."""

    class ShadowedBackend:
        capabilities: ClassVar[Capabilities] = paged_backend.capabilities

        def __init__(self, spec: AttentionSpec) -> None:
            self.over_blocks, self.over_regions = paged_backend(spec), plain_backend(spec)
            self.spec, self.few_rows, self.layer = spec, self.over_blocks.few_rows, next(layers)

        @staticmethod
        def prepare(batch: ForwardBatch) -> Any:
            prepared, plain = paged_backend.prepare(batch), replace(batch, caches=shadow.regions.caches)
            if not shadow.watches:
                return prepared
            plain.attention = plain_backend.prepare(plain)
            return replace(batch, attention=prepared), plain

        def write(self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: Cache, batch: ForwardBatch) -> Tensor:
            return _write_both(self.over_blocks.write, self.over_regions.write, shadow, self.layer, (qkv, norms, rope), cache, batch)

        def write_latent(
            self, q: Tensor, kv: Tensor, k_up: Tensor, norm: tuple[Tensor, float], rope: Rope, cache: Cache, batch: ForwardBatch
        ) -> Tensor:
            paged, plain = (cast(LatentBackend, one).write_latent for one in (self.over_blocks, self.over_regions))
            return _write_both(paged, plain, shadow, self.layer, (q, kv, k_up, norm, rope), cache, batch)

        def attend(
            self, q: Tensor, cache: Cache, batch: ForwardBatch, out: Tensor, sinks: Tensor | None = None, slopes: Tensor | None = None
        ) -> Tensor:
            if not shadow.watches:
                return self.over_blocks.attend(q, cache, batch, out, sinks, slopes)
            paged, plain = batch.attention
            shadow.compare_caches(self.layer, cache, batch.rows, batch.context_len, batch.tables)
            reference = self.over_regions.attend(q, shadow.regions.caches[self.layer], plain, torch.empty_like(out), sinks, slopes)
            out = self.over_blocks.attend(q, cache, paged, out, sinks, slopes)
            used = int(batch.query_start[-1])  # the rest is padding
            shadow.compare_outputs(self.layer, out[:used], reference[:used])
            return out

        def attend_few(
            self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: Cache, batch: ForwardBatch, sinks: Tensor | None = None
        ) -> tuple[Tensor, Tensor]:
            both = cast(FewBackend, self.over_blocks), cast(FewBackend, self.over_regions)
            if not shadow.watches:
                return both[0].attend_few(qkv, norms, rope, cache, batch, sinks)
            paged, plain = batch.attention
            reference = both[1].attend_few(qkv.clone(), norms, rope, shadow.regions.caches[self.layer], plain, sinks)
            parts = both[0].attend_few(qkv, norms, rope, cache, paged, sinks)
            shadow.compare_caches(self.layer, cache, batch.rows, batch.context_len, batch.tables)
            held = parts[1] > -torch.inf  # empty splits are neither written nor read
            shadow.compare_outputs(self.layer, parts[1], reference[1])
            shadow.compare_outputs(self.layer, parts[0][held], reference[0][held])
            return parts

    return ShadowedBackend


def _write_both(
    over_blocks: Callable[..., Tensor], over_regions: Callable[..., Tensor], shadow: Shadow, layer: int, given: tuple[Any, ...],
    cache: Cache, batch: ForwardBatch,
) -> Tensor:  # fmt: skip
    """Writes to both caches while the shadow watches. given: arguments before the cache; the first one may be overwritten"""
    if not shadow.watches:
        return over_blocks(*given, cache, batch)
    paged, plain = batch.attention
    over_regions(given[0].clone(), *given[1:], shadow.regions.caches[layer], plain)
    return over_blocks(*given, cache, paged)


def happened(event: Event, block: int, key: BlockKey | None, runner: ModelRunner, shadow: Shadow | None) -> None:
    """Handles a block event. A block that is taken is filled with NaN, so that its old contents cannot be used."""
    if shadow is not None:
        shadow.on_event(event, block, key)
    if event == "take" and (shadow is not None or isinstance(runner.store, PagedStore)):
        poison(runner.store.caches, block)


def state_happened(event: StateEvent, slot: int, key: bytes | None, runner: ModelRunner, shadow: Shadow) -> None:
    """As `happened`, of a state slot."""
    shadow.states.on_event(event, slot, key, runner.store.states)
    if event == "take":
        poison(runner.store.states, slot)


def _held(tables: list[list[int]]) -> list[int]:
    return [block for table in tables for block in table if block != NULL_BLOCK]
