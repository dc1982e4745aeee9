"""What programs give to `LLM`: the forms of a prompt and how each is read, and `Settings`, the keywords."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

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
from octavo.errors import RequestError, nearest
from octavo.vllm_names import PROMPT_FIELDS, SETTINGS, refuse_unknown


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]  # its text, for the output only: the ids are what the model reads


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
Message = Mapping[str, object]
Conversation = Sequence[Message]

FORMS = 'a prompt is a str, a list of token ids, {"prompt": ...} or {"prompt_token_ids": [...]}'


def prompt_parts(prompt: object) -> tuple[str | None, list[int] | None]:
    """Returns the text and the token ids of a prompt that is not a str. It has at least one of them."""
    if isinstance(prompt, Mapping):
        return _parts_of_fields(prompt)
    return None, _ids(prompt)


def _parts_of_fields(fields: Mapping[object, object]) -> tuple[str | None, list[int] | None]:
    known = TokensPrompt.__annotations__
    for name, value in fields.items():
        if name not in known and value is not None:
            hint = PROMPT_FIELDS.get(str(name))
            raise RequestError(f"a prompt has no field {str(name)[:40]!r}{f': {hint}' if hint else nearest(str(name), known)}", "prompt")
    text, ids = fields.get("prompt"), fields.get("prompt_token_ids")
    if (text is None and ids is None) or not isinstance(text, str | None):
        raise RequestError(FORMS, "prompt")
    return text, None if ids is None else _ids(ids)


def _ids(value: object) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not all(type(token) is int for token in value):
        raise RequestError(FORMS, "prompt")
    return list(value)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Returns one prompt or many as a list. A flat list of ints is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be one prompt or a list of them, not {type(prompts).__name__}", "prompts")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def as_conversations(messages: Conversation | Sequence[Conversation]) -> Sequence[Conversation]:
    """Returns one conversation or many as a list. An empty list is a conversation without messages, which the template refuses."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError(f"messages must be a list of messages or of such lists, not {type(messages).__name__}", "messages")
    if not messages or isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return messages  # type: ignore[return-value]


class Settings(TypedDict, total=False):
    """The keywords of `LLM`, for type checkers and for messages about unknown ones: every field of `EngineConfig` but the model."""

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
