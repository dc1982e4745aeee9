"""A whole step in one call gives, bit for bit, what its parts give one after the other; the parts are proven in the other files."""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.kernels.cpu.attention_case import AttentionCase, Cache, from_bf16, to_bf16
from octavo.kernels.cpu.levels import gate_up, matmul
from octavo.kernels.cpu.library import BF16, F32, Q4, Q8, Layer, Model, NativeLibrary, Step, address
from octavo.kernels.cpu.packing import Floats, pack_float
from tests.support.native import levels_here, running
from tests.support.native_weights import Weights, make_weights

HIDDEN, INNER, VOCAB, LAYERS = 72, 80, 101, 3
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 32
BATCHES = (((0, 1),), ((0, 5), (40, 1), (0, 37)), ((600, 1), (700, 1)), ((9, 1),))  # small and large in turn: buffers grow and stay
LEVELS = levels_here()


@dataclass
class Decoder:
    """A small random model; `embed_kind` Q8 reads embeddings out of the head's panels."""

    library: NativeLibrary
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
    """One step of a decoder: its arrays and structs, and both ways to compute it."""

    def __init__(self, decoder: Decoder, case: AttentionCase, sampled: bool) -> None:
        self.decoder, self.case, tokens = decoder, case, len(case.positions)
        random = np.random.default_rng(tokens)
        self.ids = random.integers(0, decoder.vocab, tokens)
        self.samples = case.query_start[1:] - 1 if sampled else np.zeros(0, np.int64)
        self.caches = [case.past() for _ in decoder.layers]
        self.cos, self.sin = np.cos(case.angles), np.sin(case.angles)
        self.hidden = np.full((tokens, HIDDEN), np.nan, np.float32)
        self.logits = np.full((len(self.samples), decoder.vocab), np.nan, np.float32)
        self.best = np.full(len(self.samples), -1)
        self.embed: NDArray[Any] = decoder.table if decoder.embed_kind == F32 else to_bf16(decoder.table)
        self.model, self.struct = self._model(), self._step()

    def _model(self) -> Model:
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

    def _step(self) -> Step:
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
            self.logits[:] = matmul(library, decoder.head.packed, self.hidden[self.samples])
            self.best[:] = self.logits.argmax(1)  # numpy too takes the first of equals

    def _embedded(self) -> Floats:
        decoder = self.decoder
        if decoder.embed_kind == F32:
            return decoder.table[self.ids]
        if decoder.embed_kind == BF16:
            return from_bf16(self.embed)[self.ids]
        exact = decoder.head.exact
        return (from_bf16(to_bf16(exact)) if decoder.kind == BF16 else exact)[self.ids]

    def results(self) -> list[NDArray[Any]]:
        stored = [part for caches in self.caches for cache in caches for part in (cache.values, cache.scale) if part is not None]
        return [self.hidden, self.logits, self.best, *stored]


def same(a: list[NDArray[Any]], b: list[NDArray[Any]]) -> bool:
    return all(np.array_equal(x, y, equal_nan=x.dtype == np.float32) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind, group", [(F32, 0), (BF16, 0), (Q8, 32), (Q8, 128), (Q4, 16), (Q4, 64)], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_a_step_is_its_parts_one_after_the_other(level: str, kind: int, group: int) -> None:
    for threads, embed_kind, cache_kind in ((1, F32, F32), (2, BF16, Q8), (3, Q8, BF16)):
        with running(level, threads) as library:
            decoder = Decoder(library, kind, group, embed_kind, cache_kind)
            for rows in BATCHES:
                once, parts = decoder.step(rows), decoder.step(rows)
                once.at_once()
                parts.by_parts()
                assert np.isfinite(once.hidden).all() and np.isfinite(once.logits).all()
                assert same(once.results(), parts.results()), (threads, rows)


@pytest.mark.parametrize("level", LEVELS)
def test_threads_that_meet_often_leave_the_same_bits_every_time(level: str) -> None:
    for threads in (2, 3):
        with running(level, threads) as library:
            decoder = Decoder(library, Q4, 32, F32, Q8)
            first = decoder.step(BATCHES[1])
            first.at_once()
            for _ in range(10):
                again = decoder.step(BATCHES[1])
                again.at_once()
                assert same(again.results(), first.results())


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_without_samples_fills_caches_alone(level: str) -> None:
    with running(level, 2) as library:
        decoder = Decoder(library, BF16, 0, F32, BF16)
        with_samples, without = decoder.step(BATCHES[1]), decoder.step(BATCHES[1], sampled=False)
        with_samples.at_once()
        without.at_once()
        assert same([without.hidden, *without.results()[3:]], [with_samples.hidden, *with_samples.results()[3:]])


@pytest.mark.parametrize("level", LEVELS)
def test_the_best_of_equals_is_the_lowest_id_and_nothing_leads_outside(level: str) -> None:
    with running(level) as library:
        for vocab in (1, 2, 15, 16, 17, 33, 64, 1000):
            decoder = Decoder(library, F32, 0, F32, F32, vocab=vocab)
            plain = decoder.step(BATCHES[0])
            plain.at_once()
            best = int(plain.best[0])
            for other in {0, 1, vocab // 2, vocab - 2, vocab - 1} & set(range(vocab)):
                rows = decoder.head.exact.copy()
                rows[other] = rows[best]
                decoder.head.packed = pack_float(library, rows)
                tied = decoder.step(BATCHES[0])
                tied.at_once()
                assert tied.logits[0, other] == tied.logits[0, best]
                assert tied.best[0] == min(best, other)
            decoder.norm[:] = np.nan
            spoiled = decoder.step(BATCHES[0])
            spoiled.at_once()
            assert np.isnan(spoiled.logits).all() and 0 <= spoiled.best[0] < vocab


def test_a_cache_of_codes_is_read_as_it_was_written() -> None:
    """The harness itself: codes and scales give back numbers within half a step."""
    numbers = np.random.default_rng(0).standard_normal((2, 4, 1, 32), np.float32)
    cache = Cache.holding(numbers, Q8)
    assert cache.scale is not None
    assert (np.abs(cache.numbers() - numbers) <= cache.scale[..., None] * 0.5001).all()
