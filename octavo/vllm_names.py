"""Names of vLLM that Octavo does not have, each with what to use instead. Errors about an unknown name say it.

docs/from-vllm.md lists all of them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from inspect import signature
from typing import TypeVar

from octavo.errors import nearest

_NO_SPECULATION = "there is no speculative decoding; leave it out"
_NO_LORA = "there are no LoRA adapters; merge the adapter into the weights before"
_NO_MEDIA = "images, audio and video are not supported yet; send text"
_TEXT_ONLY = "Octavo generates text; there are no embeddings, scores or classes"
_OWN_TOKENIZER = "the tokenizer in the model's folder is always used; leave it out"
_NO_OFFLOAD = "nothing is moved to the host's memory: a preempted request is computed again; leave it out"
_LLGUIDANCE = "grammars are always compiled by llguidance; leave it out"
_FORM = "use structured_outputs=StructuredOutputsParams(...)"
_CONSTRAIN = "use logit_bias, allowed_token_ids, bad_words or structured_outputs"
_STATISTICS = "use llm.stats() or llm.get_metrics(); leave it out"
_PROFILE = 'use LLM(trace="trace.json"), which writes every step to a file'
_SLEEP = "close() frees all memory, and a new LLM loads the model again"

SETTINGS: Mapping[str, str] = {  # keywords of LLM and EngineArgs
    "speculative_config": _NO_SPECULATION,
    "speculative_model": _NO_SPECULATION,
    "num_speculative_tokens": _NO_SPECULATION,
    "enable_lora": _NO_LORA,
    "max_loras": _NO_LORA,
    "max_lora_rank": _NO_LORA,
    "trust_remote_code": "code of a model is never run; leave it out (docs/models.md lists the families that are built in)",
    "tokenizer": _OWN_TOKENIZER,
    "tokenizer_mode": _OWN_TOKENIZER,
    "tokenizer_revision": "use revision, which is that of the model and its tokenizer",
    "swap_space": _NO_OFFLOAD,
    "kv_offloading_size": _NO_OFFLOAD,
    "kv_transfer_config": _NO_OFFLOAD,
    "preemption_mode": _NO_OFFLOAD,
    "mamba_cache_dtype": "all states of recurrent layers have the type of mamba_ssm_cache_dtype, float32; leave it out",
    "mamba_cache_mode": "states are always kept where later prompts continue, if enable_prefix_caching is on; leave it out",
    "cpu_offload_gb": "weights are not moved to the host's memory; use quantization='int8' or 'int4' to make them smaller",
    "compilation_config": "CUDA graphs need no setting; enforce_eager=True turns them off",
    "max_seq_len_to_capture": "CUDA graphs need no setting; enforce_eager=True turns them off",
    "disable_custom_all_reduce": "there is no such choice; leave it out",
    "enable_chunked_prefill": "it is always on; max_num_batched_tokens sets the size of a chunk",
    "async_scheduling": "use pipeline_depth: 2 steps in flight, or 1",
    "num_scheduler_steps": "use pipeline_depth: 2 steps in flight, or 1",
    "disable_log_stats": _STATISTICS,
    "enable_log_requests": "it is a flag of octavo serve; leave it out",
    "disable_log_requests": "requests are not logged; leave it out",
    "served_model_name": "it is a flag of octavo serve; leave it out",
    "data_parallel_size": "run octavo serve with --data-parallel-size, or one LLM in each process",
    "task": _TEXT_ONLY,
    "runner": _TEXT_ONLY,
    "pooler_config": _TEXT_ONLY,
    "limit_mm_per_prompt": _NO_MEDIA,
    "mm_processor_kwargs": _NO_MEDIA,
    "allowed_local_media_path": _NO_MEDIA,
    "enable_prompt_embeds": "a prompt is text or token ids; leave it out",
    "guided_decoding_backend": _LLGUIDANCE,
    "structured_outputs_config": _LLGUIDANCE,
    "reasoning_parser": "it is a flag of octavo serve; llm.chat returns the whole text",
    "logits_processors": _CONSTRAIN,
    "override_generation_config": "pass SamplingParams; generation_config='none' ignores the model's values",
    "rope_scaling": "use hf_overrides={'rope_scaling': ...}",
    "rope_theta": "use hf_overrides={'rope_theta': ...}",
    "download_dir": "set the environment variable HF_HOME",
    "hf_token": "set the environment variable HF_TOKEN",
    "enable_sleep_mode": _SLEEP,
}

ARGUMENTS: Mapping[str, str] = {  # of generate, chat and beam_search
    "params": "it is called sampling_params",
    "lora_request": _NO_LORA,
    "prompt_adapter_request": _NO_LORA,
    "guided_options_request": "use SamplingParams(structured_outputs=StructuredOutputsParams(...))",
    "prompt_token_ids": 'give {"prompt_token_ids": [...]} as a prompt',
    "tokenization_kwargs": "shorten the prompt, or give it as token ids; leave it out",
    "mm_processor_kwargs": _NO_MEDIA,
    "chat_template_content_format": "content may always be text or a list of text parts; leave it out",
    "concurrency_limit": "max_num_seqs of the LLM limits how many sequences run; leave it out",
    "trace_headers": "octavo serve reads them from HTTP; leave it out",
    "data_parallel_rank": "run octavo serve with --data-parallel-size",
}

SAMPLING: Mapping[str, str] = {  # fields of SamplingParams
    "guided_decoding": _FORM,
    "use_beam_search": "use LLM.beam_search(prompts, BeamSearchParams(...))",
    "length_penalty": "use LLM.beam_search(prompts, BeamSearchParams(...))",
    "early_stopping": "use LLM.beam_search(prompts, BeamSearchParams(...))",
    "best_of": "use n, and choose by cumulative_logprob",
    "logits_processors": _CONSTRAIN,
    "truncate_prompt_tokens": "shorten the prompt, or give it as token ids",
    "spaces_between_special_tokens": "no spaces are added between special tokens; leave it out",
    "flat_logprobs": "logprobs are a list of dicts; leave it out",
    "logprob_token_ids": "use logprobs=N, which gives the N most likely tokens",
    "extra_args": "nothing reads them; leave it out",
    "skip_clone": "the engine always has its own copy; leave it out",
    "stream_interval": "all that is new comes at once; leave it out",
    "thinking_token_budget": "use max_tokens, or chat_template_kwargs={'enable_thinking': False}",
    "repetition_detection": "use repetition_penalty or frequency_penalty",
    "skip_reading_prefix_cache": "use LLM(enable_prefix_caching=False) or llm.reset_prefix_cache()",
}

FORM_FIELDS: Mapping[str, str] = {  # of StructuredOutputsParams
    "disable_any_whitespace": "white space in JSON is always bounded; leave it out",
    "whitespace_pattern": "white space in JSON is always bounded; leave it out",
    "disable_additional_properties": 'write "additionalProperties": false into the schema',
    "backend": _LLGUIDANCE,
}

PROMPT_FIELDS: Mapping[str, str] = {
    "multi_modal_data": _NO_MEDIA,
    "mm_processor_kwargs": _NO_MEDIA,
    "prompt_embeds": "give text or token ids",
    "encoder_prompt": "there are no encoder-decoder models",
    "cache_salt": "it is a field of HTTP requests; leave it out",
}

IMPORTS: Mapping[str, str] = {  # names imported from the package
    "LLMEngine": "use LLM, or AsyncLLM",
    "AsyncLLMEngine": "use AsyncLLM",
    "GuidedDecodingParams": "use StructuredOutputsParams",
    "LoRARequest": _NO_LORA,
    "PoolingParams": _TEXT_ONLY,
    "PoolingRequestOutput": _TEXT_ONLY,
    "EmbeddingRequestOutput": _TEXT_ONLY,
    "ClassificationRequestOutput": _TEXT_ONLY,
    "ScoringRequestOutput": _TEXT_ONLY,
    "PromptType": "annotate prompts as str, list[int], TextPrompt or TokensPrompt",
    "FlexibleArgumentParser": "use argparse; the keywords of LLM are in docs/python.md",
    "ModelRegistry": "docs/models.md lists the families that are built in",
    "initialize_ray_cluster": "use LLM(distributed_executor_backend='ray')",
}

ATTRIBUTES: Mapping[str, str] = {  # of LLM and AsyncLLM
    "encode": _TEXT_ONLY,
    "embed": _TEXT_ONLY,
    "classify": _TEXT_ONLY,
    "reward": _TEXT_ONLY,
    "score": _TEXT_ONLY,
    "llm_engine": "use the methods of LLM; llm.config has the settings",
    "set_tokenizer": _OWN_TOKENIZER,
    "start_profile": _PROFILE,
    "stop_profile": _PROFILE,
    "sleep": _SLEEP,
    "wake_up": _SLEEP,
    "collective_rpc": "there is no way to call a function on the ranks",
    "apply_model": "there is no way to call a function on the model",
    "add_lora": _NO_LORA,
}


def explained(name: str, instead: Mapping[str, str], known: Collection[str] = ()) -> str:
    """Returns the end of a message about an unknown name: what to use instead, or the most similar known name."""
    return f": {instead[name]}" if name in instead else nearest(name, known)


def refuse_unknown(what: str, names: Iterable[str], known: Collection[str], instead: Mapping[str, str]) -> None:
    """Raises TypeError for the first name that is not known, as Python does for an unknown keyword."""
    for name in names:
        if name not in known:
            raise TypeError(f"{what} {name!r}{explained(name, instead, known)}")


def refuse_arguments(method: Callable[..., object], unknown: Mapping[str, object]) -> None:
    """Refuses keywords that a method does not have. One of vLLM's that is None is accepted: it asks for nothing."""
    names = [name for name, value in unknown.items() if value is not None or name not in ARGUMENTS]
    if names:
        known = [name for name in signature(method).parameters if name != "unknown"]
        refuse_unknown(f"{method.__name__} has no argument", names, known, ARGUMENTS)


Class = TypeVar("Class", bound=type)


def names_explained(instead: Mapping[str, str]) -> Callable[[Class], Class]:
    """Returns a decorator for a dataclass. An unknown keyword is then a TypeError that says what to use instead."""

    def decorated(cls: Class) -> Class:
        shown = signature(cls)

        def new(kind: type, *values: object, **names: object) -> object:
            refuse_unknown(f"{cls.__name__} has no field", names, shown.parameters, instead)
            return object.__new__(kind)

        cls.__new__ = new  # type: ignore[method-assign, assignment]
        cls.__signature__ = shown  # type: ignore[attr-defined]  # so that help() shows the fields
        return cls

    return decorated
