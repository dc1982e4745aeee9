"""The bodies of the three routes that generate text: their fields with their types, the names that each of them refuses, and the
form of the answer or the beam search that they ask for.

`SamplingParams` checks the range of a number, requests.py the limits of this server. A field that is null counts as left out.
A field that other servers have and this one does not is refused by name (FIELDS), with what to use instead: if it were ignored, the
client would get the answer to another question. Fields that change nothing are in body.ACCEPTED. A field that no server has is
ignored with a warning.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from octavo.errors import RequestError
from octavo.messages import Beams
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.server.body import Body, Numbers, Refusal, Texts, TokenIds, check_model, named, read_body
from octavo.server.state import Server
from octavo.structured_outputs import PARAM, StructuredOutputsParams, structured_outputs
from octavo.text.tools import ToolChoice

_NO_MEMORY = Refusal("the server keeps no conversations: send all messages as input")
MOST_LABEL_CHARS = 65_536  # in user and metadata, which this server does not use


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
_REFUSED: dict[type[GenerationBody], Mapping[str, Refusal]] = {
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

Kind = TypeVar("Kind", bound=GenerationBody)


async def read_generation_body(request: Request, kind: type[Kind], server: Server) -> Kind:
    """Returns the checked body of a route that generates. Raises for one that is wrong, or names another model."""
    body = await read_body(request, kind, _REFUSED[kind])
    for name in ("user", "metadata"):
        if _is_longer(getattr(body, name), MOST_LABEL_CHARS):
            raise RequestError(f"{name} has more than {MOST_LABEL_CHARS:,} characters", name)
    if isinstance(body, CompletionBody | ChatBody) and body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is given, but stream is not true", "stream_options")
    check_model(server, body.model)
    return body


def _is_longer(value: object, most: int) -> bool:
    """Returns whether the texts in a value have more than `most` characters in all. Other values count as one. It stops at the limit."""
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


# -- the form of an answer that a body asks for

TYPES = ("text", "json_object", "json_schema")


def asked_form(extra: object, response_format: object, param: str) -> StructuredOutputsParams | None:
    """Returns the form asked for by `structured_outputs` or by the response format, which this route calls `param`. Both are refused."""
    by_format = _of_format(response_format, param)
    if extra is None:
        return by_format
    if by_format is not None:
        raise RequestError(f"{PARAM} and {param} exclude each other", PARAM)
    return structured_outputs(extra)


def _of_format(value: object, param: str) -> StructuredOutputsParams | None:
    """Returns the form in a response format. A schema is in "json_schema" (chat) or beside the type (responses); `strict` has no effect."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or kind not in TYPES:
        raise RequestError(f'{param} must be an object with a "type" of {", ".join(TYPES)}', param)
    if kind != "json_schema":
        return StructuredOutputsParams(json_object=True) if kind == "json_object" else None
    inner = value.get("json_schema", value)
    if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping):
        raise RequestError(f'{param} has no schema: "schema" must be an object', param)
    if not isinstance(inner.get("name"), str | None) or not isinstance(inner.get("strict"), bool | None):
        raise RequestError(f'{param}: "name" must be text and "strict" true or false', param)
    with named({PARAM: param}):
        return structured_outputs({"json": inner["schema"]})


def param_of(extra: object, param: str, choice: ToolChoice | None = None) -> str:
    """Returns the field that an error about the grammar names."""
    return "tools" if choice is not None and choice.mode == "required" else PARAM if extra is not None else param


# -- beam search

# A search gives its answers when all are there, and ranks by the model's own logprobs: nothing may change these, or end a beam by its text.
_BESIDE = (
    "stream", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words",
    "stop", "stop_token_ids", "structured_outputs", "response_format",
)  # fmt: skip
_HARMLESS = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_tokens": 0}
_OWN = ("beam_width", "length_penalty", "early_stopping")


def beams_of(body: CompletionBody | ChatBody, most: int) -> Beams | None:
    """Returns the search that a body asks for, if it does. `most`: the widest that this server allows"""
    if not body.use_beam_search:
        for name in _OWN:
            if getattr(body, name) not in (None, False, *((1,) if name == "length_penalty" else ())):
                raise RequestError(f"{name} is given, but use_beam_search is not true", name)
        return None
    for name in _BESIDE:
        value = getattr(body, name)
        if value and value != _HARMLESS.get(name) and value != {"type": "text"}:
            raise RequestError(f"{name} cannot be used with beam search; leave it out, or use_beam_search", name)
    if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        raise RequestError("echo with logprobs cannot be used with beam search; leave one of them out, or use_beam_search", "echo")
    width = (body.n or 1) if body.beam_width is None else body.beam_width
    if width > most:
        raise RequestError(f"the beam width is {width}, at most {most} is allowed", "beam_width" if body.beam_width else "n")
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    checked = BeamSearchParams(width, 1, length_penalty=penalty, early_stopping=body.early_stopping or False)
    return Beams(checked.beam_width, checked.length_penalty, checked.early_stopping)


def for_beams(params: SamplingParams) -> SamplingParams:
    """Returns the same without what says how tokens are drawn, wherever it came from: beams are not drawn."""
    return replace(params, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=None, repetition_penalty=1.0)
