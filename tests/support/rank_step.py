"""The part of a small decoder that one rank has, cut by hand: heads, columns of gate and up, rows of the vocabulary; and its step.

A rank has the k and v heads that its q heads look at, so two ranks may have the same ones.
"""

import ctypes
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.comm.shared_memory import SharedMemoryComm
from octavo.kernels.cpu.library import F32, PANEL, Layer, Matrix, Model, NativeLibrary, Step, address
from octavo.kernels.cpu.packing import Floats, pack_float
from tests.support.native import error, running
from tests.support.native_step import BATCHES, HEAD_DIM, HEADS, INNER, KINDS, KV_HEADS, LAYERS, PLAIN, Decoder, Run
from tests.support.native_weights import Weights
from tests.support.rank_processes import meet

TOLERANCE = 1e-4  # of the largest number: sums are made in another order


def shares(count: int, size: int) -> list[range]:
    """[0, count) for so many ranks, the first ones having more."""
    ends = [-(-count * rank // size) for rank in range(size + 1)]
    return [range(begin, end) for begin, end in pairwise(ends)]


class RankRun:
    """What a rank of a group computes of a step of the whole decoder."""

    def __init__(self, library: NativeLibrary, comm: SharedMemoryComm, whole: Run, split_vocab: bool) -> None:
        self._library, self._comm, self._whole = library, comm, whole
        self._kept: list[Any] = []  # what the structs point to
        self.heads = shares(HEADS, comm.size)[comm.rank]
        self.kv_heads = sorted({head * KV_HEADS // HEADS for head in self.heads})
        self.panels = shares(INNER // PANEL, comm.size)[comm.rank]
        self.ids = shares(whole.decoder.vocab, comm.size)[comm.rank] if split_vocab else range(whole.decoder.vocab)
        self.hidden = np.full_like(whole.hidden, np.nan)
        self.logits = np.full((len(whole.samples), len(self.ids)), np.nan, np.float32)
        self.best = np.full(len(whole.samples), -1)
        self.model = self._model(split_vocab)

    def step(self) -> int:
        """Returns the code of the call."""
        struct = Step.from_buffer_copy(self._whole.struct)
        struct.hidden, struct.logits, struct.best = address(self.hidden), address(self.logits), address(self.best)
        return int(self._library.call.octavo_step(ctypes.byref(self.model), ctypes.byref(struct)))

    def _model(self, split_vocab: bool) -> Model:
        model, decoder = Model.from_buffer_copy(self._whole.model), self._whole.decoder
        model.group = ctypes.pointer(self._comm.group)
        if split_vocab:
            model.vocab_start, model.vocab_rows = self.ids.start, len(self.ids)
        model.embed = self._array(self._whole.embed[self.ids])
        model.head = self._matrix(decoder.head, list(self.ids), None)
        model.layers = (Layer * LAYERS)(*(self._layer(index) for index in range(LAYERS)))
        return model

    def _layer(self, index: int) -> Layer:
        layer, parts = Layer.from_buffer_copy(self._whole.model.layers[index]), self._whole.decoder.layers[index]
        both = [HEADS + head for head in self.kv_heads] + [HEADS + KV_HEADS + head for head in self.kv_heads]
        columns = spread(self.panels, PANEL)
        layer.heads, layer.kv_heads = len(self.heads), len(self.kv_heads)
        layer.qkv = self._matrix(parts["qkv"], spread([*self.heads, *both], HEAD_DIM), None)
        layer.output = self._matrix(parts["output"], None, spread(self.heads, HEAD_DIM))
        layer.gate_up = self._matrix(parts["gate_up"], spread(self.panels, 2 * PANEL), None)
        layer.down = self._matrix(parts["down"], None, columns)
        k, v = self._whole.caches[index]
        layer.k_cache, layer.v_cache = self._array(k.values[:, :, self.kv_heads]), self._array(v.values[:, :, self.kv_heads])
        return layer

    def _matrix(self, weights: Weights, rows: list[int] | None, columns: list[int] | None) -> Matrix:
        """Some rows or columns of a product. Those of columns are parts of a sum, to which rank 0 adds the bias."""
        values, bias = in_order(weights), weights.bias
        if rows is not None:
            values, bias = values[rows], None if bias is None else bias[rows].copy()
        if columns is not None:
            values, bias = values[:, columns], bias if self._comm.rank == 0 else None
        packed = pack_float(self._library, np.ascontiguousarray(values), weights.kind, bias)
        self._kept.append(packed)
        return packed.struct

    def _array(self, values: NDArray[Any]) -> int | None:
        self._kept.append(np.ascontiguousarray(values))
        return address(self._kept[-1])


def spread(parts: list[int] | range, size: int) -> list[int]:
    """Returns the rows of parts that are so many rows each."""
    return [part * size + row for part in parts for row in range(size)]


def in_order(weights: Weights) -> Floats:
    """The weights as columns of the input have them."""
    if weights.order is None:
        return weights.exact
    values = np.empty_like(weights.exact)
    values[:, weights.order] = weights.exact
    return values


# -- jobs, see tests/support/ranks.py


def steps(comm: SharedMemoryComm, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Steps of all batches, beside those of the whole decoder in this process: how far off, and the best ids."""
    results = []
    with running(given["level"], given["threads"]) as library:
        decoder = Decoder(library, F32, 0, given["embed_kind"], F32, shape=KINDS.get(given["kind"], PLAIN))
        for rows in BATCHES:
            whole = decoder.step(rows)
            mine = RankRun(library, comm, whole, given["split_vocab"])
            whole.at_once()
            code = mine.step()
            off = max(error(mine.hidden, whole.hidden), error(mine.logits, whole.logits[:, mine.ids]))
            largest = mine.logits[np.arange(len(mine.best)), mine.best - mine.ids.start]
            bits = int(mine.hidden.view(np.uint32).astype(np.uint64).sum())
            results.append({"code": code, "off": off, "best": mine.best.tolist(), "largest": largest.tolist(), "bits": bits,
                            "expected": whole.best.tolist()})  # fmt: skip
    return results


def step_that_rank_1_leaves(comm: SharedMemoryComm, given: dict[str, Any]) -> int:
    """Rank 1 goes away just before the step."""
    with running(given["level"], given["threads"]) as library:
        run = RankRun(library, comm, Decoder(library, F32, 0, F32, F32).step(BATCHES[1]), split_vocab=False)
        meet(comm)
        comm.group.timeout_ms = 1000
        return 0 if comm.rank == 1 else run.step()
