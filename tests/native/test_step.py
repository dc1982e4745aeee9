"""A whole step in one call gives, bit for bit, what its parts give one after the other; the parts are proven in the other files."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.kernels.cpu.attention_case import Cache
from octavo.kernels.cpu.library import BF16, F16, F32, Q4, Q8
from octavo.kernels.cpu.packing import pack_float
from tests.support.native import error, levels_here, running
from tests.support.native_step import BATCHES, KINDS, LAYERS, Decoder
from tests.support.soaked import pairs

LEVELS = levels_here()


def same(a: list[NDArray[Any]], b: list[NDArray[Any]]) -> bool:
    return all(np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("level", "weights"), pairs(LEVELS, [(F32, 0), (BF16, 0), (Q8, 32), (Q8, 128), (Q4, 16), (Q4, 64)]), ids=str)
def test_a_step_is_its_parts_one_after_the_other(level: str, weights: tuple[int, int]) -> None:
    kind, group = weights
    for threads, embed_kind, cache_kind in ((1, F32, F32), (2, BF16, Q8), (3, Q8, BF16)):
        with running(level, threads) as library:
            decoder = Decoder(library, kind, group, embed_kind, cache_kind)
            for rows in BATCHES:
                once, parts = decoder.step(rows), decoder.step(rows)
                once.at_once()
                parts.by_parts()
                assert np.isfinite(once.hidden).all() and np.isfinite(once.logits).all()
                assert same(once.results(), parts.results()), (threads, rows)


@pytest.mark.parametrize(("level", "kind"), pairs(LEVELS, list(KINDS)))
def test_so_is_a_step_of_every_kind_of_layer(level: str, kind: str) -> None:
    for threads, weights, group, cache_kind in ((1, F32, 0, F32), (3, Q4, 32, Q8), (2, BF16, 0, F16)):
        with running(level, threads) as library:
            decoder = Decoder(library, weights, group, F32, cache_kind, shape=KINDS[kind])
            for rows in BATCHES:
                once, parts = decoder.step(rows), decoder.step(rows)
                once.at_once()
                parts.by_parts()
                assert np.isfinite(once.hidden).all() and np.isfinite(once.logits).all()
                assert same(once.results(), parts.results()), (threads, rows)


@pytest.mark.parametrize(("level", "kind"), pairs(LEVELS, list(KINDS), shift=1))
def test_a_step_of_every_kind_of_layer_is_what_torch_makes_of_it(level: str, kind: str) -> None:
    with running(level, 2) as library:
        decoder = Decoder(library, F32, 0, F32, F32, shape=KINDS[kind])
        for rows in BATCHES:
            native, twin = decoder.step(rows), decoder.step(rows)
            native.at_once()
            twin.by_twins(lambda weights, x, _: weights.product(x, "floats"))
            assert error(native.hidden, twin.hidden) < 1e-4 and error(native.logits, twin.logits) < 1e-4, rows
            assert np.array_equal(native.best, twin.best)


@pytest.mark.parametrize("level", LEVELS)
def test_layers_may_have_block_tables_of_their_own(level: str) -> None:
    """The same step over caches whose blocks lie elsewhere and are of another size gives the same bits."""
    with running(level, 2) as library:
        decoder = Decoder(library, F32, 0, F32, F32, shape=KINDS["gemma"])
        for rows in BATCHES:
            alike = decoder.step(rows)
            alike.at_once()
            for moved in ((0, 2), range(LAYERS)):
                apart = decoder.step(rows)
                for index in moved:
                    apart.move(index, block_size=8)
                if len(moved) == LAYERS:
                    apart.lengths[0] = 0  # no layer reads the lengths of the first group
                apart.at_once()
                assert same([apart.hidden, apart.logits], [alike.hidden, alike.logits])


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
            decoder.norm.weight[:] = np.nan
            spoiled = decoder.step(BATCHES[0])
            spoiled.at_once()
            assert np.isnan(spoiled.logits).all() and 0 <= spoiled.best[0] < vocab


def test_a_cache_of_codes_is_read_as_it_was_written() -> None:
    """The harness itself: codes and scales give back numbers within half a step."""
    numbers = np.random.default_rng(0).standard_normal((2, 4, 1, 32), np.float32)
    cache = Cache.holding(numbers, Q8)
    assert cache.scale is not None
    assert (np.abs(cache.numbers() - numbers) <= cache.scale[..., None] * 0.5001).all()
