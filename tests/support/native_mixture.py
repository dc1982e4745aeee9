"""Random mixtures of experts, packed for the native library if there is one, and what they give in plain numpy."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.cpu.library import PANEL, Matrix, Mixture, NativeLibrary
from octavo.kernels.cpu.packing import Floats
from tests.support.native_weights import Weights, gated, make_weights


@dataclass(frozen=True)
class Choice:
    count: int
    chosen: int
    over_all: bool = True
    normed: bool = True
    shared_inner: int = 0


@dataclass
class MixtureWeights:
    choice: Choice
    hidden: int
    inner: int
    parts: dict[str, Weights]  # `experts_*` have the rows of all experts, each in whole panels

    @staticmethod
    def make(
        library: NativeLibrary | None, random: np.random.Generator, choice: Choice, hidden: int, inner: int, kind: int, group: int,
        plain: bool = False, tabled: bool = False,
    ) -> "MixtureWeights":  # fmt: skip
        """`inner`: whole panels"""

        def weights(n: int, k: int, plain: bool = plain) -> Weights:
            return make_weights(library, random, n, k, kind, group, plain, tabled)

        rows = -(-hidden // PANEL) * PANEL
        parts = {
            "router": weights(choice.count, hidden),
            "experts_gate_up": weights(2 * inner * choice.count, hidden),
            "experts_down": weights(rows * choice.count, inner),
        }
        if choice.shared_inner:
            parts["shared_gate_up"] = weights(2 * choice.shared_inner, hidden)
            parts["shared_down"] = weights(hidden, choice.shared_inner)
            parts["shared_gate"] = weights(1, hidden, True)
        return MixtureWeights(choice, hidden, inner, parts)

    @cached_property
    def struct(self) -> Mixture:
        choice = self.choice
        mixture = Mixture(count=choice.count, chosen=choice.chosen, held=choice.count, over_all=choice.over_all, normed=choice.normed)
        for name, part in self.parts.items():
            assert part.packed is not None
            setattr(mixture, name, part.packed.struct)
        return mixture

    def each(self, tokens: int) -> int:
        """Rows of an expert, about: they decide how it multiplies."""
        return max(1, tokens * self.choice.chosen // self.choice.count)

    def weigh(self, scores: Floats) -> tuple[NDArray[Any], NDArray[Any]]:
        """The experts of each token, the best first, and their weights."""
        wide = scores.astype(np.float64)
        chosen = np.argsort(-wide, axis=1, kind="stable")[:, : self.choice.chosen]
        weights = np.exp(wide - wide.max(1, keepdims=True))
        total = weights.sum(1, keepdims=True)
        picked = np.take_along_axis(weights, chosen, 1)
        if not self.choice.over_all or self.choice.normed:
            total = picked.sum(1, keepdims=True)
        return chosen, picked / total

    def twin(self, x: Floats, activation: str, multiply: Callable[[Weights, Floats, int], Floats]) -> Floats:
        """multiply(weights, x, rows): the product in the form that so many rows have"""
        tokens, parts, rows = len(x), self.parts, -(-self.hidden // PANEL) * PANEL
        chosen, weights = self.weigh(multiply(parts["router"], x, tokens))
        up = multiply(parts["experts_gate_up"], x, self.each(tokens)).reshape(tokens, self.choice.count, -1)
        y = np.zeros(x.shape)
        for expert in set(chosen.flatten().tolist()):
            token, place = np.nonzero(chosen == expert)
            made = multiply(parts["experts_down"], gated(np.ascontiguousarray(up[token, expert]), activation), self.each(tokens))
            y[token] += weights[token, place, None] * made[:, expert * rows :][:, : self.hidden]
        if self.choice.shared_inner:
            both = multiply(parts["shared_gate_up"], x, tokens)
            gate = multiply(parts["shared_gate"], x, tokens).astype(np.float64)
            y += multiply(parts["shared_down"], gated(both, activation), tokens) / (1 + np.exp(-gate))
        return y.astype(np.float32)


def expert_of(all_experts: Weights, expert: int, count: int, n: int) -> Matrix:
    """The weights of one expert as a matrix of its own, which points into those of all. n: its rows, without what fills its last panel"""
    assert all_experts.packed is not None
    one = Matrix.from_buffer_copy(all_experts.packed.struct)
    data, *tables = all_experts.packed.arrays
    one.data += expert * data.nbytes // count
    if one.scale:
        one.scale += expert * tables[0].nbytes // count
        one.offset += expert * tables[1].nbytes // count
    if one.bias:
        one.bias += expert * (one.n // count) * ctypes.sizeof(ctypes.c_float)
    one.n = n
    return one
