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
from octavo.kernels.cpu.library import BF16, F32, PANEL, Q8, Layer, Model, NativeLibrary, Step, address
from octavo.kernels.cpu.packing import PackedMatrix
from octavo.loading.native_loader import NativeWeights
from octavo.model_config import ModelConfig
from octavo.worker.program import Forward

KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.int8: Q8}


class NativeProgram:
    def __init__(self, config: ModelConfig, weights: NativeWeights, rope: Rope, library: NativeLibrary, block_size: int) -> None:
        self.vocab_size = config.vocab_size
        self._hidden_size = config.hidden_size
        self._library = library
        self._kept: list[Any] = [rope]  # what the descriptors point to
        self._layers = (Layer * config.num_layers)(*(self._layer(config, weights, index) for index in range(config.num_layers)))
        self._model = self._describe(config, weights, rope, block_size)
        self._caches: object = None

    @property
    def nbytes(self) -> int:
        """What the weights take."""
        arrays = [array for kept in self._kept for array in (kept.arrays if isinstance(kept, PackedMatrix) else [kept])]
        return sum(array.nbytes for array in arrays if isinstance(array, (np.ndarray, Tensor)))

    def run(self, batch: ForwardBatch) -> Forward:
        self._point_to(batch)
        tokens, samples = len(batch.token_ids), len(batch.sample_index)
        hidden = torch.empty(tokens, self._hidden_size)
        logits, best = torch.empty(samples, self.vocab_size), torch.empty(samples, dtype=torch.int64)
        step = Step(
            num_tokens=tokens, num_rows=len(batch.rows), table_width=batch.tables.shape[1], num_samples=samples,
            token_ids=_at(batch.token_ids), positions=_at(batch.positions[0]), slots=_at(batch.slots),
            query_start=_at(batch.query_start), context_len=_at(batch.context_len), tables=_at(batch.tables),
            sample_index=_at(batch.sample_index), hidden=_at(hidden), logits=_at(logits), best=_at(best),
        )  # fmt: skip
        self._library.call.octavo_step(ctypes.byref(self._model), ctypes.byref(step))
        return Forward(hidden, logits, best)

    def logits(self, hidden: Tensor) -> Tensor:
        hidden, logits = hidden.contiguous(), torch.empty(len(hidden), self.vocab_size)
        self._library.call.octavo_matmul(ctypes.byref(self._model.head), _at(hidden), _at(logits), len(hidden))
        return logits

    def _point_to(self, batch: ForwardBatch) -> None:
        """The cache is nearly always the one of the step before."""
        if self._caches is batch.caches:
            return
        self._caches = batch.caches
        self._model.cache_kind = KINDS[batch.caches[0]["k"].dtype]
        for layer, cache in zip(self._layers, batch.caches, strict=True):
            layer.k_cache, layer.v_cache = _at(cache["k"]), _at(cache["v"])
            if "k_scale" in cache:
                layer.k_scale, layer.v_scale = _at(cache["k_scale"]), _at(cache["v_scale"])

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
        tied = config.tie_embeddings
        embed = None if tied else weights.rows("embed.weight")
        self._kept.append(embed)
        return Model(
            num_layers=config.num_layers, hidden=config.hidden_size, heads=config.num_heads, kv_heads=config.num_kv_heads,
            head_dim=config.head_dim, intermediate=_inner(config), vocab=config.vocab_size, block_size=block_size,
            embed_kind=Q8 if embed is None else KINDS[embed.dtype], embed=None if embed is None else _at(embed),
            eps=config.norm_eps, attention_scale=config.head_dim**-0.5, layers=self._layers,
            norm=self._vector(weights, "norm.weight"), cos=_at(rope.cos), sin=_at(rope.sin),
            head=self._matrix(weights.matrix("embed" if tied else "head")),
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


def _at(tensor: Tensor) -> int:
    assert tensor.is_contiguous()
    return tensor.data_ptr()
