"""Both attention backends over random block tables and mixes of rows, with NaN in every slot nothing was written to."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.attention.backend import AttentionBackend, QKNorm, Rope
from octavo.attention.contiguous import ContiguousBackend
from octavo.attention.cpu import CpuBackend
from octavo.attention.row_groups import SLACK, group_rows
from octavo.attention.spec import AttentionSpec, alibi_slopes
from octavo.attention.triton import TritonBackend, TritonRegions
from octavo.kernels.reference import products
from octavo.model_config import RopeConfig
from tests.support.batches import Pool

HEADS, KV_HEADS, HEAD_DIM, MAX_LEN = 6, 2, 16, 128
SPEC = AttentionSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5)
ANGLE = torch.outer(torch.arange(MAX_LEN).float(), 10000.0 ** -(torch.arange(HEAD_DIM // 2) / 8))
ROPE = Rope(ANGLE.cos(), ANGLE.sin())

Steps = list[dict[int, int]]  # per step: row -> new tokens


def lengths_around_a_block(size: int) -> Steps:
    """Prompts that end one before, at, and after the end of a block, decode over each edge, chunks over a past, and a late row."""
    return [
        {3: max(size - 1, 1), 0: size, 2: size + 1},
        {1: 2 * size - 1, 0: 1, 3: 1, 2: size},
        {0: 1, 1: 1, 2: 1, 3: 1},
        {3: 2 * size, 1: 1, 2: 3, 0: 1},
        {2: 1, 3: 1, 1: 2},
    ]


def projections(count: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(count, heads, HEAD_DIM, generator=generator).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return q, k, v


def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([q, k, v], dim=1).flatten(1)


def run(
    backend: type[AttentionBackend], pool: Pool, steps: Steps, spec: AttentionSpec, norms: QKNorm | None = None,
    slopes: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    outputs = []
    layer = backend(spec)
    with torch.inference_mode():
        for seed, counts in enumerate(steps):
            tokens = {row: [0] * count for row, count in counts.items()}
            batch = pool.batch(backend, tokens)
            q, k, v = projections(len(batch.token_ids), seed, pool.dtype)
            q = layer.write(merged(q, k, v), norms, ROPE, batch.caches[0], batch)
            outputs.append(layer.attend(q, batch.caches[0], batch, torch.empty_like(q), None, slopes))
            pool.advance(tokens)
    return outputs


def naive(
    steps: Steps, dtype: torch.dtype, window: int | None, norms: QKNorm | None = None, soft_cap: float | None = None,
    slopes: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Token by token and head by head in float64, over plain lists instead of caches."""
    past: dict[int, list[tuple[Tensor, Tensor]]] = {}
    outputs = []
    for seed, counts in enumerate(steps):
        q, k, v = (x.double() for x in projections(sum(counts.values()), seed, dtype))
        if norms is not None:
            q = q / (q.square().mean(-1, keepdim=True) + norms.eps).sqrt() * norms.q_weight.double()
            k = k / (k.square().mean(-1, keepdim=True) + norms.eps).sqrt() * norms.k_weight.double()
        result = []
        for i, row in enumerate(row for row, count in counts.items() for _ in range(count)):
            seen = past.setdefault(row, [])
            angle = ANGLE[len(seen)].double()
            seen.append((turn(k[i], angle), v[i]))
            keys, values = (torch.stack(part) for part in zip(*seen[-(window or MAX_LEN) :]))
            for head, query in enumerate(turn(q[i], angle)):
                kv = head // (HEADS // KV_HEADS)
                scores = keys[:, kv] @ query * HEAD_DIM**-0.5
                if slopes is not None:
                    scores -= slopes[head].double() * torch.arange(len(scores)).flip(0)
                weights = torch.softmax(scores if soft_cap is None else soft_cap * (scores / soft_cap).tanh(), 0)
                result.append(weights @ values[:, kv])
        outputs.append(torch.stack(result).view(-1, HEADS, HEAD_DIM))
    return outputs


def turn(x: Tensor, angle: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    points = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones(half).double(), angle)
    return torch.cat([points.real, points.imag], dim=-1)


def new_pool(size: int, dtype: torch.dtype = torch.float32, cache_dtype: torch.dtype | None = None) -> Pool:
    return Pool(1, KV_HEADS, HEAD_DIM, block_size=size, max_len=MAX_LEN, dtype=dtype, cache_dtype=cache_dtype, seed=size)


@pytest.mark.parametrize("window", [None, 5, 17])
@pytest.mark.parametrize("size", [1, 2, 16])
@pytest.mark.parametrize("backend", [CpuBackend, ContiguousBackend])
def test_attention_agrees_with_naive_float64(backend: type[AttentionBackend], size: int, window: int | None) -> None:
    steps = lengths_around_a_block(size)
    got = run(backend, new_pool(size), steps, replace(SPEC, window=window))
    for ours, exact in zip(got, naive(steps, torch.float32, window), strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("size", "window", "soft_cap"), [(1, None, None), (2, 5, 0.3), (16, None, 0.3)])
def test_twins_of_a_gpus_kernels_agree_with_naive_float64_and_without_blocks(size: int, window: int | None, soft_cap: float | None) -> None:
    steps, spec = lengths_around_a_block(size), replace(SPEC, window=window, soft_cap=soft_cap)
    paged, contiguous = (run(backend, new_pool(size), steps, spec) for backend in (TritonBackend, TritonRegions))
    for ours, theirs, exact in zip(paged, contiguous, naive(steps, torch.float32, window, soft_cap=soft_cap), strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=2e-6, rtol=1e-5)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("backend", [CpuBackend, ContiguousBackend, TritonBackend, TritonRegions])
def test_under_alibi_scores_fall_with_the_distance_of_keys(backend: type[AttentionBackend]) -> None:
    steps, slopes = lengths_around_a_block(2), torch.tensor(alibi_slopes(HEADS))
    got = run(backend, new_pool(2), steps, replace(SPEC, alibi=True), slopes=slopes)
    for ours, exact in zip(got, naive(steps, torch.float32, None, slopes=slopes), strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("heads", [1, 6, 8, 12, 112])
def test_slopes_of_alibi_are_those_of_transformers(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    mask = torch.ones(1, 2)
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), build_alibi_tensor(mask, heads, torch.float32)[:, 0, 1])


def test_heads_are_normalised_before_they_are_rotated() -> None:
    weights = torch.linspace(0.5, 2, HEAD_DIM)
    norms = QKNorm(weights, weights.flip(0), 1e-6)
    steps = lengths_around_a_block(2)
    got = run(CpuBackend, new_pool(2), steps, SPEC, norms)
    for ours, exact in zip(got, naive(steps, torch.float32, None, norms), strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("slow", [False, True], ids=["torch", "float32"])
def test_bfloat16_stays_near_the_exact_result(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is computed in float32, because the CPU cannot multiply bfloat16."""
    monkeypatch.setattr(products, "_cpu_multiplies_bfloat16", lambda: not slow)
    steps = lengths_around_a_block(16)
    got = run(CpuBackend, new_pool(16, torch.bfloat16), steps, SPEC)
    for ours, exact in zip(got, naive(steps, torch.bfloat16, None), strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "off"),
    [
        (torch.float32, torch.int8, 2e-2),
        (torch.bfloat16, torch.int8, 5e-2),
        (torch.float32, torch.bfloat16, 2e-2),
        (torch.bfloat16, torch.float32, 3e-2),
    ],
    ids=str,
)
def test_a_cache_of_another_dtype_costs_its_rounding_and_no_more(dtype: torch.dtype, cache_dtype: torch.dtype, off: float) -> None:
    steps = lengths_around_a_block(16)
    got = run(CpuBackend, new_pool(16, dtype, cache_dtype), steps, SPEC)
    for ours, exact in zip(got, naive(steps, dtype, None), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), exact, atol=off, rtol=off)


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (5, None), (5, 0.5)])
@pytest.mark.parametrize("size", [1, 2, 16])
@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=["as the run", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_paged_and_contiguous_are_equal_bit_for_bit(
    dtype: torch.dtype, cache_dtype: torch.dtype | None, size: int, window: int | None, soft_cap: float | None
) -> None:
    spec, steps = replace(SPEC, window=window, soft_cap=soft_cap), lengths_around_a_block(size)
    paged = run(CpuBackend, new_pool(size, dtype, cache_dtype), steps, spec)
    contiguous = run(ContiguousBackend, new_pool(size, dtype, cache_dtype), steps, spec)
    for step, (ours, theirs) in enumerate(zip(paged, contiguous, strict=True)):
        assert torch.equal(ours, theirs), f"step {step} differs"


def test_a_row_does_not_feel_its_neighbours() -> None:
    together = run(CpuBackend, new_pool(16), [{0: 40, 1: 33, 2: 90}, {0: 1, 1: 1, 2: 1}], SPEC)[1]
    pool = new_pool(16)
    run(CpuBackend, pool, [{0: 40, 1: 33, 2: 90}], SPEC)
    layer = CpuBackend(SPEC)
    batch = pool.batch(CpuBackend, {1: [0]})
    q, k, v = (x[1:2] for x in projections(3, 1, torch.float32))
    written = layer.write(merged(q, k, v), None, ROPE, batch.caches[0], batch)
    alone = layer.attend(written, batch.caches[0], batch, torch.empty_like(q))
    torch.testing.assert_close(alone[0], together[1], atol=1e-6, rtol=1e-6)


def test_groups_hold_each_row_once_and_pad_no_row_by_much_more_than_half() -> None:
    pool = Pool(1, 1, 2, num_rows=40, max_len=2048)
    contexts = torch.randint(0, 2000, (40,), generator=torch.Generator().manual_seed(5)).tolist()
    pool.lengths = dict(enumerate(contexts))
    batch = pool.batch(CpuBackend, {row: [0] * (1 if row % 4 else 7) for row in range(40)})
    groups = group_rows(batch)
    assert sorted(token for group in groups for token in group.tokens.tolist()) == list(range(len(batch.token_ids)))
    assert len(groups) <= 12
    for group in groups:
        assert group.length == group.context_len.max() <= group.context_len.min() * 1.5 + SLACK


def test_a_norm_over_all_heads_has_no_kernels_for_a_few_rows() -> None:
    others: list[dict[str, Any]] = [{}, {"sinks": True}, {"soft_cap": 30.0}, {"rotary_dim": 4}, {"rope": None}, {"qk_norm": "heads"}]
    spec = replace(SPEC, rope=RopeConfig())
    for backend in (TritonBackend, TritonRegions):
        assert all(backend(replace(spec, **field)).few_rows > 0 for field in others)
        assert backend(replace(spec, qk_norm="whole")).few_rows == backend(replace(spec, rope=None, alibi=True)).few_rows == 0
