"""/tokenize, /detokenize and /tokenizer_info, with the bodies vLLM's have."""

import asyncio

from fastapi import APIRouter
from pydantic import model_validator
from starlette.requests import Request

from octavo.errors import RequestError
from octavo.server.basic import check_model
from octavo.server.body import Body, read_body, takes
from octavo.server.state import Server


class Tokenize(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    add_special_tokens: bool | None = None  # default: for a prompt, not for messages, whose template writes them itself
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> "Tokenize":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("wanted prompt or messages, one of the two")
        return self


class Detokenize(Body):
    model: str | None = None
    tokens: list[int]


def router(server: Server) -> APIRouter:
    routes = APIRouter()

    @routes.post("/tokenize", openapi_extra=takes(Tokenize))
    async def tokenize(request: Request) -> dict[str, object]:
        asked = await read_body(request, Tokenize)
        check_model(server, asked.model)
        ids = await asyncio.to_thread(_encode, server, asked)  # a book takes seconds
        answer: dict[str, object] = {"count": len(ids), "max_model_len": server.llm.facts.limits.max_model_len, "tokens": ids}
        if asked.return_token_strs:
            answer["token_strs"] = [server.llm.tokenizer.token(token_id) for token_id in ids]
        return answer

    @routes.post("/detokenize", openapi_extra=takes(Detokenize))
    async def detokenize(request: Request) -> dict[str, str]:
        asked = await read_body(request, Detokenize)
        check_model(server, asked.model)
        vocab = server.llm.facts.limits.vocab_size
        for place, token_id in enumerate(asked.tokens):
            if not 0 <= token_id < vocab:
                raise RequestError(f"tokens[{place}] is {token_id}, out of the vocabulary, which ends at {vocab - 1}", f"tokens[{place}]")
        return {"prompt": server.llm.tokenizer.decode(asked.tokens, skip_special_tokens=False)}

    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, str | None]:
        """What a client that counts tokens here needs beside the two above. The template, which may be private, is not told."""
        return {"bos_token": server.llm.tokenizer.bos_token or None, "eos_token": server.llm.tokenizer.eos_token or None}

    return routes


def _encode(server: Server, asked: Tokenize) -> list[int]:
    if asked.messages is not None:
        text, ids = server.llm.encoder.encode_chat(asked.messages)
        return server.llm.tokenizer.encode(text) if asked.add_special_tokens else ids
    assert asked.prompt is not None
    return server.llm.tokenizer.encode(asked.prompt, asked.add_special_tokens is not False)
