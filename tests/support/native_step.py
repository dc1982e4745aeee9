"""A small random decoder, and one step of it: in one call of the native library, by its parts, or by torch and numpy alone."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.kernels.cpu.attention_case import AttentionCase, from_bf16, to_bf16
from octavo.kernels.cpu.levels import gate_up, matmul
from octavo.kernels.cpu.library import BF16, F16, Q8, Layer, Model, NativeLibrary, Step, address
from octavo.kernels.cpu.packing import Floats
from octavo.kernels.reference.layer import rms_norm
from tests.support.native_attention import attended_twin, stored_twin, written_twin
from tests.support.native_weights import Weights, gated, make_weights

Multiply = Callable[[Weights, Floats], Floats]

HIDDEN, INNER, VOCAB, LAYERS = 72, 80, 101, 3
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 32
BATCHES = (((0, 1),), ((0, 5), (40, 1), (0, 37)), ((600, 1), (700, 1)), ((9, 1),))  # small and large in turn: buffers grow and stay


@dataclass
class Decoder:
    """A small random model; `embed_kind` Q8 reads embeddings out of the head's panels."""

    library: NativeLibrary | None  # None: only twins compute it
    kind: int
    group: int
    embed_kind: int
    cache_kind: int
    vocab: int = VOCAB
    layers: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(11)
        norms = {"attention_norm": HIDDEN, "mlp_norm": HIDDEN, "q_norm": HEAD_DIM, "k_norm": HEAD_DIM}
        all_heads, q_heads = (HEADS + 2 * KV_HEADS) * HEAD_DIM, HEADS * HEAD_DIM
        products = {"qkv": (all_heads, HIDDEN), "output": (HIDDEN, q_heads), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
        for _ in range(LAYERS):
            layer: dict[str, Any] = {name: self._normal(size) for name, size in norms.items()}
            self.layers.append(layer | {name: self._weights(*shape) for name, shape in products.items()})
        self.head = self._weights(self.vocab, HIDDEN, plain=True)
        self.norm, self.table = self._normal(HIDDEN), self._normal(self.vocab, HIDDEN)

    def _normal(self, *shape: int) -> Floats:
        return self.random.standard_normal(shape, np.float32)

    def _weights(self, n: int, k: int, plain: bool = False) -> Weights:
        return make_weights(self.library, self.random, n, k, self.kind, self.group, plain)

    def step(self, rows: tuple[tuple[int, int], ...], sampled: bool = True) -> "Run":
        case = AttentionCase(rows, HEADS, KV_HEADS, HEAD_DIM, cache_kind=self.cache_kind, seed=len(rows))
        return Run(self, case, sampled)


class Run:
    """One step of a decoder: its arrays and structs, and the ways to compute it."""

    def __init__(self, decoder: Decoder, case: AttentionCase, sampled: bool) -> None:
        self.decoder, self.case, tokens = decoder, case, len(case.positions)
        random = np.random.default_rng(tokens)
        self.ids = random.integers(0, decoder.vocab, tokens)
        self.samples = case.query_start[1:].astype(np.int64) - 1 if sampled else np.zeros(0, np.int64)
        self.caches = [case.past() for _ in decoder.layers]
        self.cos, self.sin = np.cos(case.angles), np.sin(case.angles)
        self.hidden = np.full((tokens, HIDDEN), np.nan, np.float32)
        self.logits = np.full((len(self.samples), decoder.vocab), np.nan, np.float32)
        self.best = np.full(len(self.samples), -1)
        kept = {BF16: to_bf16, F16: lambda table: table.astype(np.float16)}.get(decoder.embed_kind)
        self.embed: NDArray[Any] = kept(decoder.table) if kept else decoder.table

    @cached_property
    def model(self) -> Model:
        decoder, case = self.decoder, self.case
        layers = (Layer * LAYERS)()
        for layer, parts, (k, v) in zip(layers, decoder.layers, self.caches):
            for name, part in parts.items():
                setattr(layer, name, part.packed.struct if isinstance(part, Weights) else address(part))
            layer.k_cache, layer.v_cache = address(k.values), address(v.values)
            layer.k_scale, layer.v_scale = address(k.scale), address(v.scale)
        return Model(
            num_layers=LAYERS, hidden=HIDDEN, heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim, intermediate=INNER,
            vocab=decoder.vocab, block_size=case.block_size, cache_kind=case.cache_kind, embed_kind=decoder.embed_kind, eps=1e-6,
            attention_scale=case.head_dim**-0.5, layers=layers, embed=address(self.embed), norm=address(decoder.norm),
            cos=address(self.cos), sin=address(self.sin), head=decoder.head.packed.struct,
        )  # fmt: skip

    @cached_property
    def struct(self) -> Step:
        case = self.case
        return Step(
            num_tokens=len(self.ids), num_rows=len(case.rows), table_width=case.tables.shape[1], num_samples=len(self.samples),
            token_ids=address(self.ids), positions=address(case.positions), slots=address(case.new_slots),
            query_start=address(case.query_start), context_len=address(case.context_len), tables=address(case.tables),
            sample_index=address(self.samples), hidden=address(self.hidden), logits=address(self.logits), best=address(self.best),
        )  # fmt: skip

    def at_once(self) -> None:
        self.decoder.library.call.octavo_step(ctypes.byref(self.model), ctypes.byref(self.struct))

    def by_parts(self) -> None:
        library, decoder, tokens = self.decoder.library, self.decoder, len(self.ids)
        stream, added, normed = self._embedded(), None, np.empty((tokens, HIDDEN), np.float32)

        def norm(weight: Floats, y: Floats) -> None:
            library.call.octavo_add_rms_norm(address(stream), address(added), address(weight), 1e-6, address(y), tokens, HIDDEN)

        for index, parts in enumerate(decoder.layers):
            norm(parts["attention_norm"], normed)
            qkv = matmul(library, parts["qkv"].packed, normed)
            attended = np.empty((tokens, self.case.heads * self.case.head_dim), np.float32)
            library.call.octavo_write(ctypes.byref(self.model), index, ctypes.byref(self.struct), address(qkv))
            library.call.octavo_attend(ctypes.byref(self.model), index, ctypes.byref(self.struct), address(qkv), address(attended))
            added = matmul(library, parts["output"].packed, attended)
            norm(parts["mlp_norm"], normed)
            added = matmul(library, parts["down"].packed, gate_up(library, parts["gate_up"].packed, normed))
        norm(decoder.norm, self.hidden)
        if len(self.samples):
            self.logits[:] = matmul(library, decoder.head.packed, self.hidden[self.samples], tokens)
            self.best[:] = self.logits.argmax(1)  # numpy too takes the first of equals

    def by_twins(self, multiply: Multiply) -> None:
        """The same without a library: torch and numpy. multiply(weights, x): the product, in the form that is tried."""
        decoder, case, stream = self.decoder, self.case, self._embedded()

        def norm(x: Floats, weight: Floats) -> Floats:
            return rms_norm(torch.from_numpy(x), torch.from_numpy(weight), 1e-6).numpy()

        for parts, caches in zip(decoder.layers, self.caches):
            projected = multiply(parts["qkv"], norm(stream, parts["attention_norm"])).reshape(len(stream), -1, case.head_dim)
            qkv = written_twin(case, projected, (parts["q_norm"], parts["k_norm"]))
            for cache, after in zip(caches, stored_twin(case, caches, qkv)):
                cache.values, cache.scale = after.values, after.scale
            stream = stream + multiply(parts["output"], attended_twin(case, qkv, *caches).reshape(len(stream), -1))
            stream = stream + multiply(parts["down"], gated(multiply(parts["gate_up"], norm(stream, parts["mlp_norm"]))))
        self.hidden[:] = norm(stream, decoder.norm)
        self.logits[:] = multiply(decoder.head, self.hidden[self.samples])
        self.best[:] = self.logits.argmax(1)

    def _embedded(self) -> Floats:
        decoder = self.decoder
        kind, exact = decoder.embed_kind, decoder.table
        if kind == Q8:
            kind, exact = decoder.kind, decoder.head.exact
        if kind == BF16:
            return from_bf16(to_bf16(exact))[self.ids]
        return (exact.astype(np.float16).astype(np.float32) if kind == F16 else exact)[self.ids]

    def results(self) -> list[NDArray[Any]]:
        stored = [part for caches in self.caches for cache in caches for part in (cache.values, cache.scale) if part is not None]
        return [self.hidden, self.logits, self.best, *stored]
