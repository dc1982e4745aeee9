"""Mixtures of experts on every level: the products are those of each expert alone, bit for bit, and their weights are torch's."""

import ctypes

import numpy as np
import pytest
import torch

from octavo.kernels.cpu.levels import mix
from octavo.kernels.cpu.library import ACTIVATIONS, BF16, F16, F32, Q4, Q8, Matrix, Mixture, NativeLibrary, address
from octavo.kernels.cpu.packing import Floats
from tests.support.native import error, levels_here, running
from tests.support.native_mixture import Choice, MixtureWeights, expert_of

LEVELS = levels_here()
HIDDEN, INNER = 72, 48
CHOICES = (
    Choice(1, 1), Choice(5, 5, over_all=False), Choice(16, 2), Choice(33, 4, normed=False), Choice(8, 3, over_all=False, shared_inner=32),
    Choice(7, 2, normed=False, shared_inner=80),
)  # fmt: skip
KINDS = [(F32, 0), (BF16, 0), (F16, 0), (Q8, 32), (Q4, 16)]


def product(library: NativeLibrary, matrix: Matrix, x: Floats, tokens: int, activation: str | None = None) -> Floats:
    y = np.full((len(x), matrix.n // (1 if activation is None else 2)), np.nan, np.float32)
    pointers = address(np.ascontiguousarray(x)), address(y)
    if activation is None:
        library.call.octavo_matmul(ctypes.byref(matrix), *pointers, len(x), tokens)
    else:
        library.call.octavo_gate_up(ctypes.byref(matrix), ACTIVATIONS[activation], *pointers, len(x), tokens)
    return y


def one_by_one(library: NativeLibrary, weights: MixtureWeights, x: Floats, activation: str) -> Floats:
    """Every expert with its tokens, by the native products of one matrix."""
    choice, parts, tokens, hidden = weights.choice, weights.parts, len(x), weights.hidden
    structs = {name: part.packed.struct for name, part in parts.items() if part.packed is not None}
    chosen, share = weights.weigh(product(library, structs["router"], x, tokens))
    y, each = np.zeros(x.shape), weights.each(tokens)
    for expert in range(choice.count):
        token, place = np.nonzero(chosen == expert)
        if len(token):
            up = expert_of(parts["experts_gate_up"], expert, choice.count, 2 * weights.inner)
            made = product(library, up, x[token], each, activation)
            made = product(library, expert_of(parts["experts_down"], expert, choice.count, hidden), made, each)
            y[token] += share[token, place, None] * made
    if choice.shared_inner:
        made = product(library, structs["shared_down"], product(library, structs["shared_gate_up"], x, tokens, activation), tokens)
        y += made / (1 + np.exp(-product(library, structs["shared_gate"], x, tokens).astype(np.float64)))
    return y.astype(np.float32)


@pytest.mark.parametrize("kind, group", KINDS, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_a_mixture_is_the_weighted_sum_of_its_experts(level: str, kind: int, group: int) -> None:
    random = np.random.default_rng(kind)
    for number, choice in enumerate(CHOICES):
        activation = list(ACTIVATIONS)[number % 3]
        with running(level, 1 + number % 3) as library:
            weights = MixtureWeights.make(library, random, choice, HIDDEN, INNER, kind, group, number % 2 == 1, tabled=kind == Q4)
            for tokens in (1, 2, 9, 70):
                x = random.standard_normal((tokens, HIDDEN), np.float32)
                found, good = mix(library, weights.struct, x, activation), one_by_one(library, weights, x, activation)
                assert error(found, good) < 1e-5, (choice, tokens)


@pytest.mark.parametrize("level", LEVELS)
def test_a_mixture_is_what_torch_makes_of_it(level: str) -> None:
    random = np.random.default_rng(3)
    for choice in CHOICES:
        with running(level, 2) as library:
            weights = MixtureWeights.make(library, random, choice, HIDDEN, INNER, F32, 0)
            for tokens in (1, 40):
                x = random.standard_normal((tokens, HIDDEN), np.float32)
                good = weights.twin(x, "swiglu", lambda part, rows, _: part.product(rows, "floats"))
                assert error(mix(library, weights.struct, x), good) < 1e-5
    scores = torch.from_numpy(random.standard_normal((50, 33), np.float32))
    chosen, share = MixtureWeights(Choice(33, 4, normed=False), HIDDEN, INNER, {}).weigh(scores.numpy())
    best = scores.softmax(-1).topk(4)
    assert np.array_equal(chosen, best.indices.numpy()) and np.allclose(share, best.values.numpy())


@pytest.mark.parametrize("level", LEVELS)
def test_ranks_with_some_of_the_experts_give_parts_of_the_sum(level: str) -> None:
    random, choice = np.random.default_rng(6), Choice(8, 3, normed=False)
    with running(level, 2) as library:
        for kind, group in KINDS:
            weights = MixtureWeights.make(library, random, choice, HIDDEN, INNER, kind, group)
            for tokens in (1, 40):
                x = random.standard_normal((tokens, HIDDEN), np.float32)
                whole, parts = mix(library, weights.struct, x), []
                for first in (0, 4):
                    some = Mixture.from_buffer_copy(weights.struct)
                    some.first, some.held = first, 4
                    for name, rows in (("experts_gate_up", 2 * INNER), ("experts_down", 80)):
                        first_expert = expert_of(weights.parts[name], first, choice.count, 4 * rows)
                        setattr(some, name, first_expert)
                    parts.append(mix(library, some, x))
                assert error(parts[0] + parts[1], whole) < (1e-5 if kind == F32 else 2e-2)
                assert np.abs(parts[0]).max() > 0 or tokens == 1


@pytest.mark.parametrize("level", LEVELS)
def test_a_token_that_is_no_number_spoils_itself_alone(level: str) -> None:
    random = np.random.default_rng(4)
    with running(level, 2) as library:
        for kind, group in KINDS:
            weights = MixtureWeights.make(library, random, CHOICES[-1], HIDDEN, INNER, kind, group)
            x = random.standard_normal((20, HIDDEN), np.float32)
            x[[3, 11], 5] = np.nan, np.inf
            found = mix(library, weights.struct, x)
            assert [token for token in range(20) if not np.isfinite(found[token]).all()] == [3, 11]


@pytest.mark.parametrize("level", LEVELS)
def test_threads_do_not_change_a_bit(level: str) -> None:
    x, found = np.random.default_rng(1).standard_normal((33, HIDDEN), np.float32), []
    for threads in (1, 2, 3):
        random = np.random.default_rng(2)
        with running(level, threads) as library:
            every = [MixtureWeights.make(library, random, CHOICES[4], HIDDEN, INNER, kind, group) for kind, group in KINDS]
            found.append([mix(library, weights.struct, x[:tokens].copy()) for weights in every for tokens in (1, 33)])
    for other in found[1:]:
        assert all(np.array_equal(one, same) for one, same in zip(found[0], other))
