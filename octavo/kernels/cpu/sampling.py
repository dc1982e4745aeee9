"""Sampling by the native library: `draw` and `rank` of `kernels/reference/sampling.py`, with the rows divided among its threads.

Uniforms and distances equal those of the reference bit for bit. Logarithms and exponentials may differ in their last bits, and so may
the result if two scores, or a probability and a cutoff, are closer than that.
"""

import ctypes

import torch
from torch import Tensor

from octavo.kernels.cpu import library as native
from octavo.kernels.cpu.library import NativeLibrary
from octavo.kernels.reference.philox import LOW32
from octavo.kernels.reference.sampling import Draws, Ranking


class NativeSampling:
    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def sample(self, logits: Tensor, best: Tensor, temperature: Tensor, noise: Tensor, positions: Tensor) -> Tensor:
        """Returns one id per row, [S] int64, without filters: `best` at temperature 0, else sampled. noise: [S, 4]; positions: [S]"""
        (warm,) = temperature.numpy().nonzero()
        if len(warm):
            index, off = torch.from_numpy(warm), torch.zeros(len(warm))
            draws = Draws(temperature[index], torch.zeros(len(warm), dtype=torch.int64), off + 1, off, noise[index], positions[index])
            best[index] = self.draw(logits if len(warm) == len(logits) else logits[index], draws)
        return best

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """Returns one id per row, [S] int64. logits: [S, V] float32"""
        kept = {name: getattr(draws, name).contiguous() for name in ("temperature", "top_p", "min_p")}
        kept |= {"top_k": draws.top_k.long(), "noise": draws.noise.long() & LOW32, "positions": draws.positions.long()}
        logits, ids = logits.contiguous(), torch.empty(len(logits), dtype=torch.int64)
        struct = native.Draws(*logits.shape, logits=logits.data_ptr(), ids=ids.data_ptr(), **{n: t.data_ptr() for n, t in kept.items()})
        self._library.call.octavo_draw(ctypes.byref(struct))
        return ids

    def rank(self, logits: Tensor, ids: Tensor, count: int) -> Ranking:
        """Returns the rank of each row's id, and the row's `count` best. logits: [S, V] float32; ids: [S]"""
        rows, vocab = logits.shape
        assert len(ids) == 0 or 0 <= int(ids.min()) <= int(ids.max()) < vocab, "ids of the vocabulary"
        logits, ids, count = logits.contiguous(), ids.long().contiguous(), min(count, vocab)
        chosen, near = torch.empty(rows), torch.empty(rows, count)
        ranks, totals, near_ids = (torch.empty(shape, dtype=torch.int64) for shape in ((rows,), (rows,), (rows, count)))
        struct = native.Ranking(
            rows=rows, vocab=vocab, count=count, logits=logits.data_ptr(), ids=ids.data_ptr(), chosen=chosen.data_ptr(),
            ranks=ranks.data_ptr(), totals=totals.data_ptr(), near=near.data_ptr(), near_ids=near_ids.data_ptr(),
        )  # fmt: skip
        self._library.call.octavo_rank(ctypes.byref(struct))
        return Ranking(chosen, ranks, totals, near, near_ids)
