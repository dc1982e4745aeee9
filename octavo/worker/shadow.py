"""Verifies that paging changes no bit: a contiguous cache next to the paged one, compared bit for bit at every step.

    paged store    the cache that the engine uses: blocks, tables, sharing, copies, eviction
    shadow         one contiguous region per row, for all cache groups, of the tokens stored on this rank. It never recomputes: it
                   appends the k, v of the forward; when a block is sealed it archives its bytes under its key; on a hit it copies
                   them from there, on a fork from the parent's row

In every layer of every step, each row gathered through its block table must equal its region; then the same
attention function runs over the regions, and must give the same output. The first difference raises `VerifyError`.

    torch program     `shadowed` wraps the attention backend of each layer
    native program    `ShadowedAttention` runs between its layers, which are called one by one

`ShadowedProgram` computes a step with these checks, and then once more in the usual way, in one call or as a graph: both must give
the same bits.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from octavo.attention.backend import AttentionBackend, FewBackend, QKNorm, Rope
from octavo.attention.capabilities import Capabilities
from octavo.attention.contiguous import ContiguousBackend
from octavo.attention.forward_batch import Cache, ForwardBatch
from octavo.attention.spec import AttentionSpec
from octavo.comm.comm import Comm
from octavo.errors import VerifyError
from octavo.kernels.reference.partial_attention import kept_positions
from octavo.messages import StepPlan
from octavo.policy.block_pool import NULL_BLOCK, BlockKey, Event
from octavo.policy.cache_group import FULL, CacheGroup
from octavo.policy.cache_spec import LayerCacheSpec
from octavo.step.shared_keys import AllShared
from octavo.step.step_tensors import Shape, StepTensors
from octavo.worker.kv_store import CPU, Caches, ContiguousStore, KVStore, PagedStore, poison
from octavo.worker.model_runner import ModelRunner
from octavo.worker.native_layers import NativeAttention, NativeLayers
from octavo.worker.native_program import NativeProgram
from octavo.worker.program import Eager, Forward, Program
from octavo.worker.step_sharing import rows_together
from octavo.worker.twice import as_bits, same_bits

Backend = type[AttentionBackend]


@dataclass(slots=True)
class Compared:
    """How much has been verified."""

    steps: int = 0
    rows: int = 0
    cache_values: int = 0
    output_values: int = 0
    copies: int = 0
    forks: int = 0
    rejected: int = 0  # slots of drafts that were rejected
    together: int = 0  # rows of decode steps that shared keys with others

    @property
    def values(self) -> int:
        return self.cache_values + self.output_values


class Shadow:
    def __init__(
        self, specs: list[LayerCacheSpec], num_rows: int, max_len: int, block_size: int, device: torch.device = CPU,
        groups: tuple[CacheGroup, ...] = (FULL,), context: Comm | None = None,
    ) -> None:  # fmt: skip
        """`context`: the ranks that share the tokens of a block, if several do"""
        self._rank, self._ranks = (context.rank, context.size) if context else (0, 1)
        self.spans = [group.links * block_size for group in groups]  # tokens in a block
        whole = math.lcm(*self.spans)  # so that regions begin at a block boundary of every group
        length = -(-max_len // whole) * whole
        self.blocks = length // block_size  # per region
        self.regions = ContiguousStore(specs, num_rows + 1, length // self._ranks, device)  # the last is for padding
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

    def on_event(self, event: Event, block: int, key: BlockKey | None) -> None:
        """Handles events of the block pool: a sealed block is archived, an evicted one is removed from the archive."""
        if event == "seal":
            assert key is not None
            self._key_of[block] = key
            self._archive[key] = self._bytes(key[0], *next(iter(self._rows_of[block].items())))
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
        return replace(step, tables=tables, slots=slots.repeat(len(self.spans), 1))

    def compare_outputs(self, layer: int, paged: Tensor, plain: Tensor) -> None:
        if not same_bits(paged, plain):
            raise VerifyError(f"attention differs over equal caches: step {self.step}, layer {layer}")
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
            if not shadow.watches:
                return self.over_blocks.write(qkv, norms, rope, cache, batch)
            paged, plain = batch.attention
            self.over_regions.write(qkv.clone(), norms, rope, shadow.regions.caches[self.layer], plain)
            return self.over_blocks.write(qkv, norms, rope, cache, paged)

        def attend(
            self, q: Tensor, cache: Cache, batch: ForwardBatch, out: Tensor, sinks: Tensor | None = None, slopes: Tensor | None = None
        ) -> Tensor:
            if not shadow.watches:
                return self.over_blocks.attend(q, cache, batch, out, sinks, slopes)
            paged, plain = batch.attention
            shadow.compare_caches(self.layer, cache, batch.rows, batch.context_len, batch.tables)
            reference = self.over_regions.attend(q, shadow.regions.caches[self.layer], plain, torch.empty_like(out), sinks, slopes)
            out = self.over_blocks.attend(q, cache, paged, out, sinks, slopes)
            shadow.compare_outputs(self.layer, *(one[: int(batch.query_start[-1])] for one in (out, reference)))  # the rest is padding
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


class ShadowedAttention:
    """The native attention over blocks and over the regions, with the comparison in between."""

    def __init__(self, whole: NativeProgram, caches: Caches, shadow: Shadow) -> None:
        self._paged, self._plain = NativeAttention(whole, caches), NativeAttention(whole, shadow.regions.caches)
        self._caches, self._shadow, self._groups = caches, shadow, whole.groups

    def prepare(self, step: StepTensors, shared: AllShared) -> None:
        self._step = step
        self._paged.prepare(step, shared)
        self._plain.prepare(self._shadow.contiguous(step), shared)  # the same rows share keys, so that bits are equal

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        twin = qkv.clone()
        self._paged.write(layer, qkv)
        self._plain.write(layer, twin)
        group = self._groups[layer]
        lengths, tables = self._step.context_len[group], self._step.tables[group]
        self._shadow.compare_caches(layer, self._caches[layer], self._step.row, lengths, tables)
        out = self._paged.read(layer, qkv)
        self._shadow.compare_outputs(layer, out, self._plain.read(layer, twin))
        return out


class ShadowedProgram:
    """A program with verification in every layer."""

    def __init__(self, program: Program, watched: Callable[[Shape, bool], tuple[Tensor, Tensor] | None], shadow: Shadow) -> None:
        """`watched` computes a step with verification, and returns hidden states and logits as in the program's `Forward`.

        It returns None if the program does: in that case the data for the next stage is compared when it is sent (`worker/twice.py`).
        """
        self.vocab_size, self.nbytes = program.vocab_size, program.nbytes
        self.load, self.logits = program.load, program.logits
        self._program, self._watched, self._shadow = program, watched, shadow

    def run(self, shape: Shape, whole: bool = False) -> Forward | None:
        seen = self._watched(shape, whole)
        forward = self._program.run(shape, whole)  # writes the same bits into the same slots
        if forward is None or seen is None:
            return None
        hidden, logits = seen
        used = int(forward.step.query_start[-1])  # the rest is padding
        outputs = int(forward.step.first_output[int((forward.step.row >= 0).sum())])
        count = outputs if len(forward.hidden) == shape.outputs else used
        self._shadow.compare_ways((forward.hidden[:count], forward.logits[:outputs]), (hidden[:count], logits[:outputs]))
        return forward


def watched_native(program: NativeProgram, caches: Caches, shadow: Shadow) -> ShadowedProgram:
    layers = NativeLayers(program, ShadowedAttention(program, caches, shadow))
    program.sharing.share_all()

    def watched(shape: Shape, whole: bool) -> tuple[Tensor, Tensor] | None:
        if shape.decodes:
            shadow.compared.together += rows_together(program.keys)
        step = program.prepared(shape)
        if program.place.after is None:
            return layers.compute(step)
        layers.pass_on(step)
        return None

    return ShadowedProgram(program, watched, shadow)


def watched_torch(program: Program, eager: Eager, shadow: Shadow) -> ShadowedProgram:
    """`eager`: the program inside `program`. Its layers have a `shadowed` backend."""
    if eager.sharing is not None:
        eager.sharing.share_all()
    all_share = eager.teams is None and eager.place.context.size == 1  # on a device only steps with shared-prefix groups do

    def watched(shape: Shape, whole: bool) -> tuple[Tensor, Tensor] | None:
        if shape.decodes and (all_share or shape.in_teams):
            shadow.compared.together += rows_together(eager.shared)
        shadow.watches = True
        found = eager.compute(shape, whole) if eager.place.after is None else eager.run(shape, whole)
        shadow.watches = False
        if not isinstance(found, tuple):
            return None
        states, hidden, logits = found
        return (states if whole else hidden).clone(), logits.clone()  # the next step overwrites them

    return ShadowedProgram(program, watched, shadow)


def happened(event: Event, block: int, key: BlockKey | None, runner: ModelRunner, shadow: Shadow | None) -> None:
    """Handles a block event. A block that is taken is filled with NaN, so that its old contents cannot be used."""
    if shadow is not None:
        shadow.on_event(event, block, key)
    if event == "take" and (shadow is not None or isinstance(runner.store, PagedStore)):
        poison(runner.store.caches, block)


def _held(tables: list[list[int]]) -> list[int]:
    return [block for table in tables for block in table if block != NULL_BLOCK]
