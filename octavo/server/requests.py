"""A body becomes one `AddRequest` or several: its text as token ids, its parameters within the limits of this server.

Short text is encoded at once. Long text and chat templates run in a thread, so that the event loop goes on. `SamplingParams` checks
each value by itself. Here are the limits of this server, for single fields and for a whole request:

    answers    prompts * n                                              --max-prompts
    ids        of biases, bans and stops, * answers                     the engine keeps them for each of its rows
    numbers    (logprobs + 1) * tokens of all answers, and of the
               prompts if they are echoed                               an answer is made in memory
    a form     its characters * prompts                                 it goes to the engine with every prompt
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from starlette.requests import Request

from octavo.errors import RequestError, TemplateError
from octavo.inputs import Message
from octavo.messages import AddRequest, Limits
from octavo.sampling_params import SamplingParams
from octavo.server.answer_form import AnswerForm, answer_form, chat_grammar
from octavo.server.body import LARGE_BYTES, are_ids, beams_of, for_beams
from octavo.server.fields import ChatBody, CompletionBody, GenerationBody, ResponseBody
from octavo.server.records import current_arrival
from octavo.server.state import Server
from octavo.server.turns import Kind
from octavo.server_config import ServerConfig
from octavo.structured_outputs import PARAM, StructuredOutputsParams
from octavo.text.reasoning import ends_in_thought
from octavo.text.tools import ToolChoice

SHORT_CHARS = 8192  # about a millisecond of work
PORTION_CHARS = 65_536  # a list of prompts is encoded in portions of this size, so that others get their turn
MOST_STOP_CHARS = 1024
MOST_SALT_CHARS = 1024
MOST_BAD_WORDS = 256
MOST_BAD_WORD_CHARS = 128
MOST_BAD_WORDS_CHARS = 16_384  # in all words: about 50 ms to encode
MOST_STOP_IDS = 256
MOST_ALLOWED_IDS = 16_384
MOST_BIASES = 1024
LARGEST_BIAS = 100
LOWEST_PRIORITY = 2**31 - 1
MOST_IDS = 2**18  # about 20 MB in the engine, and 0.2 s to receive
MOST_NUMBERS = 250_000  # about 60 MB while the answer is made
MOST_FORM_CHARS = 2**22

# Fields with the same name in bodies and in SamplingParams. Each route passes the others as `own`.
_SAME = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop",
    "stop_token_ids", "ignore_eos", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "skip_special_tokens",
    "include_stop_str_in_output",
)  # fmt: skip
Encoded = tuple[str | None, list[int]]


async def chat_request(
    request: Request,
    server: Server,
    body: ChatBody | ResponseBody,
    own: Mapping[str, object],
    messages: Callable[[], Sequence[Message]],
    offered: list[dict[str, object]],
    choice: ToolChoice,
    structured: StructuredOutputsParams | None,
) -> tuple[str, AddRequest, AnswerForm]:
    """Returns the text of a conversation, its request, and the form of its answer.

    `own`: see `_sampling_params`. `messages`: called in a thread, because there may be many. `offered`: the tools in the prompt.
    `structured`: the form that the answer must have.
    """
    params = _sampling_params(body, own, server.config, server.llm.sampling_defaults).for_chat()
    beams = beams_of(body, server.config.max_n) if isinstance(body, ChatBody) else None
    params = _seeded(params, server) if beams is None else for_beams(params)
    terms = _terms_of(body, server.config)
    text, ids, ends = await _encode_chat(request, server, messages, offered, body.chat_template_kwargs)
    words = await _spell_words(request, server, params.bad_words)
    _check_totals(params, words, [len(ids)], server.llm.facts.limits)
    form = answer_form(server, offered, choice, body.parallel_tool_calls)
    if (options := body.chat_template_kwargs) and ends_in_thought(messages()[-1], options):
        form = replace(form, in_thought=True)
    if beams is not None and choice.mode == "required":
        raise RequestError("tool_choice cannot demand a call in a beam search; leave it out, or use_beam_search", "tool_choice")
    if structured is not None or choice.mode == "required":  # in a thread, because a form may have 200,000 characters
        written = partial(chat_grammar, structured, form, offered, choice, text)
        params = params if choice.mode != "required" else replace(params, stop=(), stop_token_ids=())  # what ends text ends no call
        params = await _held_to(server, params, await server.threads.run("bodies", request, written))
    return text, AddRequest("", ids, params, *terms, words, beams=beams, checkpoints=ends), form


async def completion_requests(
    request: Request, server: Server, body: CompletionBody, structured: StructuredOutputsParams | None
) -> tuple[list[str | None], list[AddRequest]]:
    """Returns the text of each prompt that has one, and the requests. `structured`: the form that every answer must have."""
    own = {"n": body.n, "max_tokens": body.max_tokens, "logprobs": body.logprobs, "prompt_logprobs": body.logprobs if body.echo else None}
    params = _sampling_params(body, own, server.config, server.llm.sampling_defaults)
    beams = beams_of(body, server.config.max_n)
    params = params if beams is None else for_beams(params)
    terms = _terms_of(body, server.config)
    encoded = await _encode_prompts(request, server, body.prompt)
    _check_answers(len(encoded), params.n if beams is None else beams.width, server.config.max_prompts)
    _check_form(structured, len(encoded))
    words = await _spell_words(request, server, params.bad_words)
    _check_totals(params, words, [len(ids) for _, ids in encoded], server.llm.facts.limits, bool(body.echo))
    params = await _held_to(server, params, structured)
    own_params = [params if beams is not None else _seeded(params, server) for _ in encoded]
    requests = [AddRequest("", ids, own, *terms, words, beams=beams) for (_, ids), own in zip(encoded, own_params, strict=True)]
    return [text for text, _ in encoded], requests


def _seeded(params: SamplingParams, server: Server) -> SamplingParams:
    """Gives every request a seed, so that its answer can be repeated."""
    return params if params.seed is not None else replace(params, seed=server.llm.new_seed())


async def _held_to(server: Server, params: SamplingParams, structured: StructuredOutputsParams | None) -> SamplingParams:
    """Returns the parameters with the form in them. Raises RequestError if the form cannot be compiled."""
    if structured is None:
        return params
    params = replace(params, structured_outputs=structured)
    await server.grammars.check(structured, current_arrival().caller.name)
    return params


async def _encode_chat(
    request: Request,
    server: Server,
    messages: Callable[[], Sequence[Message]],
    tools: Sequence[Message],
    options: Mapping[str, object] | None,
) -> tuple[str, list[int], list[int]]:
    """Returns the text of a conversation, its ids, and where its messages end if the model can use that."""
    encoder, facts = server.llm.encoder, server.llm.facts

    def encode() -> tuple[str, list[int], list[int]]:
        whole = messages()
        try:
            text, ids = encoder.encode_chat(whole, tools or None, options or {}, facts.limits.max_model_len)
        except TemplateError as error:  # now it names a field, which `named` can rename for other routes
            raise RequestError(str(error), "messages") from error
        return text, ids, encoder.message_ends(whole, (text, ids), tools or None, options or {}) if facts.keeps_states else []

    # always in a thread: a template from a model's files may take seconds even for short messages
    return await server.threads.run(await _kind(request), request, encode)


async def _encode_prompts(request: Request, server: Server, prompt: str | list[object]) -> list[Encoded]:
    """Returns the text (None if the client sent ids) and the ids of each prompt. `prompt`: a text, a list of ids, or a list of either."""
    prompts = _as_prompts(prompt, server.config.max_prompts)
    limit = server.llm.facts.limits.max_model_len

    def encode_all(portion: Sequence[str | list[int]]) -> list[Encoded]:
        return [(None, one) if isinstance(one, list) else server.llm.encoder.encode(one, limit) for one in portion]

    if isinstance(prompts[0], list) or sum(map(len, prompts)) <= SHORT_CHARS:
        return encode_all(prompts)
    kind = await _kind(request)
    encoded: list[Encoded] = []
    for portion in _portions(prompts):
        encoded += await server.threads.run(kind, request, partial(encode_all, portion))
    return encoded


async def encode_prompt(request: Request, server: Server, prompt: str | list[int]) -> list[int]:
    """Returns the ids of one prompt, a text or ids."""
    encode = partial(server.llm.encoder.encode, prompt, server.llm.facts.limits.max_model_len)
    return (await server.threads.run(await _kind(request), request, encode))[1]


async def encode_beginning(
    request: Request, server: Server, messages: Sequence[Message], tools: Sequence[Message], options: Mapping[str, object] | None
) -> list[int]:
    """Returns the ids with which every conversation begins that begins with these messages."""
    limit = server.llm.facts.limits.max_model_len
    encode = partial(server.llm.encoder.encode_beginning, messages, tools or None, options or {}, limit)
    return (await server.threads.run(await _kind(request), request, encode))[1]


async def _spell_words(request: Request, server: Server, words: Sequence[str]) -> list[list[int]]:
    """Returns `bad_words` as token ids. It runs in a thread, because every word is encoded by itself."""
    return await server.threads.run(await _kind(request), request, partial(server.llm.encoder.spellings, words)) if words else []


async def _kind(request: Request) -> Kind:
    """Returns the pool of threads for the text of a request."""
    return "long_texts" if len(await request.body()) > LARGE_BYTES else "short_texts"


def _portions(prompts: Sequence[str | list[int]]) -> Iterator[list[str | list[int]]]:
    portion: list[str | list[int]] = []
    num_chars = 0
    for prompt in prompts:
        portion.append(prompt)
        num_chars += len(prompt)
        if num_chars >= PORTION_CHARS:
            yield portion
            portion, num_chars = [], 0
    if portion:
        yield portion


def _as_prompts(prompt: str | list[object], most: int) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("the prompt is empty", "prompt")
    if type(prompt[0]) is int:
        return [_as_ids(prompt)]
    if len(prompt) > most:
        raise RequestError(f"prompt is a list of {len(prompt):,} prompts, at most {most} are allowed (--max-prompts)", "prompt")
    if all(isinstance(one, str) for one in prompt):
        return list(prompt)  # type: ignore[arg-type]
    return [_as_ids(one) for one in prompt]


def _as_ids(ids: object) -> list[int]:
    if not (isinstance(ids, list) and are_ids(ids)):
        raise RequestError("prompt must be a text, a list of token ids, or a list of such texts or lists", "prompt")
    if not ids:
        raise RequestError("the prompt is empty", "prompt")
    return ids


def _sampling_params(
    body: GenerationBody, own: Mapping[str, object], config: ServerConfig, defaults: Mapping[str, object]
) -> SamplingParams:
    """Returns the parameters of a body. `own`: the fields that this route names differently. `defaults`: for fields that are not set."""
    values = {name: getattr(body, name) for name in _SAME} | dict(own)
    _check_caps(values, config)
    params = SamplingParams(**{name: value for name, value in values.items() if value is not None})
    return params.with_defaults(defaults)


def _check_caps(values: Mapping[str, object], config: ServerConfig) -> None:
    """Raises RequestError for values above a limit, before anything is copied. SamplingParams checks types and signs."""
    _at_most("temperature", values["temperature"], config.max_temperature)
    _at_most("n", values.get("n"), config.max_n)
    stops = [values["stop"]] if isinstance(values["stop"], str) else values["stop"]
    _few("stop", stops, config.max_stop, MOST_STOP_CHARS)
    _few("bad_words", values["bad_words"], MOST_BAD_WORDS, MOST_BAD_WORD_CHARS)
    _few_chars("bad_words", values["bad_words"], MOST_BAD_WORDS_CHARS)
    _few("stop_token_ids", values["stop_token_ids"], MOST_STOP_IDS)
    _few("allowed_token_ids", values["allowed_token_ids"], MOST_ALLOWED_IDS)
    _few("logit_bias", values["logit_bias"], MOST_BIASES)
    if isinstance(bias := values["logit_bias"], dict):
        for token, amount in bias.items():
            if not -LARGEST_BIAS <= amount <= LARGEST_BIAS:
                message = f"logit_bias of token {token[:20]!r} must be from {-LARGEST_BIAS} to {LARGEST_BIAS}, got {amount!r}"
                raise RequestError(message, "logit_bias")


def _at_most(name: str, value: object, most: float) -> None:
    if isinstance(value, (int, float)) and value > most:
        raise RequestError(f"{name} is {value}, at most {most:g} is allowed", name)


def _few(name: str, values: object, most: int, chars: int = 0) -> None:
    if not isinstance(values, (list, dict)):
        return
    if len(values) > most:
        raise RequestError(f"{name} has {len(values):,} entries, at most {most:,} are allowed", name)
    longest = max((len(value) for value in values if isinstance(value, str)), default=0) if chars else 0
    if longest > chars:
        raise RequestError(f"{name} has an entry of {longest:,} characters, at most {chars} are allowed", name)


def _few_chars(name: str, values: object, most: int) -> None:
    if isinstance(values, list) and (chars := sum(map(len, values))) > most:
        raise RequestError(f"{name} has {chars:,} characters in all, at most {most:,} are allowed", name)


def _terms_of(body: GenerationBody, config: ServerConfig) -> tuple[int, str]:
    """Returns priority and salt, in the order of `AddRequest`. Checks the time-out, too: all refusals come before the work."""
    terms = _priority_of(body), salt_of(body.cache_salt)
    timeout_of(body, config)
    return terms


def _priority_of(body: GenerationBody) -> int:
    """Returns the priority. 0 is the default and comes first, so a client can only let others go ahead."""
    priority = body.priority or 0
    if not 0 <= priority <= LOWEST_PRIORITY:
        raise RequestError(f"priority must be an integer from 0 to {LOWEST_PRIORITY}, got {priority}", "priority")
    return priority


def timeout_of(body: GenerationBody, config: ServerConfig) -> float:
    """Returns the seconds that a request may take."""
    if body.timeout is None:
        return config.request_timeout
    if not (body.timeout > 0 and math.isfinite(body.timeout)):
        raise RequestError(f"timeout must be a finite number of seconds above 0, got {body.timeout}", "timeout")
    return min(body.timeout, config.request_timeout)


def salt_of(cache_salt: str | None) -> str:
    """Returns the salt of a body, checked. Without one it is empty."""
    if cache_salt is None:
        return ""
    if not 0 < len(cache_salt) <= MOST_SALT_CHARS:
        raise RequestError(f"cache_salt must have 1 to {MOST_SALT_CHARS} characters, it has {len(cache_salt):,}", "cache_salt")
    return cache_salt


def _check_answers(num_prompts: int, n: int, most: int) -> None:
    if num_prompts * n > most:
        raise RequestError(f"{num_prompts} prompts of {n} samples each are more than {most} answers (--max-prompts)", "n")


def _check_totals(
    params: SamplingParams, bad_words: Sequence[Sequence[int]], prompts: Sequence[int], limits: Limits, echo: bool = False
) -> None:
    """Raises RequestError if all answers together are too large.

    `bad_words`: as token ids. `prompts`: the length of each. `echo`: whether prompts are repeated before each answer.
    """
    _check_ids(params, bad_words, len(prompts) * params.n)
    _check_numbers(params, prompts, limits, echo)


def _check_form(structured: StructuredOutputsParams | None, num_prompts: int) -> None:
    chars = 0 if structured is None else structured.num_chars
    if chars * num_prompts > MOST_FORM_CHARS:
        message = f"{PARAM} has {chars:,} characters for each of {num_prompts:,} prompts, at most {MOST_FORM_CHARS:,} in all are allowed"
        raise RequestError(f"{message}; send fewer prompts at once", PARAM)


def _check_ids(params: SamplingParams, bad_words: Sequence[Sequence[int]], answers: int) -> None:
    counts = {
        "logit_bias": len(params.logit_bias or ()),
        "allowed_token_ids": len(params.allowed_token_ids or ()),
        "stop_token_ids": len(params.stop_token_ids),
        "bad_words": sum(map(len, bad_words)),
    }
    if sum(counts.values()) * answers > MOST_IDS:
        name = max(counts, key=counts.__getitem__)
        message = f"{name} has {counts[name]:,} token ids for each of {answers:,} answers; {', '.join(counts)} may have {MOST_IDS:,} in all"
        raise RequestError(f"{message}; send fewer prompts at once or lower n", name)


def _check_numbers(params: SamplingParams, prompts: Sequence[int], limits: Limits, echo: bool) -> None:
    if params.logprobs is None and not echo:
        return
    longest = limits.max_model_len if params.max_tokens is None else params.max_tokens
    answered = sum(max(min(longest, limits.max_model_len - length), 0) for length in prompts) if params.logprobs is not None else 0
    numbers = params.n * (1 + (params.logprobs or 0)) * (answered + (sum(prompts) if echo else 0))
    if numbers > MOST_NUMBERS:
        name = "echo" if params.logprobs is None else "logprobs"
        message = f"{name} may return {numbers:,} numbers, at most {MOST_NUMBERS:,} are allowed: one for each token of an answer"
        knobs = "send fewer prompts at once, or lower max_tokens, n or logprobs"
        raise RequestError(f"{message}, and one for each alternative; {knobs}", name)
