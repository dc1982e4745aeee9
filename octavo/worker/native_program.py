"""The native program: one call a step. All layers, the vocabulary of the sampled rows and their argmax run inside it.

The library reads descriptors of raw pointers: those of the model are made once, here, when the weights are loaded; those of
a step are filled in from the batch's own tensors. The interpreter's lock is released for the whole call.
"""

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.attention.backend import Rope
from octavo.attention.forward_batch import ForwardBatch
from octavo.kernels.cpu.library import BF16, F16, F32, PANEL, Q8, Layer, Model, NativeLibrary, Step, address
from octavo.kernels.cpu.packing import PackedMatrix
from octavo.loading.native_loader import NativeWeights
from octavo.model_config import ModelConfig
from octavo.worker.kv_store import Caches
from octavo.worker.program import Forward

KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.int8: Q8}


class NativeProgram:
    def __init__(self, config: ModelConfig, weights: NativeWeights, rope: Rope, library: NativeLibrary, block_size: int) -> None:
        self.vocab_size = config.vocab_size
        self.library = library
        self._kept: list[Any] = [rope]  # what the descriptors point to
        self.layers = (Layer * config.num_layers)(*(self._layer(config, weights, index) for index in range(config.num_layers)))
        self.embed = None if config.tie_embeddings else weights.rows("embed.weight")  # None: its rows are the head's
        self.head = weights.matrix("embed" if config.tie_embeddings else "head")
        self._kept.append(self.embed)
        self.model = self._describe(config, weights, rope, block_size)
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
            layer.k_cache, layer.v_cache = at(cache["k"]), at(cache["v"])
            if "k_scale" in cache:
                layer.k_scale, layer.v_scale = at(cache["k_scale"]), at(cache["v_scale"])
        model = Model.from_buffer_copy(self.model)
        model.layers, model.cache_kind = layers, KINDS[caches[0]["k"].dtype]
        return model

    def _layer(self, config: ModelConfig, weights: NativeWeights, index: int) -> Layer:
        name = f"layers.{index}"
        layer = Layer(
            attention_norm=self._vector(weights, f"{name}.attention_norm.weight"),
            mlp_norm=self._vector(weights, f"{name}.mlp_norm.weight"),
            qkv=self._matrix(weights.matrix(f"{name}.attention.qkv")),
            output=self._matrix(weights.matrix(f"{name}.attention.output")),
            gate_up=self._matrix(weights.matrix(f"{name}.mlp.gate_up", alternate=True)),
            down=self._matrix(weights.matrix(f"{name}.mlp.down", columns=_inner(config))),
            window=config.windows[index] or 0,
        )
        if config.qk_norm:
            layer.q_norm = self._vector(weights, f"{name}.attention.q_norm.weight")
            layer.k_norm = self._vector(weights, f"{name}.attention.k_norm.weight")
        return layer

    def _describe(self, config: ModelConfig, weights: NativeWeights, rope: Rope, block_size: int) -> Model:
        return Model(
            num_layers=config.num_layers, hidden=config.hidden_size, heads=config.num_heads, kv_heads=config.num_kv_heads,
            head_dim=config.head_dim, intermediate=_inner(config), vocab=config.vocab_size, block_size=block_size,
            embed_kind=Q8 if self.embed is None else KINDS[self.embed.dtype], embed=None if self.embed is None else at(self.embed),
            eps=config.norm_eps, attention_scale=config.head_dim**-0.5, layers=self.layers,
            norm=self._vector(weights, "norm.weight"), cos=at(rope.cos), sin=at(rope.sin), head=self._matrix(self.head),
        )  # fmt: skip

    def _vector(self, weights: NativeWeights, name: str) -> int | None:
        values = weights.vector(name)
        self._kept.append(values)
        return address(values)

    def _matrix(self, packed: PackedMatrix) -> ctypes.Structure:
        self._kept.append(packed)
        return packed.struct


def _inner(config: ModelConfig) -> int:
    """The width of the MLP in whole panels."""
    return -(-config.intermediate_size // PANEL) * PANEL


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
