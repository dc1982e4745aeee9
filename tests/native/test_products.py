"""Products on every level the machine has equal plain numpy: all kinds of weights, groups, odd sizes, 1 to 40 rows, 1 and 2 threads."""

import platform

import numpy as np
import pytest

from octavo.kernels.cpu.levels import gate_up, matmul
from octavo.kernels.cpu.library import BF16, F16, F32, Q4, Q8
from octavo.kernels.cpu.packing import Floats, pack_float, unpack_rows
from tests.support.native import error, levels_here, running
from tests.support.native_weights import FEW_ROWS, TOLERANCE, form_of, gated, make_weights

MOST_ROWS = 40
KINDS = [(F32, 0), (BF16, 0), (F16, 0), *((kind, group) for kind in (Q8, Q4) for group in (16, 32, 64, 128))]
NAMES = [("f32", "bf16", "q8", "q4", "f16")[kind] + (f"-{group}" if group else "") for kind, group in KINDS]
SIZES = [(1, 1), (17, 7), (32, 63), (16, 64), (33, 65), (48, 100), (100, 257)]  # n, k
LEVELS = levels_here()


@pytest.mark.parametrize("kind, group", KINDS, ids=NAMES)
@pytest.mark.parametrize("level", LEVELS)
def test_a_product_is_what_its_twin_gives(level: str, kind: int, group: int) -> None:
    random = np.random.default_rng(kind * 1000 + group)
    for threads in (1, 2):
        with running(level, threads) as library:
            for n, k in SIZES:
                weights = make_weights(library, random, n, k, kind, group, plain=threads == 2)
                x = random.standard_normal((MOST_ROWS, k), np.float32)
                form = form_of(level, kind)
                expected = weights.product(x, form)
                for rows in range(1, MOST_ROWS + 1) if threads == 1 else (1, FEW_ROWS, FEW_ROWS + 1, MOST_ROWS):
                    got, good = matmul(library, weights.packed, x[:rows].copy()), expected[:rows]
                    assert error(got, good) < TOLERANCE[form], (n, k, rows, threads)


@pytest.mark.parametrize("level", LEVELS)
def test_a_product_is_added_with_one_rounding(level: str) -> None:
    """Kernels for few rows and for many agree because all of them do, whatever a compiler makes of a product and a sum."""
    fuses, near = level != "portable" or platform.machine() == "aarch64", 1 + 2.0**-12
    w, x = np.array([[1, near]], np.float32), np.array([[-(1 + 2.0**-11), near]], np.float32)
    with running(level) as library:
        weights = pack_float(library, w)
        for rows in (1, FEW_ROWS + 1):
            assert (matmul(library, weights, x.repeat(rows, 0)) == (2.0**-24 if fuses else 0)).all()


@pytest.mark.parametrize("kind", [Q8, Q4])
@pytest.mark.parametrize("level", LEVELS)
def test_a_few_rows_of_a_long_step_are_multiplied_as_all_of_its_rows(level: str, kind: int) -> None:
    """The vocabulary of a prompt's last token."""
    random, tokens = np.random.default_rng(4), FEW_ROWS + 1
    with running(level) as library:
        weights = make_weights(library, random, 48, 200, kind, 32)
        x = random.standard_normal((2, 200), np.float32)
        got, good = matmul(library, weights.packed, x, tokens), weights.product(x, "codes")
    assert error(got, good) < TOLERANCE["codes"]


@pytest.mark.parametrize("kind, group", KINDS, ids=NAMES)
@pytest.mark.parametrize("level", LEVELS)
def test_gate_and_up_are_multiplied_in_one_pass(level: str, kind: int, group: int) -> None:
    random = np.random.default_rng(kind * 1000 + group)
    for threads in (1, 2):
        with running(level, threads) as library:
            for n, k in ((32, 65), (64, 128), (224, 100)):
                weights = make_weights(library, random, n, k, kind, group)
                x = random.standard_normal((MOST_ROWS, k), np.float32)
                for rows in (1, 2, 3, 8, 9, 16, 17, 31, 33, 40):
                    form = form_of(level, kind)
                    got, good = gate_up(library, weights.packed, x[:rows].copy()), gated(weights.product(x[:rows], form))
                    assert error(got, good) < 2 * TOLERANCE[form], (n, k, rows, threads)


@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("level", LEVELS)
def test_codes_are_looked_up_in_a_table(level: str, group: int) -> None:
    """In products of few rows and of many, gated and not, and where rows are read out of the panels."""
    random = np.random.default_rng(group)
    for threads, (n, k) in ((1, (17, 7)), (2, (48, 100)), (1, (96, 257)), (2, (32, 128))):
        with running(level, threads) as library:
            weights = make_weights(library, random, n, k, Q4, group, plain=threads == 2, tabled=True)
            x = random.standard_normal((MOST_ROWS, k), np.float32)
            for rows in (1, 2, 3, 4, 5, FEW_ROWS, FEW_ROWS + 1, 33, MOST_ROWS):
                form = form_of(level, Q4)
                good = weights.product(x[:rows], form)
                assert error(matmul(library, weights.packed, x[:rows].copy()), good) < TOLERANCE[form], (n, k, rows)
                if n % 32 == 0:
                    assert error(gate_up(library, weights.packed, x[:rows].copy()), gated(good)) < 2 * TOLERANCE[form], (n, k, rows)
            found = unpack_rows(weights.packed, np.arange(n))
            expected = weights.exact if weights.order is None else weights.exact[:, np.argsort(weights.order)]
            assert error(found, expected) < 1e-6


@pytest.mark.parametrize("kind, group", [(F32, 0), (BF16, 0), (F16, 0), (Q8, 32), (Q4, 32)], ids=str)
@pytest.mark.parametrize("activation", ["geglu", "clamped", "gelu"])
@pytest.mark.parametrize("level", LEVELS)
def test_other_gates(level: str, activation: str, kind: int, group: int) -> None:
    random = np.random.default_rng(9)
    with running(level) as library:
        weights = make_weights(library, random, 83 if activation == "gelu" else 96, 100, kind, group)
        x = random.standard_normal((MOST_ROWS, 100), np.float32)
        for rows in (1, 3, 17, 40):
            form = form_of(level, kind)
            good = gated(weights.product(x[:rows], form), activation)
            assert error(gate_up(library, weights.packed, x[:rows].copy(), activation), good) < 2 * TOLERANCE[form], rows


@pytest.mark.parametrize("level", LEVELS)
def test_the_gate_holds_far_out(level: str) -> None:
    """silu where exp is tiny, huge, and beyond a float."""
    gate = np.array([-200, -100, -88, -87, -20, -1e-3, 0, 1e-3, 20, 87, 88, 100, 200, 1e4, -1e4, 1], np.float32)
    weights = np.zeros((32, 64), np.float32)
    weights[:16, 0], weights[16:, 0] = gate, 1
    x = np.zeros((1, 64), np.float32)
    x[0, 0] = 1
    with running(level) as library:
        got = {name: gate_up(library, pack_float(library, weights), x, name)[0] for name in ("swiglu", "geglu", "clamped")}
    wide = gate.astype(np.float64)
    expected = wide / (1 + np.exp(-np.maximum(wide, -300)))
    assert (np.abs(got["swiglu"] - expected) <= 1e-6 * np.abs(expected) + 1e-30).all()
    expected = wide / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    assert (np.abs(got["geglu"] - expected) <= 2e-6 * np.abs(expected) + 1e-30).all()
    held = np.minimum(wide, 7)
    expected = 2 * held / (1 + np.exp(-1.702 * np.maximum(held, -300)))
    assert (np.abs(got["clamped"] - expected) <= 1e-6 * np.abs(expected) + 1e-30).all()


@pytest.mark.parametrize("kind, group", KINDS, ids=NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_not_finite_stays_so_in_its_row_and_nowhere_else(level: str, bad: float, kind: int, group: int) -> None:
    random = np.random.default_rng(1)
    with running(level) as library:
        for k in (100, 128):
            weights = make_weights(library, random, 48, k, kind, group, plain=True)
            for rows, at in ((1, 0), (3, 1), (40, 17)):
                x = random.standard_normal((rows, k), np.float32)
                good = matmul(library, weights.packed, x)
                x[at, 77] = bad
                got = matmul(library, weights.packed, x)
                assert not np.isfinite(got[at]).any(), (k, rows)
                assert np.array_equal(np.delete(got, at, 0), np.delete(good, at, 0))


@pytest.mark.parametrize("level", LEVELS)
def test_threads_do_not_change_a_bit(level: str) -> None:
    random = np.random.default_rng(2)
    results: list[list[Floats]] = []
    x = random.standard_normal((MOST_ROWS, 200), np.float32)
    for threads in (1, 2, 3):
        random = np.random.default_rng(3)
        with running(level, threads) as library:
            every = [make_weights(library, random, 96, 200, kind, group) for kind, group in KINDS]
            results.append([run(library, w.packed, x[:rows].copy()) for w in every for run in (matmul, gate_up) for rows in (1, 7, 40)])
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other))
