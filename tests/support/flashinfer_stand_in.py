"""A stand-in for FlashInfer's prefill wrapper: the same calls, by which it is as strict, computed by our twin.

It knows of the arrays it was planned with and of nothing else. `tests/kernels/test_flashinfer.py` compares it with the package.
"""

from typing import Any

import torch
from torch import Tensor

from octavo.kernels.reference.attention import paged_attention


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout in ("NHD", "HND")
        self._layout = kv_layout

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        arrays = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        assert all(array.dtype == torch.int32 and array.dim() == 1 for array in arrays) and causal and sm_scale is not None
        blocks = paged_kv_indptr.diff()
        assert len(paged_kv_indices) == paged_kv_indptr[-1] and len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert bool((blocks >= 1).all()) and bool((paged_kv_last_page_len >= 1).all()) and bool((paged_kv_last_page_len <= page_size).all())
        tables = torch.nn.utils.rnn.pad_sequence(list(paged_kv_indices.split(blocks.tolist())), batch_first=True)
        self._rows = tables, qo_indptr, (blocks - 1) * page_size + paged_kv_last_page_len
        self._shape = num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type, kv_data_type
        self._options: dict[str, Any] = {"window": window_left + 1 if window_left >= 0 else None, "soft_cap": logits_soft_cap}
        self._scale = sm_scale

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None, enable_pdl: bool | None = None
    ) -> Tensor:
        assert enable_pdl is False and out is not None and len(q) == len(out) == self._rows[1][-1]
        assert all(cache.is_contiguous() for cache in paged_kv_cache)
        k, v = (cache if self._layout == "NHD" else cache.transpose(1, 2) for cache in paged_kv_cache)
        assert self._shape == (q.shape[1], k.shape[2], q.shape[2], k.shape[1], q.dtype, k.dtype)
        return paged_attention(q, k, v, *self._rows, self._scale, out, **self._options)
