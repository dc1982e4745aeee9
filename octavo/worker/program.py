"""The program interface: how a model computes a step, from scheduled rows sent by the host to sampled ids stored in the table.

    load (plan -> entries) -> prepare (rows -> tensors) -> model -> logits -> ids, greedy or by temperature -> finish (ids -> rows, result)

    Eager     layer by layer, op by op: the readable one, on any device
    Graph     the same, padded to shapes that are captured as CUDA graphs (`worker/graph_program.py`)
    Native    one call of the native library per step (`worker/native_program.py`)
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from octavo.attention.backend import AttentionBackend
from octavo.attention.forward_batch import ForwardBatch
from octavo.attention.mixer import MixerSpec
from octavo.attention.spec import AttentionSpec
from octavo.comm.comm import NOBODY, Channel, Comm
from octavo.kernels.ops import finish, prepare, sample, team_sizes
from octavo.layout import INVARIANT_PIECE
from octavo.messages import StepPlan
from octavo.models.decoder import Decoder
from octavo.models.registry import describe
from octavo.models.stages import ONLY, Stage
from octavo.policy.cache_group import FULL, CacheGroup
from octavo.step.shared_keys import GPU_COST, NOTHING, TORCH_COST
from octavo.step.step_tensors import Shape, StepMemory, StepTensors, plan_sizes
from octavo.worker.kv_store import Caches
from octavo.worker.rank_sampling import RankSampling
from octavo.worker.request_table import RequestTable
from octavo.worker.step_sharing import Keys, StepSharing, StepTeams

BackendOf = Callable[[MixerSpec], type[AttentionBackend]]


@dataclass(frozen=True, slots=True)
class Place:
    """The context of a rank: how it communicates with the others."""

    comm: Comm  # with the ranks that share its layers
    context: Comm = NOBODY  # with those of them that share a context with it
    stage: Stage = ONLY
    before: Channel | None = None  # from the previous stage; None: it is the first
    after: Channel | None = None  # to the next stage; None: it is the last
    on_host: int = 0  # ranks that share this host's memory; 0: all

    def wait_at_most(self, seconds: float) -> None:
        """Sets how long a rank waits for others in a collective operation. A neighbouring stage has no time limit."""
        self.comm.wait_at_most(seconds)
        self.context.wait_at_most(seconds)


ALONE = Place(NOBODY)


@dataclass(frozen=True, slots=True)
class Forward:
    """The results of a step, on the device that computed it."""

    step: StepTensors
    hidden: Tensor  # after the final norm: [T, hidden] of all tokens if the step is whole; otherwise at least of the outputs
    logits: Tensor  # [S, vocab], of the outputs; a rank has only its part of the vocabulary
    result: Tensor  # [S] int32: the id of each output, 0 if none is sampled, -1 if a hidden state of its row is not finite


class Program(Protocol):
    vocab_size: int

    @property
    def nbytes(self) -> int:
        """The bytes of the weights."""

    def load(self, plan: StepPlan) -> Shape:
        """Sends the scheduled rows of a non-empty step. Returns the shape it is padded to."""

    def run(self, shape: Shape, whole: bool) -> Forward | None:
        """Computes the loaded step. `whole`: hidden states of all tokens are needed.

        Returns None if another stage has the remaining layers: the residual stream was sent to it.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab]"""


class Eager:
    def __init__(
        self, model: Decoder, backend_of: BackendOf, caches: Caches, table: RequestTable, block_size: int, max_tokens: int,
        groups: Sequence[CacheGroup] = (FULL,), place: Place = ALONE,
    ) -> None:  # fmt: skip
        """`backend_of`: the backend of a mixer. `groups`: as many as the table has block tables"""
        self.vocab_size = model.config.vocab_size
        self.model = model
        self.place = place
        self._sample = sample if model.comm.size == 1 else RankSampling(model.comm, self.vocab_size).sample
        self.table, self.has_states = table, table.layout.has_states
        self._caches = caches
        self._block_size = block_size
        self._spans = [links * block_size for links in table.layout.links]
        self._batches, self._batch_of_layer = _batches(model, backend_of, groups)
        most_rows, device = len(table.words), table.words.device
        self.teams = _teams(model, backend_of, len(self._spans), most_rows)
        cost = TORCH_COST if device.type == "cpu" else GPU_COST if self.teams is not None else None
        alone = [number for number, group in enumerate(groups) if group.frees] if self.teams is not None else []
        self.sharing = None if cost is None else StepSharing(table, self._spans, cost, alone)
        self._alone: Keys = [NOTHING] * len(self._spans)  # no rows share keys
        self.shared = self._alone
        self.memory = StepMemory(table.layout, most_rows, max(max_tokens, most_rows), device)
        self._result = torch.zeros(most_rows, dtype=torch.int32, device=device)
        # one buffer for the logits of all steps: separate buffers for each graph would need gigabytes
        self.logits_memory = torch.empty(most_rows, len(model.tokens), dtype=model.dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.model.nbytes

    def load(self, plan: StepPlan) -> Shape:
        return self.put(plan, Shape(*plan_sizes(plan), self.share(plan), len(plan.checkpoints)))

    def share(self, plan: StepPlan) -> bool:
        """Finds the keys that several scheduled rows share. Returns whether cascade (shared-prefix) groups read them."""
        if self.sharing is None:
            return False
        self.shared = self.sharing.of(plan) if plan.num_query.count(1) > 1 else self._alone
        return self.teams is not None and any(len(keys.nodes) for keys in self.shared)

    def put(self, plan: StepPlan, shape: Shape) -> Shape:
        """Sends the scheduled rows of a step to the device, padded to a shape."""
        self.memory.send(plan, shape)
        if self.teams is not None and shape.in_teams:
            self.teams.send(self.shared, shape.entries)
        return shape

    def run(self, shape: Shape, whole: bool = False, layers: Iterable[nn.Module] | None = None) -> Forward | None:
        """`layers`: all by default."""
        if self.place.after is not None:
            self.place.after.send(self.model.stream(self._prepared(shape), layers))
            return None
        states, hidden, logits = self.compute(shape, whole, layers)
        step, result = self._step(shape), self._result[: shape.outputs]
        ids = self._sample(logits, step.temperature, step.noise, step.draw_positions)
        finish(self.table.words, self.table.layout, step, ids, states, hidden, result)
        return Forward(step, states if whole else hidden, logits, result)

    def compute(self, shape: Shape, whole: bool = False, layers: Iterable[nn.Module] | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """States of all tokens, hidden states of the outputs, and logits, which are valid until the next step.

        If the step is whole, the first are hidden states, too; otherwise they are what `Decoder.sampled` returns. The rows do not change.
        """
        step, batch = self._step(shape), self._prepared(shape)
        if whole or shape.decodes:
            states: Tensor = self.model(batch, layers)
            hidden = states if shape.decodes else states.index_select(0, step.sample_index)
        else:
            hidden, states = self.model.sampled(batch, layers)
        return states, hidden, self.model.head(hidden, self.logits_memory[: shape.outputs])

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.head(hidden)
        return logits

    def _step(self, shape: Shape) -> StepTensors:
        return self.memory.step(shape.entries, shape.tokens, shape.outputs, shape.checkpoints)

    def _prepared(self, shape: Shape) -> ForwardBatch:
        """Returns the batch of a step, read from the rows, with the residual stream of the previous stage."""
        step = self._step(shape)
        prepare(self.table.words, self.table.layout, self._block_size, step)
        batch = self._batch(step, shape)
        if self.place.before is not None:
            size, model = (shape.tokens, self.model.config.hidden_size), self.model
            batch.stream = self.place.before.receive(torch.empty(size, dtype=model.dtype, device=model.device))
        return batch

    def _batch(self, step: StepTensors, shape: Shape) -> ForwardBatch:
        """Returns the first batch, which refers to the batches of all layers if there are others."""
        batches = [self._batch_of(group, backend, step, shape) for group, backend in self._batches]
        if len(batches) > 1:
            batches[0].by_layer = [batches[number] for number in self._batch_of_layer]
        return batches[0]

    def _batch_of(self, group: int, backend: type[AttentionBackend], step: StepTensors, shape: Shape) -> ForwardBatch:
        batch = ForwardBatch(
            token_ids=step.token_ids, cache_index=step.cache_index, positions=step.positions, rows=step.row,
            query_start=step.query_start, context_len=step.context_len[group], tables=step.tables[group], slots=step.slots[group],
            sample_index=step.sample_index, caches=self._caches, block_size=self._spans[group],
            max_query=1 if shape.decodes else shape.tokens, shared=self.shared[group], states=step.states,
            teams=self.teams.of_group[group] if self.teams is not None and shape.in_teams else None,
        )  # fmt: skip
        batch.attention = backend.prepare(batch)
        return batch


def _batches(
    model: Decoder, backend_of: BackendOf, groups: Sequence[CacheGroup]
) -> tuple[list[tuple[int, type[AttentionBackend]]], list[int]]:
    """Returns the batches of a step, one for each cache group and backend in it, and the number of the batch of each layer."""
    group_of = {layer: number for number, group in enumerate(groups) for layer in group.layers}
    layers = [(group_of.get(number, 0), backend_of(layer.mixer)) for number, layer in enumerate(describe(model.config).layers)]
    batches = list(dict.fromkeys(layers))
    return batches, [batches.index(layer) for layer in layers]


def _teams(model: Decoder, backend_of: BackendOf, groups: int, most_rows: int) -> StepTeams | None:
    """Returns the buffers for the shared-prefix groups of a step, or None if every row reads its keys alone."""
    kinds = [(layer.mixer, backend_of(layer.mixer).capabilities) for layer in describe(model.config).kinds]
    specs = [mixer for mixer, capabilities in kinds if capabilities.in_teams]
    piece = INVARIANT_PIECE if any(capabilities.deterministic for _, capabilities in kinds) else 0
    full = [spec for spec in specs if isinstance(spec, AttentionSpec) and spec.window is None and spec.latent is None]
    if model.device.type == "cpu" or not full:
        return None
    sizes = [team_sizes(spec.num_heads, spec.num_kv_heads, spec.head_dim, model.dtype, model.device) for spec in full]
    rows, wanted = min(rows for rows, _ in sizes), max(wanted for _, wanted in sizes)
    return StepTeams(groups, most_rows, rows, wanted, model.device, piece) if rows > 1 else None
