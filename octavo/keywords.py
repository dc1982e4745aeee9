"""`Settings`: the keywords of `LLM`, for type checkers and for messages about unknown ones."""

from collections.abc import Iterable
from typing import Any, Literal, TypedDict

from octavo.config import (
    AttentionBackendName,
    CpuIsa,
    Device,
    DistributedExecutorBackend,
    Dtype,
    KVCacheDtype,
    KVCacheLayout,
    LogprobsMode,
    MambaSSMCacheDtype,
    Quantization,
    SchedulingPolicy,
)
from octavo.vllm_names import SETTINGS, refuse_unknown


class Settings(TypedDict, total=False):
    """Every field of `EngineConfig` but the model."""

    revision: str | None
    hf_overrides: dict[str, Any] | None
    dtype: Dtype
    quantization: Quantization
    device: Device
    load_format: Literal["auto", "dummy"]
    max_model_len: int | None
    block_size: int
    kv_cache_dtype: KVCacheDtype
    kv_cache_layout: KVCacheLayout
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    state_cache_share: float
    mamba_ssm_cache_dtype: MambaSSMCacheDtype
    num_gpu_blocks_override: int | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    distributed_executor_backend: DistributedExecutorBackend
    decode_context_parallel_size: int
    enable_expert_parallel: bool
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    enable_prefix_caching: bool
    max_pinned_blocks: int | None
    scheduling_policy: SchedulingPolicy
    attention_backend: AttentionBackendName
    enforce_eager: bool
    deterministic: bool
    native: bool
    cpu_isa: CpuIsa
    pipeline_depth: int | None
    max_logprobs: int
    logprobs_mode: LogprobsMode
    generation_config: Literal["auto", "none"]
    chat_template: str | None
    skip_tokenizer_init: bool
    trace: str | None
    seed: int


def check_names(names: Iterable[str]) -> None:
    """Raises TypeError for a keyword of `LLM` that is not a setting."""
    refuse_unknown("LLM has no setting", names, Settings.__annotations__, SETTINGS)
