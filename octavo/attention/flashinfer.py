"""Paged attention with FlashInfer, if it is installed and selected. Our kernel writes the cache, FlashInfer's kernels read it.

    our tables    [ 7 2 5 . ]  [ 9 4 . . ]  [ . . . . ]      10, 5 and 0 tokens in blocks of 4; the third row is padding
    its arrays    indices 7 2 5 9 4 .    indptr 0 3 5 6    last length 2 1 1

It plans each step on the host. So a step waits for the device, and cannot be captured as a CUDA graph. One prefill
kernel computes rows of one query and of more. Layers with the same spec share a plan.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.attention.backend import QKNorm, Rope
from octavo.attention.capabilities import FLASHINFER, Capabilities
from octavo.attention.forward_batch import Cache, ForwardBatch
from octavo.attention.spec import AttentionSpec
from octavo.attention.triton import norm_weights
from octavo.errors import ConfigError
from octavo.kernels.cache_layout import tokens_together
from octavo.kernels.ops import write_kv

try:
    import flashinfer
except ModuleNotFoundError as error:
    raise ConfigError("attention_backend is flashinfer, which is not installed: pip install flashinfer-python") from error

WORKSPACE = 128 * 2**20  # bytes, as FlashInfer recommends; the plans of a step share it, since layers run in sequence


class Planned:
    """A step in FlashInfer's format. The wrapper for a kind of layer is created by the first such layer."""

    def __init__(self, batch: ForwardBatch) -> None:
        size = batch.block_size
        self.query_start = batch.query_start.to("cpu", torch.int32)
        self.num_query = int(self.query_start[-1])
        length = batch.context_len.to("cpu", torch.int32).clamp(min=1)  # padding reads one token of a block, and its result is ignored
        blocks = (length + size - 1) // size
        self.block_start = torch.nn.functional.pad(blocks.cumsum(0, dtype=torch.int32), (1, 0))
        self.last_length = length - (blocks - 1) * size
        used = torch.arange(batch.tables.shape[1]) < blocks[:, None]  # [R, B]
        self.blocks = batch.tables[used.to(batch.tables.device)].int()
        self.block_size = size
        self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=batch.tables.device)
        self._wrappers: dict[AttentionSpec, Any] = {}

    def wrapper(self, spec: AttentionSpec, cache: Tensor) -> Any:
        if spec not in self._wrappers:
            layout = "NHD" if tokens_together(cache) == 1 else "HND"
            self._wrappers[spec] = wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout=layout)
            wrapper.plan(
                self.query_start, self.block_start, self.blocks, self.last_length, spec.num_heads, spec.num_kv_heads, spec.head_dim,
                self.block_size, causal=True, sm_scale=spec.scale, window_left=-1 if spec.window is None else spec.window - 1,
                logits_soft_cap=spec.soft_cap, q_data_type=cache.dtype, kv_data_type=cache.dtype,
            )  # fmt: skip
        return self._wrappers[spec]


class FlashInferBackend:
    capabilities: ClassVar[Capabilities] = FLASHINFER

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.few_rows = 0

    @staticmethod
    def prepare(batch: ForwardBatch) -> Planned:
        return Planned(batch)

    def write(self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: Cache, batch: ForwardBatch) -> Tensor:
        return write_kv(qkv, norm_weights(norms), rope.cos, rope.sin, batch.rope_positions, batch.slots, cache["k"], cache["v"])

    def attend(
        self, q: Tensor, cache: Cache, batch: ForwardBatch, out: Tensor, sinks: Tensor | None = None, slopes: Tensor | None = None
    ) -> Tensor:
        planned: Planned = batch.attention
        count = planned.num_query  # in a padded step, the rows after them are undefined
        if count:
            k, v = (cache[name] if cache[name].is_contiguous() else cache[name].transpose(1, 2) for name in "kv")
            wrapper = planned.wrapper(self.spec, cache["k"])
            wrapper.run(q[:count], (k, v), out=out[:count], enable_pdl=False)  # it does not follow our rules for PDL
        return out
