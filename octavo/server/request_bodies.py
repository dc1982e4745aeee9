"""What the three routes that generate take: fields and types, and what of other servers is refused.

What a number may be is said by `SamplingParams` and, for a server's caps, in sampling.py. A field with null was not given.
"""

from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from octavo.errors import RequestError
from octavo.server.basic import check_model
from octavo.server.body import Body, Numbers, Texts, TokenIds, read_body
from octavo.server.state import Server

MOST_LABEL_CHARS = 65_536  # of user and metadata, which nobody here reads


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(BaseModel):
    """What all three have."""

    model_config = Body.model_config

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: Numbers | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    include_timings: bool | None = None
    user: Any = None
    metadata: Any = None
    prompt_embeds: Any = None
    structured_outputs: Any = None


class CompletionBody(GenerationBody):
    prompt: str | list[Any]
    n: int | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    response_format: Any = None
    stream_options: StreamOptions | None = None
    suffix: Any = None


class ChatBody(GenerationBody):
    messages: list[Any]
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    chat_template: Any = None
    response_format: Any = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class TextOptions(Body):
    format: Any = None


class ResponseBody(GenerationBody):
    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: Any = None
    chat_template: Any = None
    conversation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    text: TextOptions | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: Any = None


# Fields of each kind that cannot be served -> the values, beside null, that ask for nothing.
_REFUSED: dict[type[GenerationBody], dict[str, tuple[object, ...]]] = {
    CompletionBody: {"suffix": (), "prompt_embeds": ()},
    ChatBody: {"chat_template": (), "prompt_embeds": ()},
    ResponseBody: {
        "background": (False,),
        "chat_template": (),
        "conversation": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_embeds": (),
        "truncation": ("disabled",),
    },
}

Kind = TypeVar("Kind", bound=GenerationBody)


async def read_generation_body(request: Request, kind: type[Kind], server: Server) -> Kind:
    body = await read_body(request, kind)
    for name, harmless in _REFUSED[kind].items():
        if (value := getattr(body, name)) is not None and value not in harmless:
            raise RequestError(f"{name} is not supported", name, "unsupported_parameter")
    for name in ("user", "metadata"):
        if _is_longer(getattr(body, name), MOST_LABEL_CHARS):
            raise RequestError(f"{name} has more than {MOST_LABEL_CHARS:,} characters", name)
    if isinstance(body, CompletionBody | ChatBody) and body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is given, but stream is not true", "stream_options")
    check_model(server, body.model)
    return body


def _is_longer(value: object, most: int) -> bool:
    """Whether the texts in it have more than `most` characters together, numbers counted as one. It looks no further than it must."""
    waiting = [value]
    while waiting and most >= 0:
        one = waiting.pop()
        if isinstance(one, dict | list) and len(one) > most:
            return True
        if isinstance(one, dict):
            most -= sum(map(len, one))
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)
        else:
            most -= len(one) if isinstance(one, str) else 1
    return most < 0
