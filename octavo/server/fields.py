"""The fields of bodies: their types, those of the three routes that generate text, and the names that each of these refuses.

    class Question(Body):            strict: "1" and true are not numbers, and no number is infinite
        prompt: str

A list stops at its first wrong item (`TokenIds`, `Texts`, `Numbers`), because a million errors would take seconds and gigabytes.

`SamplingParams` checks the range of a number, requests.py the limits of this server. A field that is null counts as left out.
A field that other servers have and this one does not is refused by name (FIELDS), with what to use instead: if it were ignored, the
client would get the answer to another question. Fields that change nothing are in ACCEPTED. A field that no server has is
ignored with a warning.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

ACCEPTED = frozenset({"user", "metadata", "store", "service_tier"})  # accepted, and without effect here


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Refusal:
    """What to say about a field that this server does not support."""

    instead: str = ""  # what to use; "" if there is nothing
    harmless: tuple[object, ...] = ()  # values besides null that change nothing, and are accepted


def _first_that_is_wrong(value: object) -> object:
    """Returns only the first entry that is not a number, if there is one: pydantic has no `fail_fast` for dictionaries."""
    if not isinstance(value, dict):
        return value
    return next(({key: item} for key, item in value.items() if not _is_number(item)), value)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Numbers = Annotated[dict[str, float], BeforeValidator(_first_that_is_wrong)]  # by name
_NO_MEMORY = Refusal("the server keeps no conversations: send all messages as input")


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(BaseModel):
    """The fields that all three bodies have."""

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
    structured_outputs: Any = None


class CompletionBody(GenerationBody):
    prompt: str | list[Any]
    n: int | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    response_format: Any = None
    stream_options: StreamOptions | None = None


class ChatBody(GenerationBody):
    messages: list[Any]
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
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
    text: TextOptions | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


def _form(name: str) -> Refusal:
    return Refusal(f'use structured_outputs {{"{name}": ...}}')


_NO_BACKEND = Refusal("leave it out: every form is compiled by llguidance")

# Fields of beam search, refused where there is none: two routes have it.
_BEAMS = "use /v1/completions or /v1/chat/completions for beam search"
BEAM_FIELDS: dict[str, Refusal] = {
    "use_beam_search": Refusal(_BEAMS, (False,)),
    "beam_width": Refusal(_BEAMS),
    "length_penalty": Refusal(_BEAMS, (1, 1.0)),
    "early_stopping": Refusal(_BEAMS, (False,)),
}

# Refused in every body: fields of OpenAI's API and of vLLM's, and forms as SGLang and llama.cpp spell them.
FIELDS: dict[str, Refusal] = {
    "audio": Refusal("this server takes and writes text"),
    "modalities": Refusal("this server writes text", (["text"],)),
    "prediction": Refusal(),
    "web_search_options": Refusal(),
    "functions": Refusal("use tools"),
    "function_call": Refusal("use tool_choice"),
    "best_of": Refusal("use n for several samples, beam_width for beam search", (1,)),
    "guided_json": Refusal('use structured_outputs {"json": ...} or response_format'),
    "guided_regex": _form("regex"),
    "guided_choice": _form("choice"),
    "guided_grammar": _form("grammar"),
    "guided_json_object": Refusal('use response_format {"type": "json_object"}', (False,)),
    "guided_decoding_backend": _NO_BACKEND,
    "guided_whitespace_pattern": _NO_BACKEND,
    "json_schema": Refusal('use structured_outputs {"json": ...} or response_format'),
    "regex": _form("regex"),
    "grammar": _form("grammar"),
    "ebnf": _form("grammar"),
    "structural_tag": Refusal("use structured_outputs or tools"),
    "prompt_logprobs": Refusal("use /v1/completions with echo and logprobs"),
    "truncate_prompt_tokens": Refusal("shorten the prompt; /tokenize counts its tokens"),
    "prompt_embeds": Refusal("send text or token ids"),
    "logits_processors": Refusal("use logit_bias, bad_words or structured_outputs"),
    "chat_template": Refusal("the server has one template (--chat-template)"),
    "documents": Refusal("put them into a message"),
    "mm_processor_kwargs": Refusal("images, audio and video are not supported yet"),
    "add_generation_prompt": Refusal('use chat_template_kwargs {"add_generation_prompt": ...}', (True,)),
    "continue_final_message": Refusal('use chat_template_kwargs {"continue_final_message": ...}', (False,)),
    "n_predict": Refusal("use max_tokens"),
}

# Names that each kind of body refuses: FIELDS, and its own.
REFUSED: dict[type[GenerationBody], Mapping[str, Refusal]] = {
    CompletionBody: FIELDS | {"suffix": Refusal("put it into the prompt", ("",))},
    ChatBody: FIELDS | {"echo": Refusal(harmless=(False,)), "max_output_tokens": Refusal("use max_completion_tokens")},
    ResponseBody: FIELDS
    | BEAM_FIELDS
    | {
        "background": Refusal("use stream", (False,)),
        "conversation": _NO_MEMORY,
        "previous_response_id": _NO_MEMORY,
        "prompt": Refusal("use input and instructions"),
        "truncation": Refusal("shorten the input", ("disabled",)),
        "max_tokens": Refusal("use max_output_tokens"),
        "max_completion_tokens": Refusal("use max_output_tokens"),
        "response_format": Refusal("use text.format"),
        "top_logprobs": Refusal("use /v1/chat/completions for logprobs", (0,)),
    },
}
