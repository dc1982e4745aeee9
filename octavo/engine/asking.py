"""From sampling parameters and ids to a request for the engine, with what only the text side can check."""

from octavo.config import EngineConfig
from octavo.errors import RequestError
from octavo.messages import AddRequest
from octavo.sampling_params import SamplingParams


def to_request(
    request_id: str,
    prompt_token_ids: list[int],
    params: SamplingParams,
    bad_words: list[list[int]],
    config: EngineConfig,
    priority: int = 0,
    cache_salt: str = "",
) -> AddRequest:
    """`bad_words`: those of the parameters as token ids."""
    for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if value is not None and value > config.max_logprobs:
            raise RequestError(f"{name} is {value}, max_logprobs is {config.max_logprobs}", name)
    if params.stop and config.skip_tokenizer_init:
        raise RequestError("stop strings need a tokenizer, and skip_tokenizer_init is set; use stop_token_ids", "stop")
    return AddRequest(request_id, prompt_token_ids, params, priority, cache_salt, bad_words)
