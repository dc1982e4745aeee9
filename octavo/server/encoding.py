"""Text becomes token ids: at once where it is short, in a thread where it is long or a template has its say: the event loop goes on."""

import asyncio
from collections.abc import Mapping, Sequence

from octavo.errors import RequestError, TemplateError
from octavo.server.state import Server
from octavo.text.prompt import Message

SHORT_CHARS = 8192  # a millisecond or so


async def encode_prompts(server: Server, prompt: str | list[object]) -> list[tuple[str | None, list[int]]]:
    """A text, a list of ids, or a list of either: each prompt's text, where it has one, and its ids."""
    prompts = _as_prompts(prompt, server.config.max_prompts)
    limit = server.llm.facts.limits.max_model_len

    def encode_all() -> list[tuple[str | None, list[int]]]:
        return [server.llm.encoder.encode(one, limit) for one in prompts]

    return encode_all() if sum(map(len, prompts)) <= SHORT_CHARS else await asyncio.to_thread(encode_all)


async def encode_chat(
    server: Server, messages: Sequence[Message], tools: Sequence[Message], options: Mapping[str, object] | None
) -> tuple[str, list[int]]:
    def encode() -> tuple[str, list[int]]:
        try:
            return server.llm.encoder.encode_chat(messages, tools or None, options or {}, server.llm.facts.limits.max_model_len)
        except TemplateError as error:  # of this conversation: its field has another name in other routes
            raise RequestError(str(error), "messages") from error

    return await asyncio.to_thread(encode)  # a template out of a model's files may take seconds, however short the messages


async def spell_words(server: Server, words: Sequence[str]) -> list[list[int]]:
    """`bad_words` as token ids, once for all prompts of a request; in a thread, for every word is a text of its own."""
    return await asyncio.to_thread(server.llm.encoder.spellings, words) if words else []


def _as_prompts(prompt: str | list[object], most: int) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("the prompt is empty", "prompt")
    if type(prompt[0]) is int:
        return [_as_ids(prompt)]
    if len(prompt) > most:
        raise RequestError(f"prompt is a list of {len(prompt):,} prompts, at most {most} are taken (--max-prompts)", "prompt")
    if all(isinstance(one, str) for one in prompt):
        return list(prompt)  # type: ignore[arg-type]
    return [_as_ids(one) for one in prompt]


def _as_ids(ids: object) -> list[int]:
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise RequestError("prompt must be a text, a list of token ids, or a list of such texts or lists", "prompt")
    if not ids:
        raise RequestError("the prompt is empty", "prompt")
    return ids
