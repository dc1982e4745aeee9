"""`DeviceProgram`: a whole step on the device, from entries to sampled ids, without a word from the host in between.

    prepare (rows -> tensors) -> model -> logits -> ids, greedy or by temperature -> finish (ids -> rows, result)

It is captured as CUDA graphs, one for each shape, and replayed: launching a step is then one call. A step is padded to the next
shape; what is padding computes on the null block and ends nowhere. Steps larger than any shape run kernel by kernel, which
costs them nothing: the device computes for longer than the host takes to launch them (`policy/gpu_size.py` says from where on).

    decode   1 2 4 8, then by 8 to 256, by 16 to the row limit: as many tokens as entries
    mixed    by 256 to 2048 tokens, then 4096 8192, as far as that holds; as many entries as there are rows, in small ones half as many
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo.attention.backend import AttentionBackend
from octavo.attention.forward_batch import ForwardBatch
from octavo.kernels.ops import finish, prepare, sample
from octavo.kernels.step_tensors import StepMemory, StepTensors
from octavo.layers.linear import Linear
from octavo.models.decoder import Decoder
from octavo.models.registry import describe
from octavo.quant.base import Unquantized
from octavo.worker.device_rows import DeviceRows
from octavo.worker.kv_store import Caches

MIXED_TOKENS = (*range(256, 2048, 256), 2048, 4096, 8192)
SMALL = 512  # tokens: a lone prompt should not wait for logits of rows that are not there


@dataclass(frozen=True, slots=True)
class Shape:
    entries: int
    tokens: int

    @property
    def decodes(self) -> bool:
        """Every entry has one token."""
        return self.entries == self.tokens


@dataclass(frozen=True, slots=True)
class DeviceForward:
    """What a step left on the device."""

    step: StepTensors
    hidden: Tensor  # [P, hidden], after the final norm, of the last token of each entry; [T, hidden], of all, if the step is whole
    logits: Tensor  # [P, vocab], of the last token of each entry
    result: Tensor  # [P] int32: the id, 0 where none was sampled, -1 where a hidden state is not finite


class DeviceProgram:
    def __init__(
        self, model: Decoder, backend: type[AttentionBackend], caches: Caches, rows: DeviceRows, block_size: int, max_tokens: int
    ) -> None:
        self.vocab_size = model.config.vocab_size
        self.rows = rows
        self._model = model
        self._backend = backend
        self._caches = caches
        self._block_size = block_size
        most_rows, device = len(rows.words), rows.words.device
        self.memory = StepMemory(rows.layout, most_rows, max(max_tokens, most_rows), device)
        self._result = torch.zeros(most_rows, dtype=torch.int32, device=device)
        # one place for the logits of all graphs: what each kept for itself would be gigabytes
        self._logits = torch.empty(most_rows, self.vocab_size, dtype=model.dtype, device=device)

    @property
    def kinds(self) -> list[nn.Module]:
        """The first layer of each kind: between them they call all that any layer calls."""
        return [self._model.layers[index] for index in describe(self._model.config).kinds.values()]

    def run(self, shape: Shape, layers: Iterable[nn.Module] | None = None, whole: bool = False) -> DeviceForward:
        """A step over the entries that lie in the memory of steps. `layers`: all, if not said; `whole`: see `ForwardBatch`"""
        states, hidden, logits = self.compute(shape, layers, whole)
        step, result = self.memory.step(shape.entries, shape.tokens), self._result[: shape.entries]
        ids = sample(logits, step.temperature, step.noise, step.draw_positions)
        finish(self.rows.words, self.rows.layout, step, ids, states, hidden, result)
        return DeviceForward(step, states if whole else hidden, logits, result)

    def compute(self, shape: Shape, layers: Iterable[nn.Module] | None = None, whole: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """States of all tokens, hidden states of the last of each entry, and logits, which last until the next step.

        The first are hidden states, too, if the step is whole; else what `Decoder.sampled` gives. The rows stay as they are.
        """
        step = self.memory.step(shape.entries, shape.tokens)
        prepare(self.rows.words, self.rows.layout, self._block_size, step)
        batch = self._batch(step, shape)
        batch.attention = self._backend.prepare(batch)
        if whole or shape.decodes:
            states: Tensor = self._model(batch, layers)
            hidden = states if shape.decodes else states.index_select(0, step.sample_index)
        else:
            hidden, states = self._model.sampled(batch, layers)
        return states, hidden, self._model.head(hidden, self._logits[: shape.entries])

    def multiply(self, shape: Shape) -> None:
        """The products of a layer of each kind and of the vocabulary, of anything: what torch sets up for their shapes is set up."""
        for linear in [module for layer in self.kinds for module in layer.modules() if isinstance(module, Linear)]:
            if isinstance(linear.scheme, Unquantized):
                linear(self._logits.new_empty(shape.tokens, linear.in_features))
        self._model.head(self._logits.new_empty(shape.entries, self._model.config.hidden_size), self._logits[: shape.entries])

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._model.head(hidden)
        return logits

    def _batch(self, step: StepTensors, shape: Shape) -> ForwardBatch:
        return ForwardBatch(
            token_ids=step.token_ids, positions=step.positions[None], rows=step.row, query_start=step.query_start,
            context_len=step.context_len, tables=step.tables, slots=step.slots, sample_index=step.sample_index, sample_row=step.row,
            caches=self._caches, block_size=self._block_size, max_query=1 if shape.decodes else shape.tokens,
        )  # fmt: skip


def shapes(max_rows: int, max_tokens: int, captured: int) -> list[Shape]:
    """Those that are captured, small ones first."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_rows, 16)]
    decode = [Shape(size, size) for size in sizes if size < max_rows] + [Shape(max_rows, max_rows)]
    sizes = [tokens for tokens in MIXED_TOKENS if tokens <= min(max_tokens - 1, captured)] + [max_tokens] * (max_tokens <= captured)
    most = [tokens // 2 if tokens <= SMALL and tokens < max_tokens else tokens - 1 for tokens in sizes]
    return decode + [Shape(min(max_rows, entries), tokens) for entries, tokens in zip(most, sizes) if entries]


class Steps:
    """Runs steps by shape: as graphs where they are captured."""

    def __init__(self, program: DeviceProgram, max_rows: int, max_tokens: int, captured: int = MIXED_TOKENS[-1]) -> None:
        self.program = program
        self._most_tokens = max_tokens
        every = shapes(max_rows, max_tokens, captured)
        self._decode = [shape for shape in every if shape.decodes]
        self._mixed = [shape for shape in every if not shape.decodes]
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, DeviceForward]] = {}

    def shape_of(self, entries: int, tokens: int) -> Shape:
        """The shape a step is padded to; its own, where it is larger than any."""
        if entries == tokens:
            return self._decode[bisect_left(self._decode, entries, key=lambda shape: shape.entries)]
        fits = (shape for shape in self._mixed if shape.entries >= entries and shape.tokens >= tokens)
        return next(fits, Shape(entries, tokens))

    def run(self, shape: Shape, whole: bool = False) -> DeviceForward:
        """What is captured is no whole step, but where it decodes."""
        if shape not in self._graphs or (whole and not shape.decodes):
            return self.program.run(shape, whole=whole)
        graph, forward = self._graphs[shape]
        graph.replay()
        return forward

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Every shape once, over no sequence at all: what is compiled, loaded and set up once is done then, and captured after that.

        One layer of a kind is enough for that; the last step, the smallest, is one of all layers.
        """
        self.program.memory.entries.zero_()
        kinds, shapes = self.program.kinds, [Shape(1, self._most_tokens), *reversed(self._decode + self._mixed)]
        for shape in shapes:
            self.program.multiply(shape)  # kernels of others: ours may still be compiled elsewhere
        for shape in shapes:
            self.program.run(shape, kinds if shape.decodes else [*kinds, kinds[-1]])  # the last layer of a step differs from others
        self.program.run(self._decode[0])

    @torch.inference_mode()
    def capture(self) -> None:
        """Large shapes first: smaller ones live in what those leave in the pool they share."""
        pool = None
        for shape in reversed(self._decode + self._mixed):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                forward = self.program.run(shape)
            self._graphs[shape] = (graph, forward)
            pool = graph.pool()
