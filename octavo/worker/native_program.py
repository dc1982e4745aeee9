"""The native program: one call a step. All layers, the vocabulary of the sampled rows and their argmax run inside it.

The library reads descriptors of raw pointers: those of the model are made once, here, when the weights are loaded; those of
a step are filled in from the batch's own tensors. The interpreter's lock is released for the whole call.
"""

import ctypes
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from octavo.attention.forward_batch import ForwardBatch
from octavo.attention.spec import AttentionSpec, kv_buffers
from octavo.kernels.cpu.library import BF16, F16, F32, PANEL, Q8, Layer, Model, NativeLibrary, Step, address
from octavo.kernels.cpu.packing import PackedMatrix
from octavo.layers.rotary import build_rope
from octavo.loading.native_loader import NativeWeights
from octavo.policy.description import ModelDescription
from octavo.worker.kv_store import Caches
from octavo.worker.program import Forward

KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.int8: Q8}


class NativeProgram:
    def __init__(
        self, model: ModelDescription, weights: NativeWeights, library: NativeLibrary, block_size: int, max_len: int
    ) -> None:
        """`model`: one that `native_refusal` does not refuse, so that its layers are alike but for their windows."""
        self.vocab_size = model.vocab_size
        self.library = library
        self._kept: list[Any] = []  # what the descriptors point to
        self._inner = -(-model.layers[0].mlp.inner // PANEL) * PANEL  # the width of the MLP in whole panels
        self.layers = (Layer * len(model.layers))(*(self._layer(model, weights, index) for index in range(len(model.layers))))
        self.embed = None if model.lookup is None else weights.rows(f"{model.lookup.module}.weight")  # None: its rows are the head's
        self.head = weights.matrix(next(matrix.module for matrix in model.matrices if matrix.name == "head"))
        self._kept.append(self.embed)
        self.model = self._describe(model, weights, block_size, max_len)
        self._caches: object = None

    @property
    def nbytes(self) -> int:
        """What the weights take."""
        arrays = [array for kept in self._kept for array in (kept.arrays if isinstance(kept, PackedMatrix) else [kept])]
        return sum(array.nbytes for array in arrays if isinstance(array, (np.ndarray, Tensor)))

    def run(self, batch: ForwardBatch) -> Forward:
        if self._caches is not batch.caches:  # nearly always they are those of the step before
            self._caches, self.model = batch.caches, self.over(batch.caches)
        samples = len(batch.sample_index)
        hidden = torch.empty(len(batch.token_ids), self.model.hidden)
        logits, best = torch.empty(samples, self.vocab_size), torch.empty(samples, dtype=torch.int64)
        step = describe(batch)
        step.hidden, step.logits, step.best = at(hidden), at(logits), at(best)
        self.library.call.octavo_step(ctypes.byref(self.model), ctypes.byref(step))
        return Forward(hidden, logits, best)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.logits_in(len(hidden), hidden)

    def logits_in(self, tokens: int, hidden: Tensor) -> Tensor:
        """As a step of so many tokens makes them."""
        hidden, logits = hidden.contiguous(), torch.empty(len(hidden), self.vocab_size)
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
        last_norm = next(vector.module for vector in model.vectors if vector.layer is None)
        return Model(
            num_layers=len(model.layers), hidden=model.hidden_size, heads=spec.num_heads, kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim, intermediate=self._inner, vocab=model.vocab_size, block_size=block_size,
            embed_kind=Q8 if self.embed is None else KINDS[self.embed.dtype], embed=None if self.embed is None else at(self.embed),
            eps=model.norm.eps, attention_scale=spec.scale, layers=self.layers,
            norm=self._vector(weights, f"{last_norm}.weight"), cos=at(rope.cos), sin=at(rope.sin), head=self._matrix(self.head),
        )  # fmt: skip

    def _vector(self, weights: NativeWeights, name: str) -> int | None:
        values = weights.vector(name)
        self._kept.append(values)
        return address(values)

    def _matrix(self, packed: PackedMatrix) -> ctypes.Structure:
        self._kept.append(packed)
        return packed.struct


def describe(batch: ForwardBatch) -> Step:
    """The step of a batch, but for its results. It points to the batch's tensors, and keeps none of them."""
    return Step(
        num_tokens=len(batch.token_ids), num_rows=len(batch.rows), table_width=batch.tables.shape[1], num_samples=len(batch.sample_index),
        token_ids=at(batch.token_ids), positions=at(batch.positions[0]), slots=at(batch.slots), query_start=at(batch.query_start),
        context_len=at(batch.context_len), tables=at(batch.tables), shared=None if batch.shared is None else at(batch.shared),
        sample_index=at(batch.sample_index),
    )  # fmt: skip


def at(tensor: Tensor) -> int:
    assert tensor.is_contiguous()
    return tensor.data_ptr()
