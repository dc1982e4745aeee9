"""The numbers of a token have the same bits alone and in any step: in products, mixtures of experts and attention, on every level."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from octavo.kernels.cpu.attention_case import AttentionCase, Cache
from octavo.kernels.cpu.levels import gate_up, matmul, mix
from octavo.kernels.cpu.library import BF16, F16, F32, Q4, Q8, Model, NativeLibrary, Step, address
from octavo.kernels.cpu.packing import Floats
from octavo.step.shared_keys import ReadCost
from tests.support.native import levels_here, running
from tests.support.native_attention import MANY_TOGETHER, MIXED, TOGETHER, tree_of_rows
from tests.support.native_mixture import Choice, MixtureWeights
from tests.support.native_weights import make_weights
from tests.support.soaked import pairs

LEVELS = levels_here()
KINDS = [(F32, 0), (BF16, 0), (F16, 0), (Q8, 16), (Q8, 64), (Q4, 32), (Q4, 128)]
CACHES = {"f32": F32, "bf16": BF16, "f16": F16, "int8": Q8}
ALONE = ReadCost(node=10**9, row=0)  # no keys are shared


@pytest.mark.parametrize(("level", "kept"), pairs(LEVELS, KINDS), ids=str)
def test_the_product_of_a_row_does_not_depend_on_the_other_rows(level: str, kept: tuple[int, int]) -> None:
    kind, group = kept
    random = np.random.default_rng(kind * 1000 + group)
    with running(level, 2) as library:
        for n, k in ((48, 100), (160, 257)):
            weights = make_weights(library, random, n, k, kind, group, tabled=kind == Q4 and k == 257)
            x = random.standard_normal((70, k), np.float32)
            runs = [matmul] if n % 32 else [matmul, gate_up]
            for run in runs:
                alone = np.concatenate([run(library, weights.packed, row[None]) for row in x])
                for rows in (2, 3, 4, 5, 7, 8, 13, 16, 17, 33, 70):
                    assert np.array_equal(run(library, weights.packed, x[:rows].copy()), alone[:rows]), (n, rows, run)


@pytest.mark.parametrize(("level", "kept"), pairs(LEVELS, [(F32, 0), (BF16, 0), (Q8, 32), (Q4, 16)], shift=1), ids=str)
def test_the_experts_of_a_token_do_not_depend_on_the_other_tokens(level: str, kept: tuple[int, int]) -> None:
    random = np.random.default_rng(kept[0])
    for choice in (Choice(5, 2, over_all=False), Choice(33, 4, normed=False), Choice(7, 2, normed=False, shared_inner=80)):
        with running(level, 2) as library:
            weights = MixtureWeights.make(library, random, choice, 72, 48, *kept)
            x = random.standard_normal((70, 72), np.float32)
            alone = np.concatenate([mix(library, weights.struct, token[None].copy()) for token in x])
            for tokens in (2, 8, 9, 17, 70):
                assert np.array_equal(mix(library, weights.struct, x[:tokens].copy()), alone[:tokens]), (choice, tokens)


def one_token(case: AttentionCase, library: NativeLibrary, qkv: Floats, caches: tuple[Cache, Cache], token: int) -> Floats:
    """The attention of a token in a step of its own, over caches that hold all keys."""
    index, table = case.cache_index[token : token + 1], case.tables[case.token_rows[token]]
    start, length = np.array([0, 1], np.int32), index + 1
    step = Step(
        num_tokens=1, num_rows=1, table_width=len(table), cache_index=address(index), query_start=address(start),
        context_len=address(length), tables=address(table),
    )  # fmt: skip
    layer = case.layer(np.cos(case.angles), np.sin(case.angles), *caches)
    model = Model(num_layers=1, cache_kind=case.cache_kind, layers=ctypes.pointer(layer))
    query, out = qkv[token].copy(), np.full((case.heads, case.head_dim), np.nan, np.float32)
    library.call.octavo_attend(ctypes.byref(model), 0, ctypes.byref(step), address(query), address(out))
    return out


def check(case: AttentionCase, level: str, some: int = 1) -> None:
    """Compares every token, or every `some`th, with the same token alone, for several numbers of threads; and with nothing shared."""
    results = []
    for threads in (1, 2, 5):
        with running(level, threads) as library:
            qkv, out, *caches = case.run(library)
            results.append(out)
            for token in range(0, len(out), some):
                assert np.array_equal(one_token(case, library, qkv, (caches[0], caches[1]), token), out[token]), (threads, token)
    assert all(np.array_equal(out, results[0]) for out in results)
    if case.shared:
        with running(level, 2) as library:
            assert np.array_equal(replace(case, cost=ALONE).run(library)[1], results[0])


@pytest.mark.parametrize(("level", "cache"), pairs(LEVELS, list(CACHES)))
def test_the_attention_of_a_token_does_not_depend_on_the_step(level: str, cache: str) -> None:
    """Chunks, single tokens and shared beginnings; pieces on several threads; windows, caps, sinks, ALiBi and gates."""
    kind = CACHES[cache]
    check(AttentionCase(rows=MIXED, cache_kind=kind, heads=6), level)
    check(AttentionCase(rows=((0, 70), (250, 20), (700, 1)), cache_kind=kind, head_dim=48, window=100, sinks=True), level)
    check(AttentionCase(rows=((1000, 40), (2040, 1)), heads=2, kv_heads=1, cache_kind=kind, soft_cap=2.0), level)
    check(AttentionCase(rows=((900, 33), (511, 1), (512, 1)), heads=3, kv_heads=1, cache_kind=kind, alibi=True, rotary_dim=0), level)
    check(AttentionCase(rows=((900, 33), (511, 1), (0, 3)), heads=6, head_dim=64, cache_kind=kind, rotary_dim=16, output_gate=True), level)
    for window in (0, 250):
        for rows, shared in (TOGETHER, MANY_TOGETHER):
            check(AttentionCase(rows=rows, heads=6, cache_kind=kind, window=window, shared=shared), level, some=5)
        check(tree_of_rows(7, longest=900, heads=6, cache_kind=kind, window=window), level, some=3)
