"""/tokenize, /detokenize and /tokenizer_info, with the same bodies as vLLM. The work, and the writing of JSON, is done in a thread."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter
from pydantic import model_validator
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.server.body import check_model, read_body, takes
from octavo.server.fields import BEAM_FIELDS, FIELDS, Body, Refusal, TokenIds
from octavo.server.state import Server

MOST_CHARS = 2**20  # one or two seconds of work, which cannot be stopped
MOST_TOKENS = 2**20
_IN_CHAT = Refusal("usage.prompt_tokens of /v1/chat/completions counts it", ([], {}))
REFUSED = FIELDS | BEAM_FIELDS | {"tools": _IN_CHAT, "chat_template_kwargs": _IN_CHAT}
_PIECE = 8192  # items of a list that become JSON in one call


class Tokenize(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None  # its items are checked with the conversation; a type here would copy them first
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages, because templates write special tokens
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> "Tokenize":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class Detokenize(Body):
    model: str | None = None
    tokens: TokenIds


def router(server: Server) -> APIRouter:
    routes = APIRouter()

    @routes.post("/tokenize", openapi_extra=takes(Tokenize))
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, Tokenize, REFUSED)
        check_model(server, body.model)
        return _answer(await server.threads.run("tokenize", request, partial(_tokenized, server, body)))

    @routes.post("/detokenize", openapi_extra=takes(Detokenize))
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, Detokenize, FIELDS | BEAM_FIELDS)
        check_model(server, body.model)
        return _answer(await server.threads.run("tokenize", request, partial(_detokenized, server, body.tokens)))

    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, str | None]:
        """Returns what a client that counts tokens also needs. It does not return the chat template, which may be private."""
        return {"bos_token": server.llm.tokenizer.bos_token or None, "eos_token": server.llm.tokenizer.eos_token or None}

    return routes


def _answer(body: str) -> Response:
    return Response(body, media_type="application/json")


def _tokenized(server: Server, body: Tokenize) -> str:
    ids = _encode(server, body)
    answer = f'{{"count":{len(ids)},"max_model_len":{server.llm.facts.limits.max_model_len},"tokens":{_listed(ids)}'
    if body.return_token_strs:
        answer += f',"token_strs":{_listed([server.llm.tokenizer.token(token_id) for token_id in ids])}'
    return answer + "}"


def _listed(items: Sequence[int | str]) -> str:
    """Returns the items as JSON, written in pieces: one call for a million items would hold the interpreter too long."""
    starts = range(0, len(items), _PIECE)
    return f"[{','.join([json.dumps(items[start : start + _PIECE], separators=(',', ':'))[1:-1] for start in starts])}]"


def _encode(server: Server, body: Tokenize) -> list[int]:
    if body.messages is not None:
        text = server.llm.encoder.render_chat(body.messages)
        _check_length(text, "messages")
        return server.llm.tokenizer.encode(text, bool(body.add_special_tokens))
    assert body.prompt is not None
    _check_length(body.prompt, "prompt")
    return server.llm.tokenizer.encode(body.prompt, body.add_special_tokens is not False)


def _check_length(text: str, param: str) -> None:
    if len(text) > MOST_CHARS:
        raise RequestError(f"{param} has {len(text):,} characters, at most {MOST_CHARS:,} are tokenised at once; send it in parts", param)


def _detokenized(server: Server, ids: Sequence[int]) -> str:
    if len(ids) > MOST_TOKENS:
        raise RequestError(f"tokens has {len(ids):,} ids, at most {MOST_TOKENS:,} are decoded at once; send them in parts", "tokens")
    vocab = server.llm.facts.limits.vocab_size
    for place, token_id in enumerate(ids):
        if not 0 <= token_id < vocab:
            raise RequestError(f"tokens[{place}] is {token_id}, out of the vocabulary, which ends at {vocab - 1}", f"tokens[{place}]")
    return json.dumps({"prompt": server.llm.tokenizer.decode(ids, skip_special_tokens=False)}, separators=(",", ":"))
