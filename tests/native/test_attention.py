"""Writing and attending on every level equal the torch twins: cache kinds, block sizes, groups of heads, head sizes, windows, caps,
sinks, heads that are rotated in part, threads.

What no row has written is NaN in every case, so a slot read by mistake shows, whatever its weight.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.kernels.cpu.attention_case import AttentionCase, Cache, from_bf16, to_bf16
from octavo.kernels.cpu.levels import add_norm
from octavo.kernels.cpu.library import BF16, F16, F32, NORMS, Q8, NativeLibrary, Norm
from octavo.kernels.reference.attention import from_codes, to_codes
from tests.support.native import error, levels_here, running
from tests.support.native_attention import MANY_TOGETHER, MIXED, TOGETHER, attended_twin, in_halves, rounds, tree_of_rows, written_twin
from tests.support.native_weights import NormWeights
from tests.support.soaked import pairs

CACHES = {"f32": F32, "bf16": BF16, "f16": F16, "int8": Q8}
LEVELS = levels_here()


def level_and_cache(shift: int) -> pytest.MarkDecorator:
    """With every change, each level and each cache type. Other pairs in each test: `shift`."""
    return pytest.mark.parametrize(("level", "cache"), pairs(LEVELS, list(CACHES), shift=shift))


def check(case: AttentionCase, library: NativeLibrary) -> None:
    before = case.past()
    qkv, out, *caches = case.run(library)
    twin = written_twin(case)
    assert error(qkv, twin) < 1e-6
    for cache, old, new in zip(caches, before, case.new_kv(qkv)):
        expected = old.numbers()
        # The kernel's own k and v are stored, so that only storing is looked at here: it must be exact.
        expected.reshape(-1, *new.shape[1:])[case.new_slots] = Cache.holding(np.ascontiguousarray(new), case.cache_kind).numbers()
        assert np.array_equal(cache.numbers(), expected, equal_nan=True)
    if rounds(library.level, case):
        assert error(out, attended_twin(case, from_bf16(to_bf16(qkv)), *caches)) < 1e-2
    else:
        assert error(out, attended_twin(case, qkv, *caches)) < (5e-3 if in_halves(library.level, case) else 1e-5)


@level_and_cache(0)
def test_every_block_size_head_size_and_group_of_heads(level: str, cache: str) -> None:
    base = AttentionCase(rows=MIXED, cache_kind=CACHES[cache])
    for threads in (1, 2):
        with running(level, threads) as library:
            for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
                check(replace(base, block_size=size, seed=size), library)
            for dim in (16, 32, 48, 64, 80, 96, 128, 256):
                check(replace(base, head_dim=dim, qk_norm=dim % 32 == 0, seed=dim), library)
            for group in range(1, 9):
                for kv_heads in (1, 3):
                    check(replace(base, heads=group * kv_heads, kv_heads=kv_heads, qk_norm=kv_heads == 1, seed=group), library)


@level_and_cache(1)
def test_windows_hide_what_is_behind_them(level: str, cache: str) -> None:
    for threads in (1, 2):
        with running(level, threads) as library:
            for window in (1, 2, 15, 16, 17, 63, 64, 65, 100, 1000):
                check(AttentionCase(rows=MIXED, cache_kind=CACHES[cache], window=window, seed=window), library)


@level_and_cache(2)
def test_scores_fall_with_the_distance_of_a_key(level: str, cache: str) -> None:
    """In whole tasks, of few queries and of many, over shared keys, and where parts of a context are merged; with windows too."""
    with running(level, 3) as library:
        for rows, dim, window in ((MIXED, 32, 0), (MIXED, 48, 40), (((1299, 1), (700, 1)), 64, 0), (((900, 33),), 32, 100)):
            kind = {"cache_kind": CACHES[cache], "head_dim": dim, "window": window, "rotary_dim": 0, "alibi": True}
            check(AttentionCase(rows=rows, heads=6, **kind), library)  # type: ignore[arg-type]
        check(tree_of_rows(3, rows=40, heads=6, cache_kind=CACHES[cache], alibi=True), library)


@level_and_cache(3)
def test_scores_are_capped_and_sinks_take_part_in_them(level: str, cache: str) -> None:
    """In whole tasks, and where parts of a context are merged; with windows too."""
    for threads in (1, 3):
        with running(level, threads) as library:
            for rows in (MIXED, ((1299, 1), (700, 1)), ((900, 33),)):
                for cap, sinks, window in ((0.5, False, 0), (0.0, True, 0), (3.0, True, 0), (1.0, True, 40)):
                    kind = {"cache_kind": CACHES[cache], "soft_cap": cap, "sinks": sinks, "window": window}
                    check(AttentionCase(rows=rows, heads=6, seed=threads, **kind), library)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", LEVELS)
def test_heads_are_rotated_in_part_or_not_at_all_and_normed_one_by_one_or_as_one(level: str) -> None:
    with running(level, 2) as library:
        for rotary, dim in ((0, 32), (2, 32), (16, 64), (20, 80), (48, 64)):
            for whole in (False, True):
                check(AttentionCase(rows=MIXED, head_dim=dim, rotary_dim=rotary, qk_norm=True, whole_norm=whole, cache_kind=F32), library)


@level_and_cache(4)
def test_the_result_is_multiplied_by_the_sigmoid_of_its_gate(level: str, cache: str) -> None:
    """In whole tasks, of few queries and of many, over shared keys, and where parts of a context are merged."""
    base = AttentionCase(rows=MIXED, cache_kind=CACHES[cache], output_gate=True)
    rows, shared = TOGETHER
    cases = [replace(base, head_dim=dim, rotary_dim=dim // 4, qk_norm=True, heads=heads) for dim, heads in ((48, 2), (80, 6), (256, 4))]
    cases += [replace(base, rows=((1299, 1), (700, 1)), heads=6, kv_heads=1), replace(base, rows=((900, 33),), window=100)]
    cases += [replace(base, rows=rows, shared=shared, heads=6), replace(base, whole_norm=True, qk_norm=True, soft_cap=2.0, sinks=True)]
    with running(level, 3) as library:
        for case in cases:
            check(case, library)


@level_and_cache(5)
def test_what_lies_behind_a_window_is_not_read(level: str, cache: str) -> None:
    """The null block stands in the table there, as where blocks were given back: its keys are NaN here."""
    for rows in (((1299, 1), (700, 1)), ((900, 33),), MIXED):
        case = AttentionCase(rows=rows, window=50, cache_kind=CACHES[cache], block_size=8, sinks=True)
        with running(level, 3) as library:
            before, whole = case.past(), case.run(library)[1]
            for row, (past, _) in enumerate(rows):
                case.tables[row, : max(0, past - case.window + 1) // case.block_size] = 0
            assert np.isfinite(whole).all() and np.array_equal(case.run(library, before)[1], whole)


@level_and_cache(6)
def test_long_contexts_are_split_over_threads_and_merged(level: str, cache: str) -> None:
    """Few tasks and long contexts: parts, also such that the last parts are short, empty, or wholly behind the window."""
    for threads in (1, 3):
        with running(level, threads) as library:
            for rows in (((511, 1),), ((512, 1),), ((2055, 1),), ((1299, 1), (700, 1)), ((1500, 33),), ((0, 700),)):
                for window in (0, 300):
                    check(AttentionCase(rows=rows, heads=2, kv_heads=1, cache_kind=CACHES[cache], window=window, seed=threads), library)


@level_and_cache(7)
def test_rows_that_begin_alike_read_that_once(level: str, cache: str) -> None:
    for threads in (1, 3):
        with running(level, threads) as library:
            for rows, shared in (TOGETHER, MANY_TOGETHER):
                for window in (0, 100, 250):
                    case = AttentionCase(rows=rows, heads=6, cache_kind=CACHES[cache], window=window, seed=threads, shared=shared)
                    check(case, library)


# promise: shared-reads
@level_and_cache(8)
def test_a_tree_of_beginnings_is_read_once_by_rows_in_any_order(level: str, cache: str) -> None:
    for threads, seed in ((1, 1), (3, 2), (2, 3), (3, 4)):
        with running(level, threads) as library:
            for window, cap, sinks in ((0, 0.0, False), (0, 3.0, True), (40, 0.0, False), (170, 0.0, True)):
                kind = {"cache_kind": CACHES[cache], "window": window, "soft_cap": cap, "sinks": sinks, "block_size": 2**seed}
                case = tree_of_rows(seed, rows=40, heads=6, **kind)
                assert len(case.shared_keys.nodes) > 10
                check(case, library)


@pytest.mark.parametrize("cache", ["bf16", "f16"])
def test_many_rows_of_four_prompts_are_read_in_tasks_of_some(cache: str) -> None:
    case = tree_of_rows(9, rows=256, longest=120, heads=2, kv_heads=1, head_dim=16, cache_kind=CACHES[cache])
    with running(LEVELS[-1], 2) as library:
        check(case, library)


@st.composite
def cases(draw: st.DrawFn) -> AttentionCase:
    kv_heads = draw(st.integers(1, 3))
    return AttentionCase(
        rows=tuple(draw(st.lists(st.tuples(st.integers(0, 150), st.integers(1, 70)), min_size=1, max_size=6))),
        heads=kv_heads * draw(st.integers(1, 8)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from((16, 32, 64, 80, 96, 128, 256))),
        block_size=2 ** draw(st.integers(0, 8)),
        cache_kind=draw(st.sampled_from((F32, BF16, F16, Q8))),
        window=draw(st.one_of(st.just(0), st.integers(1, 200))),
        qk_norm=draw(st.booleans()),
        whole_norm=draw(st.booleans()),
        rotary_dim=draw(st.sampled_from((None, 0, 8, 16))),
        soft_cap=draw(st.sampled_from((0.0, 0.0, 1.0, 30.0))),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        output_gate=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@given(cases(), st.sampled_from(LEVELS), st.integers(1, 3))
def test_any_mix_of_rows(case: AttentionCase, level: str, threads: int) -> None:
    with running(level, threads) as library:
        check(case, library)


@pytest.mark.parametrize("level", LEVELS)
def test_scores_of_any_size_are_weighed(level: str) -> None:
    """Queries so long that almost all weight falls on one key, and so short that all keys weigh the same."""
    for cache in CACHES.values():
        for size in (1e-4, 30.0, 1e4):
            case = AttentionCase(rows=MIXED, cache_kind=cache)
            case.projected[:, : case.heads] *= np.float32(size)
            with running(level) as library:
                qkv, out, *caches = case.run(library)
                good = attended_twin(case, qkv, *caches)
                assert np.isfinite(out).all()
                if size < 1 or cache == F32:  # else rounding of large scores decides between close keys
                    assert error(out, good) < 5e-3


@level_and_cache(9)
def test_values_of_any_size_are_summed(level: str, cache: str) -> None:
    """Up to those of which a few pass the end of float16 together, as many and as few queries read them."""
    with running(level) as library:
        for size in (1e-3, 1e3, 1e4):
            case = AttentionCase(rows=MIXED, cache_kind=CACHES[cache])
            case.projected[:, -case.kv_heads :] *= np.float32(size)
            check(case, library)


@level_and_cache(10)
def test_what_is_not_finite_is_stored_and_read_as_such(level: str, cache: str) -> None:
    case = AttentionCase(rows=MIXED, cache_kind=CACHES[cache])
    case.projected[40, case.heads] = np.nan  # a key of the third row
    with running(level) as library:
        _, out, *_ = case.run(library)
    spoiled = ~np.isfinite(out).all((1, 2))
    third = case.token_rows == 2
    assert spoiled[third][-1], "a later query saw the key"
    assert not spoiled[~third].any()


@pytest.mark.parametrize("dim", [8, 32, 64, 80, 128])
@pytest.mark.parametrize("level", LEVELS)
def test_codes_and_scales_have_the_bits_of_the_torch_twins(level: str, dim: int) -> None:
    case = AttentionCase(rows=MIXED, head_dim=dim, cache_kind=Q8)
    heads = case.projected.reshape(-1, dim)
    heads *= np.logspace(-20, 20, len(heads), dtype=np.float32)[:, None]
    heads[::7] = 0
    halves = heads[3::7]  # between two codes, as far as 127 / largest is exact
    halves[:] = (case.random.integers(-127, 127, halves.shape) + 0.5) * (1 + np.arange(len(halves)))[:, None]
    halves[:, 0] = 127 * (1 + np.arange(len(halves)))
    with running(level) as library:
        qkv, _, *caches = case.run(library)
    for cache, new in zip(caches, case.new_kv(qkv)):
        codes, scale = to_codes(torch.from_numpy(new))
        assert cache.scale is not None
        assert np.array_equal(cache.values.reshape(-1, *new.shape[1:])[case.new_slots], codes.numpy())
        assert np.array_equal(cache.scale.reshape(-1, case.kv_heads)[case.new_slots], scale.numpy())
        assert codes.abs().max() == 127
        assert ((from_codes(codes, scale) - torch.from_numpy(new)).abs() <= scale[..., None] * 0.5001).all()


@pytest.mark.parametrize("level", LEVELS)
def test_the_stream_is_added_to_and_normed(level: str) -> None:
    random = np.random.default_rng(5)
    for threads in (1, 2):
        for kind, (rows, size) in itertools.product(NORMS, ((1, 2), (3, 15), (7, 16), (2, 31), (40, 576))):
            stream, x = random.standard_normal((2, rows, size), np.float32)
            weight, bias = random.standard_normal((2, size), np.float32)
            for added, norm in itertools.product((None, x), (NormWeights(weight, None, kind), NormWeights(weight, bias, kind))):
                total, got = stream if added is None else stream + added, stream.copy()
                with running(level, threads) as library:
                    normed = add_norm(library, norm.struct, got, added)
                    assert np.array_equal(add_norm(library, Norm(), got.copy(), None), total)
                assert np.array_equal(got, total) and error(normed, norm.twin(total)) < 1e-6


@pytest.mark.parametrize("level", LEVELS)
def test_a_layer_norm_subtracts_a_mean_far_larger_than_the_rest(level: str) -> None:
    random = np.random.default_rng(6)
    stream, norm = random.standard_normal((3, 200), np.float32) + np.float32(1000), NormWeights(np.ones(200, np.float32), None, "layer")
    with running(level) as library:
        assert error(add_norm(library, norm.struct, stream, None), norm.twin(stream)) < 1e-4
        stream[1, 7] = np.inf
        normed = add_norm(library, norm.struct, stream, None)
        assert np.isnan(normed[1]).any() and np.isfinite(normed[[0, 2]]).all()
