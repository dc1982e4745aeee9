"""The torch backends read keys together and give what rows give that read all for themselves, with and without blocks."""

import pytest
import torch
from torch import Tensor

from octavo.attention.backend import AttentionBackend
from octavo.attention.contiguous import ContiguousBackend
from octavo.attention.cpu import CpuBackend
from octavo.attention.forward_batch import Cache as Buffers
from octavo.attention.forward_batch import ForwardBatch
from octavo.attention.spec import AttentionSpec
from octavo.kernels.cpu.attention_case import AttentionCase
from octavo.kernels.cpu.library import F32, Q8
from octavo.step.shared_keys import NOTHING, SharedKeys
from tests.support.native import error
from tests.support.native_attention import attended_twin, stored_twin, tree_of_rows, written_twin


def spec_of(case: AttentionCase) -> AttentionSpec:
    return AttentionSpec(
        num_heads=case.heads, num_kv_heads=case.kv_heads, head_dim=case.head_dim, scale=case.head_dim**-0.5,
        window=case.window or None, soft_cap=case.soft_cap or None,
    )  # fmt: skip


def pooled(case: AttentionCase) -> Buffers:
    """The cache after the new tokens are written. What no row has written is NaN."""
    k, v = stored_twin(case, case.past(), written_twin(case))
    found = {"k": torch.from_numpy(k.values), "v": torch.from_numpy(v.values)}
    if k.scale is not None and v.scale is not None:
        found |= {"k_scale": torch.from_numpy(k.scale), "v_scale": torch.from_numpy(v.scale)}
    for buffer in found.values():
        buffer[0] = 0  # the null block, as in every pool
    return found


def in_regions(case: AttentionCase, cache: Buffers) -> Buffers:
    """The same keys and values, those of each row in a region of its own."""
    tables = torch.from_numpy(case.tables).long()
    return {name: buffer[tables].flatten(1, 2).contiguous() for name, buffer in cache.items()}


def attended(
    backend: type[AttentionBackend], case: AttentionCase, cache: Buffers, shared: SharedKeys, dtype: torch.dtype = torch.float32,
    slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    q = torch.from_numpy(written_twin(case)[:, : case.heads].copy()).to(dtype)
    batch = ForwardBatch(
        token_ids=torch.zeros(len(q), dtype=torch.long), cache_index=torch.from_numpy(case.cache_index),
        positions=torch.from_numpy(case.positions)[None], rows=torch.arange(len(case.rows)), query_start=torch.from_numpy(case.query_start),
        context_len=torch.from_numpy(case.context_len), tables=torch.from_numpy(case.tables), slots=torch.from_numpy(case.new_slots),
        sample_index=torch.zeros(0), caches=[cache], block_size=case.block_size, shared=shared,
    )  # fmt: skip
    batch.attention = backend.prepare(batch)
    sinks = None if case.sink_scores is None else torch.from_numpy(case.sink_scores)
    with torch.inference_mode():
        return backend(spec_of(case)).attend(q, cache, batch, torch.full_like(q, torch.nan), sinks, slopes)


def check(case: AttentionCase) -> None:
    shared, cache = SharedKeys(case.shared_keys.nodes, case.shared_keys.rows), pooled(case)
    together, alone = (attended(CpuBackend, case, cache, keys) for keys in (shared, NOTHING))
    assert len(shared.nodes) and error(together.numpy(), alone.numpy()) < 1e-5
    k, v = stored_twin(case, case.past(), written_twin(case))
    assert error(together.numpy(), attended_twin(case, written_twin(case), k, v)) < 1e-5
    assert torch.equal(attended(ContiguousBackend, case, in_regions(case, cache), shared), together)


# promise: shared-reads
@pytest.mark.parametrize(("window", "cap", "sinks"), [(0, 0.0, False), (0, 3.0, True), (40, 0.0, False), (170, 1.0, True)])
@pytest.mark.parametrize("kind", [F32, Q8], ids=["float32", "int8"])
def test_a_tree_of_beginnings_is_read_once_by_rows_in_any_order(kind: int, window: int, cap: float, sinks: bool) -> None:
    for seed in range(3):
        case = tree_of_rows(seed, block_size=4 << seed, cache_kind=kind, window=window, soft_cap=cap, sinks=sinks)
        check(case)


def test_with_alibi_each_row_has_its_own_distance_to_shared_keys() -> None:
    case = tree_of_rows(3, cache_kind=F32)
    shared, cache, slopes = SharedKeys(case.shared_keys.nodes, case.shared_keys.rows), pooled(case), torch.linspace(0.01, 0.2, case.heads)
    together, alone = (attended(CpuBackend, case, cache, keys, slopes=slopes) for keys in (shared, NOTHING))
    assert len(shared.nodes) and error(together.numpy(), alone.numpy()) < 1e-5
    assert torch.equal(attended(ContiguousBackend, case, in_regions(case, cache), shared, slopes=slopes), together)


def test_many_rows_of_four_prompts() -> None:
    check(tree_of_rows(5, rows=256, longest=120, heads=2, kv_heads=1, head_dim=16, cache_kind=F32))


def test_bfloat16_costs_its_rounding_and_no_more() -> None:
    case = tree_of_rows(2, cache_kind=F32)
    cache, shared = pooled(case), SharedKeys(case.shared_keys.nodes, case.shared_keys.rows)
    rounded = attended(CpuBackend, case, {name: buffer.bfloat16() for name, buffer in cache.items()}, shared, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    assert error(rounded.float().numpy(), attended(CpuBackend, case, cache, NOTHING).numpy()) < 2e-2
