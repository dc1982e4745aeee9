"""A body becomes an `Ask`, or several: its parameters within the limits of this server, its text as token ids, the form of its answer.

Short text is encoded at once. Long text and chat templates run in a thread, so that the event loop goes on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from starlette.requests import Request

from octavo.engine.async_llm import Ask
from octavo.errors import RequestError, TemplateError
from octavo.server.answer_form import AnswerForm, answer_form, chat_grammar, held_to
from octavo.server.body import LARGE_BYTES
from octavo.server.request_bodies import ChatBody, CompletionBody, ResponseBody
from octavo.server.sampling import check_answers, check_form, check_totals, sampling_params, terms_of
from octavo.server.state import Server
from octavo.server.threads import Kind
from octavo.structured_outputs import StructuredOutputs
from octavo.text.prompt import Message
from octavo.text.tools import ToolChoice

SHORT_CHARS = 8192  # a millisecond or so
PORTION_CHARS = 65_536  # after so many of a list of prompts others have their turn
Encoded = tuple[str | None, list[int]]


async def chat_ask(
    request: Request,
    server: Server,
    body: ChatBody | ResponseBody,
    own: Mapping[str, object],
    messages: Callable[[], Sequence[Message]],
    offered: list[dict[str, object]],
    choice: ToolChoice,
    asked: StructuredOutputs | None,
) -> tuple[Ask, AnswerForm]:
    """`own`: see `sampling_params`. `messages`: called in a thread, for there may be many. `offered`: the tools of the prompt.

    `asked`: the form the answer must have.
    """
    params = sampling_params(body, own, server.config, server.llm.sampling_defaults).for_chat()
    terms = terms_of(body, server.config)
    text, ids = await _encode_chat(request, server, messages, offered, body.chat_template_kwargs)
    words = await _spell_words(request, server, params.bad_words)
    check_totals(params, words, [len(ids)], server.llm.facts.limits)
    form = answer_form(server, offered, body.parallel_tool_calls)
    if asked is not None or choice.mode == "required":  # in a thread: a form may have 200,000 characters
        written = partial(chat_grammar, asked, form, offered, choice, text)
        params = await held_to(server, params, await server.threads.run("bodies", request, written))
    return Ask(text, ids, params, *terms, bad_words=words), form


async def _encode_chat(
    request: Request,
    server: Server,
    messages: Callable[[], Sequence[Message]],
    tools: Sequence[Message],
    options: Mapping[str, object] | None,
) -> tuple[str, list[int]]:
    def encode() -> tuple[str, list[int]]:
        try:
            return server.llm.encoder.encode_chat(messages(), tools or None, options or {}, server.llm.facts.limits.max_model_len)
        except TemplateError as error:  # of this conversation: its field has another name in other routes
            raise RequestError(str(error), "messages") from error

    # always in a thread: a template out of a model's files may take seconds, however short the messages
    return await server.threads.run(await _kind(request), request, encode)


async def completion_asks(
    request: Request, server: Server, body: CompletionBody, asked: StructuredOutputs | None
) -> list[Ask]:
    """Returns an ask for each prompt. `asked`: the form that every answer must have."""
    own = {"n": body.n, "max_tokens": body.max_tokens, "logprobs": body.logprobs, "prompt_logprobs": body.logprobs if body.echo else None}
    params = sampling_params(body, own, server.config, server.llm.sampling_defaults)
    terms = terms_of(body, server.config)
    encoded = await _encode_prompts(request, server, body.prompt)
    check_answers(len(encoded), params.n, server.config.max_prompts)
    check_form(asked, len(encoded))
    words = await _spell_words(request, server, params.bad_words)
    check_totals(params, words, [len(ids) for _, ids in encoded], server.llm.facts.limits, bool(body.echo))
    params = await held_to(server, params, asked)
    return [Ask(text, ids, params, *terms, bad_words=words) for text, ids in encoded]


async def _encode_prompts(request: Request, server: Server, prompt: str | list[object]) -> list[Encoded]:
    """A text, a list of ids, or a list of either: each prompt's text, where it has one, and its ids."""
    prompts = _as_prompts(prompt, server.config.max_prompts)
    limit = server.llm.facts.limits.max_model_len

    def encode_all(portion: Sequence[str | list[int]]) -> list[Encoded]:
        return [server.llm.encoder.encode(one, limit) for one in portion]

    if sum(map(len, prompts)) <= SHORT_CHARS:
        return encode_all(prompts)
    kind = await _kind(request)
    encoded: list[Encoded] = []
    for portion in _portions(prompts):
        encoded += await server.threads.run(kind, request, partial(encode_all, portion))
    return encoded


async def _spell_words(request: Request, server: Server, words: Sequence[str]) -> list[list[int]]:
    """`bad_words` as token ids, once for all prompts of a request; in a thread, for every word is a text of its own."""
    return await server.threads.run(await _kind(request), request, partial(server.llm.encoder.spellings, words)) if words else []


async def _kind(request: Request) -> Kind:
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
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise RequestError("prompt must be a text, a list of token ids, or a list of such texts or lists", "prompt")
    if not ids:
        raise RequestError("the prompt is empty", "prompt")
    return ids
