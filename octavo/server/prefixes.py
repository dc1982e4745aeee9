"""/v1/prefixes: prefixes that are computed ahead, and held in the KV cache for requests that begin with them.

    POST /v1/prefixes             computes a prompt or the beginning of a conversation; the answer comes when every engine holds it
    GET /v1/prefixes              all of them, with what they hold and how often they were found
    GET, DELETE /v1/prefixes/NAME

They take memory from all users, and their names may tell something. So these routes need the admin key where the server has keys, and
are for this machine alone where it has none.
"""

import asyncio
import time
from typing import Any

from fastapi import APIRouter
from pydantic import model_validator
from starlette.requests import Request

from octavo.errors import DeadlineError, RequestError
from octavo.outputs import PinnedPrefix
from octavo.policy.request import check_pin, no_such_prefix
from octavo.server.body import check_model, named, read_body, takes
from octavo.server.errors import ApiError
from octavo.server.fields import BEAM_FIELDS, FIELDS, Body, TokenIds
from octavo.server.records import current_arrival
from octavo.server.requests import encode_beginning, encode_prompt, salt_of
from octavo.server.state import Server
from octavo.server.turns import disconnect, unless
from octavo.text.tools import check_tools

_STATUSES = {"prefix_exists": 409, "prefix_not_found": 404}  # other refusals are a 400


class PrefixBody(Body):
    model: str | None = None
    name: str
    prompt: str | TokenIds | None = None
    messages: list[Any] | None = None  # its items are checked with the conversation
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    ttl: float | None = None
    cache_salt: str | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "PrefixBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.prompt is not None and (self.tools or self.chat_template_kwargs):
            raise ValueError("tools and chat_template_kwargs belong to messages, and there are none")
        return self


def router(server: Server) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/prefixes", openapi_extra=takes(PrefixBody))
    async def pin_prefix(request: Request) -> dict[str, object]:
        _check_caller()
        body = await read_body(request, PrefixBody, FIELDS | BEAM_FIELDS)
        check_model(server, body.model)
        check_pin(body.name, body.ttl)
        with named({} if body.messages is None else {"prompt": "messages"}):
            return _as_dict(await _pinned(request, server, body))

    @routes.get("/v1/prefixes")
    async def pinned_prefixes() -> dict[str, object]:
        _check_caller()
        return {"object": "list", "data": [_as_dict(prefix) for prefix in server.llm.pins.list()]}

    @routes.get("/v1/prefixes/{name}")
    async def pinned_prefix(name: str) -> dict[str, object]:
        _check_caller()
        if (found := server.llm.pins.find(name)) is None:
            raise _with_status(no_such_prefix(name))
        return _as_dict(found)

    @routes.delete("/v1/prefixes/{name}")
    async def unpin_prefix(name: str) -> dict[str, object]:
        _check_caller()
        if not server.llm.pins.release(name):
            raise _with_status(no_such_prefix(name))
        return {"object": "prefix", "name": name, "deleted": True}

    return routes


def _check_caller() -> None:
    """Where the server has keys, the guard has asked for the admin key, which reads all text."""
    if not current_arrival().caller.reads_text:
        raise ApiError(403, "pinned prefixes are for this machine alone, because the server has no key; set --admin-key", code="local_only")


async def _pinned(request: Request, server: Server, body: PrefixBody) -> PinnedPrefix:
    salt, seconds = salt_of(body.cache_salt), server.config.request_timeout
    if body.messages is None:
        assert body.prompt is not None
        ids = await encode_prompt(request, server, body.prompt)
    else:
        ids = await encode_beginning(request, server, body.messages, check_tools(body.tools or None), body.chat_template_kwargs)
    try:
        async with asyncio.timeout(seconds):
            return await unless(disconnect(request.receive), server.llm.pins.pin(body.name, ids, salt, body.ttl))
    except TimeoutError:
        raise DeadlineError(f"the prefix was not computed after {seconds:g} s (--request-timeout)") from None
    except RequestError as error:
        raise _with_status(error) from None


def _with_status(error: RequestError) -> Exception:
    status = _STATUSES.get(error.code or "")
    return error if status is None else ApiError(status, str(error), param=error.param, code=error.code)


def _as_dict(prefix: PinnedPrefix) -> dict[str, object]:
    left = prefix.seconds_left
    return {
        "object": "prefix",
        "name": prefix.name,
        "state": "held" if prefix.held else "computing",
        "prompt_tokens": prefix.prompt_tokens,
        "tokens": prefix.num_tokens,
        "blocks": prefix.num_blocks,
        "hits": prefix.hits,
        "tokens_saved": prefix.tokens_saved,
        "expires_at": None if left is None else round(time.time() + left, 3),
    }
