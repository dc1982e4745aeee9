"""Gated DeltaNet on every level: what its formulas give in float64, and the same bits however a sequence is cut into steps.

Slots that are not written are full of NaN, so that reading or writing one by mistake shows.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from octavo.kernels.cpu.delta_net_case import DeltaNetCase, Entry, States
from octavo.kernels.cpu.library import NativeLibrary
from octavo.kernels.cpu.packing import Floats
from tests.support.native import error, levels_here, running
from tests.support.native_delta_net import delta_net_twin
from tests.support.soaked import one_in, pairs

LEVELS = levels_here()
# Rounding errors: sums of at most 256 numbers, and states in which those of some tokens add up, are off by 1e-6 of the largest number.
NEAR = 1e-5
HEADS = [(1, 1), (1, 3), (2, 2), (2, 6), (3, 3), (4, 8)]
SIZES = [(k_dim, v_dim) for k_dim in (16, 48, 128, 256) for v_dim in (16, 48, 128, 256)]
CASES = [
    DeltaNetCase(65, *heads, *sizes, conv_width=2 + number % 3, seed=number)
    for number, (heads, sizes) in enumerate((heads, sizes) for sizes in SIZES for heads in HEADS)
]  # fmt: skip
LENGTHS = (1, 3, 4, 31, 32, 33, 63, 64, 65)  # around the tokens that are computed together
# A prompt, chunks that continue one, tokens that were generated, and padding.
MIXED = (
    Entry(0, 33, 0, 5), Entry(33, 34, 1, 6), Entry(2, 20, 2, 7, ((3, 8), (4, 9), (17, 10))), Entry(34, 35, 3, 11), Entry(0, 1, 0, -1),
    Entry(7, 9, 4, 12, ((8, 13),)),
)  # fmt: skip
PAST, SLOTS = (1, 2, 3, 4), 14


def same(a: States, b: States) -> bool:
    return np.array_equal(a.conv, b.conv, equal_nan=True) and np.array_equal(a.recurrent, b.recurrent, equal_nan=True)


def check(case: DeltaNetCase, library: NativeLibrary, slots: int, past: tuple[int, ...], *entries: Entry) -> None:
    states = case.states(slots, *past)
    (good, twin), out = twin_of(case, slots, past, *entries), case.run(library, states, *entries)
    assert error(out, good) < NEAR
    written = [slot for entry in entries for slot in (entry.write, *(slot for _, slot in entry.checkpoints)) if slot >= 0]
    assert np.array_equal(states.conv, twin.conv, equal_nan=True)
    assert error(states.recurrent[written], twin.recurrent[written]) < NEAR
    assert np.array_equal(np.delete(states.recurrent, written, 0), np.delete(twin.recurrent, written, 0), equal_nan=True)


@cache
def twin_of(case: DeltaNetCase, slots: int, past: tuple[int, ...], *entries: Entry) -> tuple[Floats, States]:
    """The same for all levels."""
    states = case.states(slots, *past)
    return delta_net_twin(case, states, *entries), states


def name_of(case: DeltaNetCase) -> str:
    return f"{case.k_heads}/{case.v_heads} heads of {case.k_dim}x{case.v_dim}, width {case.conv_width}"


@pytest.mark.parametrize("case", one_in(7, CASES), ids=name_of)
@pytest.mark.parametrize("level", LEVELS)
def test_every_shape_gives_what_the_formulas_give(level: str, case: DeltaNetCase) -> None:
    with running(level, 2) as library:
        check(case, library, SLOTS, PAST, *MIXED)
        check(case, library, 2, (), Entry(0, case.tokens, 0, 1))


@pytest.mark.parametrize("level", LEVELS)
def test_prompts_of_every_length_do(level: str) -> None:
    with running(level) as library:
        for length in LENGTHS:
            case = DeltaNetCase(length, seed=length)
            check(case, library, 2, (), Entry(0, length, 0, 1))
            check(replace(case, conv_width=8), library, 3, (1,), Entry(0, length, 1, 2))


@pytest.mark.parametrize("level", LEVELS)
def test_numbers_of_every_size_do(level: str) -> None:
    """The decay is 0 or 1, or a step of the softplus is as large as its argument; q, k and v are large, small or zero."""
    with running(level) as library:
        for number, (shift, scale) in enumerate(((-40, 1), (40, 1), (19, 1), (21, 1), (0, 100), (0, 1e-4), (0, 0))):
            case = DeltaNetCase(40, seed=500 + number)
            case.gates[:, case.v_heads :] += np.float32(shift)
            case.qkvz[:] *= np.float32(scale)
            if scale:
                check(case, library, SLOTS, PAST, *MIXED)
            else:
                states = case.states(2)
                assert not case.run(library, states, Entry(0, 40, 0, 1)).any() and not states.recurrent[1].any()


def in_chunks(case: DeltaNetCase, library: NativeLibrary, size: int) -> tuple[Floats, States]:
    """The case in steps of at most so many tokens: results and the last state."""
    steps = -(-case.tokens // size)
    states, out = case.states(steps + 2, 1), []
    for step in range(steps):
        out.append(case.run(library, states, Entry(step * size, min(case.tokens, (step + 1) * size), step + 1, step + 2)))
    return np.concatenate(out), States(states.conv[-1:], states.recurrent[-1:])


@pytest.mark.parametrize(("level", "shape"), pairs(LEVELS, [(1, 2, 128, 128), (2, 2, 16, 48), (1, 1, 256, 80), (2, 6, 48, 16)]), ids=str)
def test_chunks_of_every_size_give_the_same_bits(level: str, shape: tuple[int, int, int, int]) -> None:
    for conv_width in (2, 4):
        case = DeltaNetCase(101, *shape, conv_width=conv_width, seed=conv_width)
        with running(level, 2) as library:
            out, last = in_chunks(case, library, 101)
            for size in (1, 2, 3, 16, 31, 32, 33, 64, 100):
                some, end = in_chunks(case, library, size)
                assert np.array_equal(some, out) and same(end, last), size


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_has_the_same_bits_alone_and_beside_others_and_on_any_number_of_threads(level: str) -> None:
    case = DeltaNetCase(40, 2, 6, 64, 48, seed=9)
    together = case.states(SLOTS, *PAST)
    before, alone = together.copy(), together.copy()
    with running(level, 1) as library:
        out = case.run(library, together, *MIXED)
        each = [case.run(library, alone, entry) for entry in MIXED]
        assert np.array_equal(np.concatenate(each), out) and same(alone, together)
    for threads in (2, 3, 5):
        with running(level, threads) as library:
            again = before.copy()
            assert np.array_equal(case.run(library, again, *MIXED), out) and same(again, together)


@pytest.mark.parametrize("level", LEVELS)
def test_a_checkpoint_is_the_state_of_a_chunk_that_ends_there(level: str) -> None:
    case = DeltaNetCase(80, 2, 4, 64, 48, seed=3)
    with running(level, 2) as library:
        ends = (1, 2, 3, 31, 32, 33, 50, 64, 79)
        states = case.states(2 + len(ends), 1)
        alone = states.copy()
        marked = Entry(0, 80, 1, -1, tuple((end, 2 + place) for place, end in enumerate(ends)))
        plain = case.run(library, alone, Entry(0, 80, 1, -1))
        assert np.array_equal(case.run(library, states, marked), plain)
        for place, end in enumerate(ends):
            case.run(library, alone, Entry(0, end, 1, 2 + place))
        assert same(states, alone)


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_that_is_computed_twice_gives_the_same_bits(level: str) -> None:
    case = DeltaNetCase(40, seed=4)
    with running(level, 2) as library:
        states = case.states(SLOTS, *PAST)
        out = case.run(library, states, *MIXED)
        once = states.copy()
        assert np.array_equal(case.run(library, states, *MIXED), out) and same(states, once)


@pytest.mark.parametrize("level", LEVELS)
def test_a_token_that_is_no_number_spoils_its_own_row_from_there_on(level: str) -> None:
    case = DeltaNetCase(40, seed=6)
    spoiled = replace(case)
    spoiled.qkvz[25, case.k_heads * case.k_dim] = np.nan  # of the first k head
    with running(level, 2) as library:
        rows = Entry(20, 33, 1, 3), Entry(30, 31, 2, 4)
        good, states = case.run(library, case.states(5, 1, 2), *rows), spoiled.states(5, 1, 2)
        out = spoiled.run(library, states, *rows)
        assert np.array_equal(out[:5], good[:5]) and np.array_equal(out[13:], good[13:])
        head = slice(0, 2 * case.v_dim)
        assert np.isnan(out[5:13, head]).all() and np.isnan(states.recurrent[3, :2]).all()
