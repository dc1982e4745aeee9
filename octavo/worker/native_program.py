"""The native program: one call a step. All layers, the vocabulary of the sampled rows and their argmax run inside it.

The library reads descriptors of raw pointers: that of the model is made once, when the weights are loaded; that of a step points into
the memory of steps. The interpreter's lock is released for the whole call.
"""

import ctypes
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from octavo.attention.spec import AttentionSpec, kv_buffers
from octavo.kernels.cpu.library import BF16, F16, F32, PANEL, Q8, Layer, Matrix, Model, NativeLibrary, Step, address
from octavo.kernels.cpu.packing import PackedMatrix
from octavo.kernels.cpu.sampling import NativeSampling
from octavo.kernels.ops import finish, prepare
from octavo.kernels.step_tensors import StepMemory, StepTensors
from octavo.layers.attention import build_rope
from octavo.layers.shared_comm import SharedMemoryComm
from octavo.loading.loader import NativeWeights
from octavo.policy.block_pool import NULL_BLOCK
from octavo.policy.description import ModelDescription
from octavo.worker.kv_store import Caches
from octavo.worker.program import ALONE, Forward, Place, Shape
from octavo.worker.rank_sampling import RankSampling
from octavo.worker.request_table import RequestTable, Words

KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.int8: Q8}


class NativeProgram:
    def __init__(
        self, model: ModelDescription, weights: NativeWeights, library: NativeLibrary, caches: Caches, table: RequestTable,
        block_size: int, max_len: int, max_tokens: int, place: Place = ALONE,
    ) -> None:  # fmt: skip
        """`model`: one that `native_refusal` does not refuse, so that its layers are alike but for their windows.

        `place`: of the rank, if the weights are the part of one.
        """
        self.vocab_size = model.vocab_size
        self.place = place
        self._comm = place.comm if isinstance(place.comm, SharedMemoryComm) else None
        self._ranks = None if self._comm is None else RankSampling(self._comm, self.vocab_size)
        self._vocab_start = 0 if self._ranks is None else self._ranks.tokens.start
        self.library = library
        self.table = table
        self.memory = StepMemory(table.layout, len(table.words), max(max_tokens, len(table.words)), table.words.device)
        self._sampling = NativeSampling(library)
        self._block_size = block_size
        self._result = torch.zeros(len(table.words), dtype=torch.int32)
        self._last: tuple[StepTensors, Step] | None = None
        self._kept: list[Any] = []  # what the descriptors point to
        self._inner = -(-model.layers[0].mlp.inner // PANEL) * PANEL  # the width of the MLP in whole panels
        self.layers = (Layer * len(model.layers))(*(self._layer(model, weights, index) for index in range(len(model.layers))))
        self.embed = None if model.lookup is None else weights.rows(f"{model.lookup.module}.weight")  # None: its rows are the head's
        head = next((matrix.module for matrix in model.matrices if matrix.name == "head"), None)
        self.head = None if head is None else weights.matrix(head)  # None: another stage has it
        self._kept.append(self.embed)
        self.model = self._describe(model, weights, block_size, max_len)
        self._kept.append(caches)
        self.model = self.over(caches)

    @property
    def nbytes(self) -> int:
        """What the weights take."""
        arrays = [array for kept in self._kept for array in (kept.arrays if isinstance(kept, PackedMatrix) else [kept])]
        return sum(array.nbytes for array in arrays if isinstance(array, (np.ndarray, Tensor)))

    def shape_of(self, entries: int, tokens: int) -> Shape:
        return Shape(entries, tokens)

    def run(self, shape: Shape, whole: bool = False) -> Forward | None:
        step = self.prepared(shape)
        if self.place.after is not None:
            self.place.after.send(self._stream(step))
            return None
        hidden, logits, best = self.compute(step)
        asked = step.temperature, step.noise, step.draw_positions
        ids = self._sampling.sample(logits, best, *asked) if self._ranks is None else self._ranks.sample(logits, *asked)
        result = self._result[: shape.entries]
        finish(self.table.words, self.table.layout, step, ids, hidden, hidden, result)
        return Forward(step, hidden, logits, result)

    def prepared(self, shape: Shape) -> StepTensors:
        """Returns the tensors of a step, filled out of the rows."""
        step = self.memory.step(shape.entries, shape.tokens)
        prepare(self.table.words, self.table.layout, self._block_size, step)
        return step

    def compute(self, step: StepTensors) -> tuple[Tensor, Tensor, Tensor]:
        """Returns hidden states of all tokens, and of the last of each entry the logits and the id of the largest.

        A rank has logits of those ids alone whose rows it has.
        """
        entries = len(step.row)
        hidden = torch.empty(len(step.token_ids), self.model.hidden)
        logits, best = torch.empty(entries, self.model.vocab_rows), torch.empty(entries, dtype=torch.int64)
        described = self._described(step)
        described.hidden, described.logits, described.best = at(hidden), at(logits), at(best)
        self._call(step, described)
        return hidden, logits, best

    def _stream(self, step: StepTensors) -> Tensor:
        """Returns the residual stream after the layers of this stage, for the next one."""
        passed, described = torch.empty(len(step.token_ids), self.model.hidden), self._described(step)
        described.passed = at(passed)
        self._call(step, described)
        return passed

    def _call(self, step: StepTensors, described: Step) -> None:
        shared, received = self.shared_tokens(step), self.received(len(step.token_ids))
        described.shared = address(shared)
        described.received = None if received is None else at(received)
        code = self.library.call.octavo_step(ctypes.byref(self.model), ctypes.byref(described))
        if self._comm is not None:
            self._comm.check(code)

    def received(self, tokens: int) -> Tensor | None:
        """Returns the stream of the stage before, or None if this is the first."""
        before = self.place.before
        return None if before is None else before.receive(torch.empty(tokens, self.model.hidden))

    def _described(self, step: StepTensors) -> Step:
        """Returns the descriptor of a step. It is kept: most steps have the tensors of the one before."""
        if self._last is None or self._last[0] is not step:
            self._last = step, step_struct(step)
        return self._last[1]

    def shared_tokens(self, step: StepTensors) -> Words:
        """Returns for each entry how many of its first tokens lie in the same blocks as those of the entry before it."""
        shared = np.zeros(len(step.row), np.int32)
        if len(shared) > 1:
            blocks = -(-int(step.context_len.numpy().max()) // self._block_size)
            tables = step.tables[0].numpy()[:, :blocks]
            same = (tables[1:] == tables[:-1]) & (tables[1:] != NULL_BLOCK)
            shared[1:] = np.logical_and.accumulate(same, axis=1).sum(axis=1) * self._block_size
        return shared

    def logits(self, hidden: Tensor) -> Tensor:
        return self.logits_in(len(hidden), hidden)

    def logits_in(self, tokens: int, hidden: Tensor) -> Tensor:
        """As a step of so many tokens makes them."""
        hidden, logits = hidden.contiguous(), torch.empty(len(hidden), self.model.vocab_rows)
        self.library.call.octavo_matmul(ctypes.byref(self.model.head), at(hidden), at(logits), len(hidden), tokens)
        return logits

    def over(self, caches: Caches) -> Model:
        """The model, with these caches. Whoever holds it holds the program and the caches too."""
        layers = type(self.layers).from_buffer_copy(self.layers)
        for layer, cache in zip(layers, caches, strict=True):
            k, v, k_scale, v_scale = kv_buffers(cache)
            layer.k_cache, layer.v_cache = at(k), at(v)
            if k_scale is not None and v_scale is not None:
                layer.k_scale, layer.v_scale = at(k_scale), at(v_scale)
        model = Model.from_buffer_copy(self.model)
        model.layers, model.cache_kind = layers, KINDS[kv_buffers(caches[0])[0].dtype]
        return model

    def _layer(self, model: ModelDescription, weights: NativeWeights, index: int) -> Layer:
        """The fields of a `Layer` have the names of the description."""
        layer = Layer(window=model.layers[index].mixer.window or 0)
        for vector in model.vectors:
            if vector.layer == index:
                setattr(layer, vector.name, self._vector(weights, f"{vector.module}.weight"))
        for matrix in model.matrices:
            if matrix.layer == index:
                columns = self._inner if matrix.name == "down" else 0  # it reads what gate and up wrote, in whole panels
                setattr(layer, matrix.name, self._matrix(weights.matrix(matrix.module, matrix.gated, columns)))
        return layer

    def _describe(self, model: ModelDescription, weights: NativeWeights, block_size: int, max_len: int) -> Model:
        spec = cast(AttentionSpec, model.layers[0].mixer)
        assert spec.rope is not None
        rope = build_rope(spec.rope, spec.head_dim, max_len)
        self._kept.append(rope)
        last_norm = next((vector.module for vector in model.vectors if vector.layer is None), None)  # None: another stage has it
        return Model(
            num_layers=len(model.layers), hidden=model.hidden_size, heads=spec.num_heads, kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim, intermediate=self._inner, vocab=model.vocab_size, block_size=block_size,
            embed_kind=Q8 if self.embed is None else KINDS[self.embed.dtype], embed=None if self.embed is None else at(self.embed),
            eps=model.norm.eps, attention_scale=spec.scale, layers=self.layers,
            norm=None if last_norm is None else self._vector(weights, f"{last_norm}.weight"), cos=at(rope.cos), sin=at(rope.sin),
            head=Matrix() if self.head is None else self._matrix(self.head), vocab_start=self._vocab_start,
            vocab_rows=self._vocab_rows(),
            group=None if self._comm is None else ctypes.pointer(self._comm.group),
        )  # fmt: skip

    def _vocab_rows(self) -> int:
        if self.head is not None:
            return int(self.head.struct.n)
        return 0 if self.embed is None else len(self.embed)

    def _vector(self, weights: NativeWeights, name: str) -> int | None:
        values = weights.vector(name)
        self._kept.append(values)
        return address(values)

    def _matrix(self, packed: PackedMatrix) -> ctypes.Structure:
        self._kept.append(packed)
        return packed.struct


def step_struct(step: StepTensors) -> Step:
    """Describes a step, but for what its entries share and for its results. The struct points to the arrays, and keeps none of them."""
    return Step(
        num_tokens=len(step.token_ids), num_rows=len(step.row), table_width=step.tables.shape[2], num_samples=len(step.sample_index),
        token_ids=at(step.token_ids), positions=at(step.positions), slots=at(step.slots[0]), query_start=at(step.query_start),
        context_len=at(step.context_len), tables=at(step.tables[0]), sample_index=at(step.sample_index),
    )  # fmt: skip


def at(tensor: Tensor) -> int:
    assert tensor.is_contiguous()
    return tensor.data_ptr()
