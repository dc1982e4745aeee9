"""A small random decoder, and one step of it: in one call of the native library, by its parts, or by torch and numpy alone."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.cpu.attention_case import AttentionCase, from_bf16, to_bf16
from octavo.kernels.cpu.delta_net_case import DeltaNetCase, States, StepArrays
from octavo.kernels.cpu.levels import add_norm, gate_up, matmul, mix
from octavo.kernels.cpu.library import ACTIVATIONS, BF16, F16, Q8, Layer, Model, NativeLibrary, Norm, Step, address
from octavo.kernels.cpu.packing import Floats
from tests.support.native_attention import attended_twin, stored_twin, written_twin
from tests.support.native_delta_net import DeltaNetWeights, delta_net_twin, entries_of
from tests.support.native_mixture import Choice, MixtureWeights
from tests.support.native_weights import NormWeights, Weights, gated, make_weights

Multiply = Callable[[Weights, Floats, int], Floats]  # (weights, x, rows that decide how it is multiplied)

HIDDEN, INNER, VOCAB, LAYERS = 72, 80, 101, 3
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 32
BATCHES = (((0, 1),), ((0, 5), (40, 1), (0, 37)), ((600, 1), (700, 1)), ((9, 1),))  # small and large in turn: buffers grow and stay


@dataclass(frozen=True)
class Kind:
    """What the layers of a model are beyond plain ones."""

    norms: str = "before"
    norm: str = "rms"
    biases: bool = False  # of norms
    qk_norm: bool = True
    embedding_norm: bool = False
    parallel: bool = False
    alibi: bool = False
    inner: int = INNER
    residual_scale: float = 1.0
    activation: str = "swiglu"
    windows: tuple[int, ...] = (0,) * LAYERS
    rotary_dims: tuple[int, ...] = (HEAD_DIM,) * LAYERS
    soft_cap: float = 0.0
    sinks: bool = False
    whole_norm: bool = False
    output_gate: bool = False
    recurrent: tuple[bool, ...] = (False,) * LAYERS  # which layers have Gated DeltaNet instead of attention
    experts: Choice | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0


PLAIN = Kind()
GEMMA = Kind(
    "both", activation="geglu", windows=(20, 0, 20), soft_cap=2.0, embedding_scale=8.5, logit_cap=3.0, rotary_dims=(HEAD_DIM, 8, HEAD_DIM),
)  # fmt: skip
OLMO = Kind("after", whole_norm=True, residual_scale=0.22, logit_scale=0.125, rotary_dims=(HEAD_DIM, 0, 16))
OSS = Kind(activation="clamped", windows=(0, 20, 0), sinks=True, experts=Choice(6, 2, over_all=False))
QWEN = Kind(experts=Choice(7, 3, normed=False, shared_inner=32))
COHERE = Kind(norm="layer", qk_norm=False, parallel=True, residual_scale=0.5, logit_scale=0.25)
BLOOM = Kind(
    norm="layer", biases=True, qk_norm=False, embedding_norm=True, alibi=True, activation="gelu", inner=75, rotary_dims=(0,) * LAYERS,
)  # fmt: skip
QWEN_NEXT = Kind(output_gate=True, recurrent=(True, True, False), rotary_dims=(8,) * LAYERS, experts=Choice(7, 3, shared_inner=32))
QWEN_DENSE = Kind("both", output_gate=True, recurrent=(True, False, True), rotary_dims=(8,) * LAYERS, residual_scale=0.5)
KINDS = {
    "gemma": GEMMA, "olmo": OLMO, "oss": OSS, "qwen": QWEN, "cohere": COHERE, "bloom": BLOOM, "qwen_next": QWEN_NEXT, "qwen3.5": QWEN_DENSE,
}  # fmt: skip
# The second has so many gates that a piece of work begins in one product and ends in the other.
DELTA_NETS = DeltaNetCase(k_heads=2, v_heads=4, k_dim=16, v_dim=48), DeltaNetCase(k_heads=1, v_heads=48, k_dim=16, v_dim=16, conv_width=3)


@dataclass
class Decoder:
    """A small random model; `embed_kind` Q8 reads embeddings out of the head's panels."""

    library: NativeLibrary | None  # None: only twins compute it
    kind: int
    group: int
    embed_kind: int
    cache_kind: int
    vocab: int = VOCAB
    shape: Kind = PLAIN
    layers: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(11)
        before, after = ["attention_norm"] + ["mlp_norm"] * (not self.shape.parallel), ["attention_after_norm", "mlp_after_norm"]
        norms = dict.fromkeys({"before": before, "after": after, "both": before + after}[self.shape.norms], HIDDEN)
        whole = (HEADS, KV_HEADS) if self.shape.whole_norm else (1, 1)
        if self.shape.qk_norm:
            norms |= {"q_norm": whole[0] * HEAD_DIM, "k_norm": whole[1] * HEAD_DIM}
        all_heads, q_heads = (HEADS * (1 + self.shape.output_gate) + 2 * KV_HEADS) * HEAD_DIM, HEADS * HEAD_DIM
        products = {"qkv": (all_heads, HIDDEN), "output": (HIDDEN, q_heads)}
        if self.shape.experts is None:
            gates = 1 if self.shape.activation == "gelu" else 2
            products |= {"gate_up": (gates * self.shape.inner, HIDDEN), "down": (HIDDEN, self.shape.inner)}
        for index in range(LAYERS):
            layer: dict[str, Any] = {name: self._norm(size) for name, size in norms.items()}
            layer |= {name: self._weights(*shape) for name, shape in products.items()}
            if self.shape.recurrent[index]:
                layer = {name: part for name, part in layer.items() if name not in ("q_norm", "k_norm", "qkv")}
                case = replace(DELTA_NETS[index % 2], seed=index)
                layer["delta_net"] = DeltaNetWeights.make(self.library, self.random, case, HIDDEN, self.kind, self.group)
                layer["output"] = self._weights(HIDDEN, case.v_size)
            if self.shape.experts is not None:
                layer["mixture"] = MixtureWeights.make(self.library, self.random, self.shape.experts, HIDDEN, INNER, self.kind, self.group)
            self.layers.append(layer)
        self.head = self._weights(self.vocab, HIDDEN, plain=True)
        self.norm, self.table = self._norm(HIDDEN), self._normal(self.vocab, HIDDEN)
        self.embedding_norm = self._norm(HIDDEN) if self.shape.embedding_norm else None

    def _normal(self, *shape: int) -> Floats:
        return self.random.standard_normal(shape, np.float32)

    def _norm(self, size: int) -> NormWeights:
        return NormWeights(self._normal(size), self._normal(size) if self.shape.biases else None, self.shape.norm)

    def _weights(self, n: int, k: int, plain: bool = False) -> Weights:
        return make_weights(self.library, self.random, n, k, self.kind, self.group, plain)

    def step(self, rows: tuple[tuple[int, int], ...], sampled: bool = True) -> "Run":
        case = AttentionCase(rows, HEADS, KV_HEADS, HEAD_DIM, cache_kind=self.cache_kind, seed=len(rows))
        return Run(self, case, sampled)


class Run:
    """One step of a decoder: its arrays and structs, and the ways to compute it."""

    def __init__(self, decoder: Decoder, case: AttentionCase, sampled: bool) -> None:
        self.decoder, self.case, tokens = decoder, case, len(case.positions)
        shape = decoder.shape
        asked = {"soft_cap": shape.soft_cap, "sinks": shape.sinks, "whole_norm": shape.whole_norm, "alibi": shape.alibi}
        asked["output_gate"] = shape.output_gate
        self.cases = [replace(case, window=window, rotary_dim=dim, **asked) for window, dim in zip(shape.windows, shape.rotary_dims)]
        for each in (case, *self.cases):
            assert np.array_equal(each.tables, case.tables)  # drawn first, so that they are the same
        random = np.random.default_rng(tokens)
        self.ids = random.integers(0, decoder.vocab, tokens)
        self.samples = case.query_start[1:].astype(np.int64) - 1 if sampled else np.zeros(0, np.int64)
        self.caches = [case.past() for _ in decoder.layers]
        self.entries = entries_of(case.rows)
        self.states = [self._states(parts["delta_net"].case) if "delta_net" in parts else None for parts in decoder.layers]
        self.slots_of_states = StepArrays(self.entries)
        self.turns = [(np.cos(each.angles), np.sin(each.angles)) for each in self.cases]
        self.hidden = np.full((tokens, HIDDEN), np.nan, np.float32)
        self.logits = np.full((len(self.samples), decoder.vocab), np.nan, np.float32)
        self.best = np.full(len(self.samples), -1)
        kept = {BF16: to_bf16, F16: lambda table: table.astype(np.float16)}.get(decoder.embed_kind)
        self.embed: NDArray[Any] = kept(decoder.table) if kept else decoder.table

    def _states(self, case: DeltaNetCase) -> States:
        return case.states(3 * len(self.entries) + 1, *(entry.read for entry in self.entries if entry.read))

    @cached_property
    def model(self) -> Model:
        decoder, shape, layers = self.decoder, self.decoder.shape, (Layer * LAYERS)()
        for index, (parts, caches) in enumerate(zip(decoder.layers, self.caches)):
            if "delta_net" not in parts:  # else it has no heads
                layers[index] = self.cases[index].layer(*self.turns[index], *caches)
            layer = layers[index]
            layer.activation, layer.residual_scale, layer.parallel = ACTIVATIONS[shape.activation], shape.residual_scale, shape.parallel
            for name, part in parts.items():
                if isinstance(part, MixtureWeights):
                    layer.mixture = ctypes.pointer(part.struct)
                elif isinstance(part, DeltaNetWeights):
                    layer.delta_net = ctypes.pointer(part.struct(self.states[index]))
                else:
                    setattr(layer, name, part.packed.struct if isinstance(part, Weights) else part.struct)
        return Model(
            num_layers=LAYERS, hidden=HIDDEN, vocab=decoder.vocab, cache_kind=self.case.cache_kind, embed_kind=decoder.embed_kind,
            embedding_scale=shape.embedding_scale, logit_scale=shape.logit_scale, logit_cap=shape.logit_cap, layers=layers,
            embed=address(self.embed), embedding_norm=struct_of(decoder.embedding_norm), norm=decoder.norm.struct,
            head=decoder.head.packed.struct,
        )  # fmt: skip

    @cached_property
    def struct(self) -> Step:
        case = self.case
        return Step(
            num_tokens=len(self.ids), num_rows=len(case.rows), table_width=case.tables.shape[1], num_samples=len(self.samples),
            token_ids=address(self.ids), cache_index=address(case.cache_index), positions=address(case.positions),
            slots=address(case.new_slots), query_start=address(case.query_start), context_len=address(case.context_len),
            tables=address(case.tables), sample_index=address(self.samples), hidden=address(self.hidden), logits=address(self.logits),
            best=address(self.best), **self.slots_of_states.pointers,
        )  # fmt: skip

    def at_once(self) -> None:
        self.decoder.library.call.octavo_step(ctypes.byref(self.model), ctypes.byref(self.struct))

    def move(self, index: int, block_size: int) -> None:
        """Gives a layer the second block table: of blocks of another size, in another order. What its cache held goes along."""
        old, new = self.case, replace(self.case, block_size=block_size, seed=77)
        for cache in self.caches[index]:
            moved = np.full((int(new.tables.max() + 1) * block_size, *cache.values.shape[2:]), np.nan, np.float32)
            for row, (past, _) in enumerate(old.rows):
                rows, positions = np.full(past, row), np.arange(past)
                moved[new.slots(rows, positions)] = cache.values.reshape(-1, *moved.shape[1:])[old.slots(rows, positions)]
            cache.values = moved.reshape(-1, block_size, *moved.shape[1:])
        layer, step = self.model.layers[index], self.struct
        k, v = self.caches[index]
        layer.k_cache, layer.v_cache, layer.cache_group, layer.block_size = address(k.values), address(v.values), 1, block_size
        width = max(old.tables.shape[1], new.tables.shape[1])
        self.tables = np.stack([np.pad(one.tables, ((0, 0), (0, width - one.tables.shape[1]))) for one in (old, new)])
        self.slots = np.stack([old.new_slots, new.new_slots])
        step.tables, step.table_width, step.table_stride = address(self.tables), width, self.tables[0].size
        step.slots, step.slot_stride = address(self.slots), len(self.slots[0])
        self.lengths = np.stack([old.context_len, new.context_len])
        step.context_len, step.context_stride = address(self.lengths), len(self.lengths[0])

    def by_parts(self) -> None:
        library, decoder, tokens = self.decoder.library, self.decoder, len(self.ids)

        def norm(rows: Floats, more: Floats | None, by: NormWeights | None) -> Floats:
            return add_norm(library, struct_of(by), rows, more)

        def settled(rows: Floats, by: NormWeights | None) -> Floats:
            rows = norm(rows, None, by)
            return rows if decoder.shape.residual_scale == 1 else rows * np.float32(decoder.shape.residual_scale)

        stream, added = norm(self.embedded(), None, decoder.embedding_norm), None
        for index, parts in enumerate(decoder.layers):
            normed = norm(stream, added, parts.get("attention_norm"))
            model, struct = ctypes.byref(self.model), ctypes.byref(self.struct)
            attended = np.empty((tokens, self.case.heads * self.case.head_dim), np.float32)
            if "delta_net" in parts:
                net = parts["delta_net"]
                products = [matmul(library, part.packed, normed) for part in (net.qkvz, net.gates)]
                attended = np.empty((tokens, net.case.v_size), np.float32)
                library.call.octavo_delta_net(model, index, struct, *map(address, products), address(attended))
            else:
                qkv = matmul(library, parts["qkv"].packed, normed)
                library.call.octavo_write(model, index, struct, address(qkv))
                library.call.octavo_attend(model, index, struct, address(qkv), address(attended))
            beside = matmul(library, parts["output"].packed, attended)
            if not decoder.shape.parallel:
                normed = norm(stream, settled(beside, parts.get("attention_after_norm")), parts.get("mlp_norm"))
            if "mixture" in parts:
                added = mix(library, parts["mixture"].struct, normed, decoder.shape.activation)
            else:
                added = matmul(library, parts["down"].packed, gate_up(library, parts["gate_up"].packed, normed, decoder.shape.activation))
            added = settled(beside + added if decoder.shape.parallel else added, parts.get("mlp_after_norm"))
        self.hidden[:] = norm(stream, added, decoder.norm)
        if len(self.samples):
            self.logits[:] = matmul(library, decoder.head.packed, self.hidden[self.samples], tokens)
            library.call.octavo_cap_logits(ctypes.byref(self.model), address(self.logits), self.logits.size)
            self.best[:] = self.logits.argmax(1)  # numpy too takes the first of equals

    def by_twins(self, multiply: Multiply) -> None:
        """The same without a library: torch and numpy. multiply(weights, x, rows): the product, in the form that is tried."""
        decoder, shape, tokens = self.decoder, self.decoder.shape, len(self.ids)

        def norm(x: Floats, by: NormWeights | None) -> Floats:
            return x if by is None else by.twin(x)

        stream = norm(self.embedded(), decoder.embedding_norm)
        for parts, case, caches, states in zip(decoder.layers, self.cases, self.caches, self.states):
            normed = norm(stream, parts.get("attention_norm"))
            if states is not None:
                net = parts["delta_net"]
                products = [multiply(part, normed, tokens) for part in (net.qkvz, net.gates)]
                attended = delta_net_twin(net.case.after(*products), states, *self.entries)
            else:
                projected = multiply(parts["qkv"], normed, tokens).reshape(tokens, -1, case.head_dim)
                qkv = written_twin(case, projected, (parts["q_norm"].weight, parts["k_norm"].weight) if shape.qk_norm else None)
                for cache, after in zip(caches, stored_twin(case, caches, qkv)):
                    cache.values, cache.scale = after.values, after.scale
                attended = attended_twin(case, qkv, *caches).reshape(tokens, -1)
            mixed = multiply(parts["output"], attended, tokens)
            stream = stream + norm(mixed, parts.get("attention_after_norm")) * np.float32(shape.residual_scale)
            if not shape.parallel:
                normed = norm(stream, parts.get("mlp_norm"))
            if "mixture" in parts:
                made = parts["mixture"].twin(normed, shape.activation, multiply)
            else:
                made = multiply(parts["down"], gated(multiply(parts["gate_up"], normed, tokens), shape.activation), tokens)
            stream = stream + norm(made, parts.get("mlp_after_norm")) * np.float32(shape.residual_scale)
        self.hidden[:] = norm(stream, decoder.norm)
        logits = multiply(decoder.head, self.hidden[self.samples], tokens) * np.float32(shape.logit_scale)
        self.logits[:] = shape.logit_cap * np.tanh(logits / shape.logit_cap) if shape.logit_cap else logits
        self.best[:] = self.logits.argmax(1)

    def embedded(self) -> Floats:
        decoder = self.decoder
        kind, exact = decoder.embed_kind, decoder.table
        if kind == Q8:
            kind, exact = decoder.kind, decoder.head.exact
        if kind == BF16:
            exact = from_bf16(to_bf16(exact))
        elif kind == F16:
            exact = exact.astype(np.float16).astype(np.float32)
        return exact[self.ids] * np.float32(decoder.shape.embedding_scale)

    def results(self) -> list[NDArray[Any]]:
        stored = [part for caches in self.caches for cache in caches for part in (cache.values, cache.scale) if part is not None]
        states = [part for each in self.states if each is not None for part in (each.conv, each.recurrent)]
        return [self.hidden, self.logits, self.best, *stored, *states]


def struct_of(norm: NormWeights | None) -> Norm:
    return Norm() if norm is None else norm.struct
