"""Refuses requests that can never be served. The error has the numbers, and names the setting that helps."""

import re
from collections.abc import Collection

from octavo.errors import RequestError
from octavo.messages import AddRequest, Beams, Limits


def length_limit(message: AddRequest, limits: Limits) -> int:
    """Returns the maximum length of a sample, prompt and output together."""
    wanted, longest = message.params.max_tokens, limits.max_model_len
    return longest if wanted is None else min(longest, len(message.prompt_token_ids) + wanted)


def check_request(message: AddRequest, limits: Limits) -> None:
    prompt, params = message.prompt_token_ids, message.params
    if not prompt:
        raise RequestError("the prompt is empty", "prompt")
    _check_ids("prompt", prompt, limits)
    _check_ids("stop_token_ids", params.stop_token_ids, limits)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), limits)
    _check_ids("logit_bias", params.logit_bias or (), limits)
    if message.beams is not None:
        _check_beams(message.beams, params.n, limits)
    if params.n > limits.max_num_seqs:
        raise RequestError(f"n is {params.n}, but at most {limits.max_num_seqs} sequences run at once (--max-num-seqs)", "n")
    _check_length(message, limits)


def _check_beams(beams: Beams, n: int, limits: Limits) -> None:
    width = beams.width
    if n > width:
        raise RequestError(f"n is {n}, but a beam search of width {width} has {width} answers", "n")
    if width > limits.max_num_seqs:
        message = f"the beam width is {width}, but at most {limits.max_num_seqs} sequences run at once (--max-num-seqs)"
        raise RequestError(message, "beam_width")
    if 2 * width > limits.vocab_size:
        raise RequestError(f"the beam width is {width}, at most half of the {limits.vocab_size} ids of the vocabulary", "beam_width")


def _check_ids(name: str, ids: Collection[int], limits: Limits) -> None:
    if not ids or (min(ids) >= 0 and max(ids) < limits.vocab_size):  # much faster than checking each id
        return
    bad = next(token for token in ids if not 0 <= token < limits.vocab_size)
    raise RequestError(f"token id {bad} in {name} is out of vocabulary, which has {limits.vocab_size} ids", name)


def _check_length(message: AddRequest, limits: Limits) -> None:
    prompt, params = message.prompt_token_ids, message.params
    if len(prompt) + (params.max_tokens or 1) > limits.max_model_len:
        raise RequestError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested {_asked(message)}; "
            f"{_knobs(message, limits)}",
            "max_tokens" if len(prompt) < limits.max_model_len else "prompt",
            "context_length_exceeded",
        )
    positions, size = length_limit(message, limits) - 1, limits.block_size  # the last token is never computed
    if positions > limits.cache_tokens:
        raise RequestError(
            f"the request may grow to {-(-positions // size)} blocks of {size} tokens, but the KV cache has {limits.cache_tokens // size}; "
            "lower max_tokens or enlarge the KV cache (--kv-cache-memory-bytes, --num-gpu-blocks-override)",
            "max_tokens",
            "context_length_exceeded",
        )


# -- pinned prefixes

MOST_TTL_SECONDS = 30 * 86400.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}")


def check_pin(name: object, ttl: object) -> None:
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        message = "name must be 1 to 128 of the characters A-Z a-z 0-9 . _ : -, and begin with a letter, a digit or _"
        raise RequestError(message, "name")
    if ttl is not None and not (type(ttl) in (int, float) and 0 < ttl <= MOST_TTL_SECONDS):  # type: ignore[operator]
        raise RequestError(f"ttl must be a number of seconds above 0 and at most {MOST_TTL_SECONDS:.0f}, got {ttl!r:.40}", "ttl")


def prefix_in_use(name: str) -> RequestError:
    return RequestError(f"there is a prefix with the name {name!r}; release it first, or use another name", "name", "prefix_exists")


def no_such_prefix(name: str) -> RequestError:
    return RequestError(f"there is no pinned prefix with the name {name!r:.140}", "name", "prefix_not_found")


def _asked(message: AddRequest) -> str:
    length, most = len(message.prompt_token_ids), message.params.max_tokens
    if most is None:
        return f"{length} tokens in the prompt"
    return f"{length + most} tokens ({length} in the prompt and {most} in the answer)"


def _knobs(message: AddRequest, limits: Limits) -> str:
    """Returns the settings that help. The model's own maximum cannot be raised."""
    knobs = ["shorten the prompt"] + ([] if message.params.max_tokens is None else ["lower max_tokens"])
    if limits.max_model_len < limits.model_max_len:
        knobs.append(f"raise --max-model-len (up to {limits.model_max_len} tokens, the model's own maximum)")
    return " or ".join(knobs)
