"""A small attention problem that uses every feature of the native kernels, for the start-up checks and for tests.

    rows ((30, 4), (0, 9), (99, 1))     a chunk of 4 tokens after 30, a prompt of 9, one token after 99

Blocks are in random order. Slots that no row has written are NaN (in an 8-bit cache their scale is), so that reading a wrong
slot is detected.
"""

import ctypes
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.cpu.library import BF16, F16, F32, NORMS, Layer, Model, NativeLibrary, Norm, Step, address
from octavo.step.shared_keys import FREE, AllShared, ReadCost, SharedKeys, SharedReads

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Words = NDArray[np.int32]


def to_bf16(values: Floats) -> NDArray[np.uint16]:
    """Rounds to nearest, ties to even; for finite numbers and plain NaN."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(halves: NDArray[np.uint16]) -> Floats:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def norm_struct(weight: Floats | None, bias: Floats | None = None, kind: str = "rms", eps: float = 1e-6) -> Norm:
    """Points to the arrays, but does not keep them alive."""
    return Norm(weight=address(weight), bias=address(bias), kind=NORMS[kind], eps=eps)


@dataclass
class Cache:
    """Keys or values: [blocks, block_size, kv_heads, head_dim] and, if 8-bit, a scale for each token and head."""

    values: NDArray[Any]
    scale: Floats | None

    @staticmethod
    def holding(numbers: Floats, kind: int) -> "Cache":
        if kind == F32:
            return Cache(numbers.copy(), None)
        if kind == BF16:
            return Cache(to_bf16(numbers), None)
        if kind == F16:
            return Cache(np.clip(numbers, -65504, 65504).astype(np.float16), None)
        largest = np.abs(numbers).max(-1)
        codes = np.rint(numbers * (np.float32(127) / np.maximum(largest, np.float32(1e-30)))[..., None])
        return Cache(np.nan_to_num(codes).astype(np.int8), largest / np.float32(127))

    def numbers(self) -> Floats:
        if self.scale is not None:
            return self.values.astype(np.float32) * self.scale[..., None]
        return from_bf16(self.values) if self.values.dtype == np.uint16 else self.values.astype(np.float32)


@dataclass(frozen=True)
class AttentionCase:
    rows: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    cache_kind: int = BF16
    window: int = 0
    qk_norm: bool = False
    whole_norm: bool = False  # q and k are normed as a whole, not head by head
    rotary_dim: int | None = None  # None: all of a head
    soft_cap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    output_gate: bool = False
    seed: int = 0
    shared: tuple[int, ...] = ()  # for each row, the number of its first blocks that it shares with another row, all already written
    like: tuple[int, ...] = ()  # for each row, the earlier row that it shares these with; if empty: the previous row
    cost: ReadCost = FREE  # of shared reading
    position_offset: int = 3  # from the index of a token in the cache to its position

    @cached_property
    def random(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    @cached_property
    def context_len(self) -> Words:
        return np.array([past + new for past, new in self.rows], np.int32)

    @cached_property
    def query_start(self) -> Words:
        return np.cumsum([0] + [new for _, new in self.rows], dtype=np.int32)

    @cached_property
    def cache_index(self) -> Words:
        return np.concatenate([past + np.arange(new, dtype=np.int32) for past, new in self.rows])

    @cached_property
    def positions(self) -> Words:
        return self.cache_index + np.int32(self.position_offset)

    @cached_property
    def tables(self) -> Words:
        """[rows, blocks of the longest]; no row owns block 0, which pads the tables."""
        held = -(-self.context_len // self.block_size)
        blocks = 1 + self.random.permutation(int(held.sum()) + 3)
        tables = np.zeros((len(self.rows), int(held.max())), np.int32)
        for row, count in enumerate(held):
            tables[row, :count], blocks = blocks[:count], blocks[count:]
        for row, count in enumerate(self.shared):
            tables[row, :count] = tables[self.like[row] if self.like else row - 1, :count]
        return tables

    @cached_property
    def shared_keys(self) -> AllShared:
        single = np.flatnonzero(np.diff(self.query_start) == 1)
        reads = SharedReads(self.tables, self.block_size, self.cost)
        keys = reads.nodes(single.astype(np.int32), self.context_len[single], np.zeros(len(self.rows), np.int64))
        return AllShared.of([SharedKeys(keys.nodes, single[keys.rows].astype(np.int32))])

    @cached_property
    def token_rows(self) -> Integers:
        return np.repeat(np.arange(len(self.rows)), [new for _, new in self.rows])

    def slots(self, rows: Integers, index: Integers | Words) -> Integers:
        return self.tables[rows, index // self.block_size].astype(np.int64) * self.block_size + index % self.block_size

    @cached_property
    def new_slots(self) -> Integers:
        return self.slots(self.token_rows, self.cache_index)

    @cached_property
    def norms(self) -> tuple[Floats, Floats] | None:
        sizes = (self.heads, self.kv_heads) if self.whole_norm else (1, 1)
        return (self._normal(sizes[0] * self.head_dim), self._normal(sizes[1] * self.head_dim)) if self.qk_norm else None

    @cached_property
    def sink_scores(self) -> Floats | None:
        return self._normal(self.heads) * np.float32(2) if self.sinks else None

    @cached_property
    def slopes(self) -> Floats | None:
        """Of ALiBi: from one at which only near keys count to one at which distant ones do."""
        return np.exp2(-np.linspace(0, 8, self.heads, dtype=np.float32)) if self.alibi else None

    @property
    def rotated(self) -> int:
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @cached_property
    def angles(self) -> Floats:
        longest = self.context_len.max() + self.position_offset
        return np.outer(np.arange(longest), 100.0 ** -np.linspace(0, 1, self.rotated // 2)).astype(np.float32)

    @cached_property
    def projected(self) -> Floats:
        """q, k and v of the new tokens, before norms and rotation, and gates: [tokens, read_heads, head_dim]"""
        return self._normal(len(self.positions), self.read_heads, self.head_dim)

    @property
    def read_heads(self) -> int:
        return sum(self.parts)

    @property
    def parts(self) -> list[int]:
        """Heads of q, k, v, and gates."""
        return [self.heads, self.kv_heads, self.kv_heads, self.heads if self.output_gate else 0]

    def new_kv(self, qkv: Floats) -> tuple[Floats, Floats]:
        """k and v of rows like `projected`."""
        _, k, v, _ = np.split(qkv, list(accumulate(self.parts))[:3], axis=1)
        return k, v

    def past(self) -> tuple[Cache, Cache]:
        """Keys and values before the step."""
        caches = []
        for seed in (1, 2):
            blocks = int(self.tables.max()) + 1
            numbers = np.full((blocks * self.block_size, self.kv_heads, self.head_dim), np.nan, np.float32)
            for row, (past, _) in enumerate(self.rows):
                at = self.slots(np.full(past, row), np.arange(past))
                numbers[at] = np.random.default_rng((self.seed, seed, row)).standard_normal((past, *numbers.shape[1:]), np.float32)
            caches.append(Cache.holding(numbers.reshape(blocks, self.block_size, *numbers.shape[1:]), self.cache_kind))
        return caches[0], caches[1]

    def run(self, library: NativeLibrary, before: tuple[Cache, Cache] | None = None) -> tuple[Floats, Floats, Cache, Cache]:
        """Returns q, k and v normed and rotated; the attention; the caches afterwards. `before`: caches to use, which are modified"""
        k, v = before or self.past()
        qkv, out = self.projected.copy(), np.full((len(self.positions), self.heads, self.head_dim), np.nan, np.float32)
        cos, sin = np.cos(self.angles), np.sin(self.angles)
        layer = self.layer(cos, sin, k, v)
        model, step = Model(num_layers=1, cache_kind=self.cache_kind, layers=ctypes.pointer(layer)), self.step()
        library.call.octavo_write(ctypes.byref(model), 0, ctypes.byref(step), address(qkv))
        library.call.octavo_attend(ctypes.byref(model), 0, ctypes.byref(step), address(qkv), address(out))
        return qkv, out, k, v

    def step(self) -> Step:
        """Points to the arrays of the case."""
        shared = self.shared_keys
        return Step(
            num_tokens=len(self.positions), num_rows=len(self.rows), table_width=self.tables.shape[1],
            cache_index=address(self.cache_index), positions=address(self.positions), slots=address(self.new_slots),
            query_start=address(self.query_start), context_len=address(self.context_len), tables=address(self.tables),
            shared_start=address(shared.start), shared_nodes=address(shared.nodes), shared_rows=address(shared.rows),
        )  # fmt: skip

    def layer(self, cos: Floats, sin: Floats, k: Cache, v: Cache) -> Layer:
        """The attention fields of a layer. It points to the arrays, but does not keep them alive."""
        q_norm, k_norm = self.norms or (None, None)
        return Layer(
            heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, rotary_dim=self.rotated, block_size=self.block_size,
            window=self.window, attention_scale=self.head_dim**-0.5, soft_cap=self.soft_cap, residual_scale=1.0,
            sinks=address(self.sink_scores), alibi=address(self.slopes), q_norm=norm_struct(q_norm), k_norm=norm_struct(k_norm),
            whole_norm=self.whole_norm, output_gate=self.output_gate,
            cos=address(cos), sin=address(sin), k_cache=address(k.values), v_cache=address(v.values), k_scale=address(k.scale),
            v_scale=address(v.scale),
        )  # fmt: skip

    def _normal(self, *shape: int) -> Floats:
        return self.random.standard_normal(shape, np.float32)
