"""/v1/responses, without memory: every request brings the whole conversation, and nothing of it is kept.

A stream is a life of one output item, told by events:

    created  in_progress  output_item.added  content_part.added  output_text.delta ...
    output_text.done  content_part.done  output_item.done  completed | incomplete
"""

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from secrets import token_hex

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.engine.async_llm import Ask
from octavo.errors import RequestError
from octavo.outputs import TextDelta
from octavo.server.body import takes
from octavo.server.encoding import encode_chat
from octavo.server.events import EventStream, disconnect, event, unless
from octavo.server.generation import News, all_news, collect
from octavo.server.request_bodies import ResponseBody, read_generation_body
from octavo.server.sampling import named, priority_of, salt_of, sampling_params, timeout_of
from octavo.server.state import Server
from octavo.server.usage import Tally
from octavo.text.conversation import check_messages

NAMES = {"max_tokens": "max_output_tokens", "prompt": "input", "messages": "input"}  # what the engine calls otherwise
TEXT_PARTS = ("input_text", "output_text", "text")


def router(server: Server) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/responses", openapi_extra=takes(ResponseBody))
    async def responses(request: Request) -> Response:
        body = await read_generation_body(request, ResponseBody, server)
        with named(NAMES):
            ask = await _ask(server, body)
        answer = _Answer(server, body, ask, all_news(server.llm, [ask], NAMES))
        return EventStream(answer.events()) if body.stream else await unless(disconnect(request.receive), answer.whole())

    return routes


async def _ask(server: Server, body: ResponseBody) -> Ask:
    params = sampling_params(body, {"max_tokens": body.max_output_tokens}, server.config, server.llm.sampling_defaults).for_chat()
    priority, salt, timeout = priority_of(body), salt_of(body), timeout_of(body, server.config)
    text, ids = await encode_chat(server, _messages(body), body.chat_template_kwargs)
    return Ask(text, ids, params, priority, salt, timeout)


def _messages(body: ResponseBody) -> list[dict[str, object]]:
    said: list[dict[str, object]] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if not body.input:
        raise RequestError("the input is empty", "input")
    if isinstance(body.input, str):
        return [*said, {"role": "user", "content": body.input}]
    messages = [_message(item, f"input[{position}]") for position, item in enumerate(body.input)]
    try:
        check_messages(messages)
    except RequestError as error:  # it counts messages; the client counts items of its input
        raise RequestError(str(error).replace("messages", "input", 1), (error.param or "").replace("messages", "input", 1)) from None
    return said + messages


def _message(item: object, where: str) -> dict[str, object]:
    """An item as a message of a chat; items of other types belong to tools and to what is stored."""
    if not isinstance(item, Mapping) or item.get("type", "message") != "message":
        kind = item.get("type") if isinstance(item, Mapping) else type(item).__name__
        raise RequestError(f"{where} must be a message, not {str(kind)[:80]}", where)
    content = item.get("content")
    if isinstance(content, list):
        content = [_part(part, f"{where}.content[{position}]") for position, part in enumerate(content)]
    return {"role": item.get("role"), "content": content}


def _part(part: object, where: str) -> dict[str, object]:
    if not isinstance(part, Mapping) or part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
        raise RequestError(f'{where} must be {{"type": "input_text", "text": ...}}', where)
    return {"type": "text", "text": part["text"]}


class _Answer:
    def __init__(self, server: Server, body: ResponseBody, ask: Ask, news: News) -> None:
        self._body = body
        self._params = ask.params
        self._news = news
        self._tally = Tally([ask])
        self._texts: list[str] = []
        self._finish_reason: str | None = None
        self._item_id = f"msg_{token_hex(16)}"
        self._head = {"id": f"resp_{token_hex(16)}", "object": "response", "created_at": int(time.time()), "model": server.model_name}
        self._number = -1  # of the last event

    async def whole(self) -> Response:
        await collect(self._news, self._tally, self._take)
        return JSONResponse(self._response(self._status()))

    def _take(self, delta: TextDelta) -> None:
        self._texts.append(delta.text)
        self._finish_reason = delta.finish_reason

    async def events(self) -> AsyncGenerator[str, None]:
        place: dict[str, object] = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        beginning = ""
        async with aclosing(self._news) as news:
            async for deltas in news:
                if self._number < 0:
                    beginning = self._beginning(place)
                self._tally.count(deltas)
                for delta in deltas:
                    self._take(delta)
                written = beginning + "".join([self._delta_event(place, delta.text) for delta in deltas if delta.text])
                beginning = ""
                if written:
                    yield written
        yield self._ending(place)

    def _delta_event(self, place: dict[str, object], text: str) -> str:
        return self._event("response.output_text.delta", {**place, "delta": text, "logprobs": []})

    def _beginning(self, place: dict[str, object]) -> str:
        response = self._response("in_progress")
        item = self._item("in_progress")
        return (
            self._event("response.created", {"response": response})
            + self._event("response.in_progress", {"response": response})
            + self._event("response.output_item.added", {"output_index": 0, "item": {**item, "content": []}})
            + self._event("response.content_part.added", {**place, "part": _text_part("")})
        )

    def _ending(self, place: dict[str, object]) -> str:
        text, status = "".join(self._texts), self._status()
        return (
            self._event("response.output_text.done", {**place, "text": text, "logprobs": []})
            + self._event("response.content_part.done", {**place, "part": _text_part(text)})
            + self._event("response.output_item.done", {"output_index": 0, "item": self._item(status)})
            + self._event(f"response.{status}", {"response": self._response(status)})
        )

    def _event(self, name: str, data: dict[str, object]) -> str:
        self._number += 1
        return event({"type": name, "sequence_number": self._number, **data}, name)

    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _item(self, status: str) -> dict[str, object]:
        content = [_text_part("".join(self._texts))]
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str) -> dict[str, object]:
        ended = status != "in_progress"
        timings = {"timings": self._tally.timings()} if ended and self._body.include_timings else {}
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": self._body.instructions,
            "max_output_tokens": self._body.max_output_tokens,
            "metadata": self._body.metadata or {},
            "output": [self._item(status)] if ended else [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": float(self._params.temperature),
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": float(self._params.top_p),
            "truncation": "disabled",
            "usage": self._usage() if ended else None,
            "user": self._body.user,
            **timings,
        }

    def _usage(self) -> dict[str, object]:
        tally = self._tally
        return {
            "input_tokens": tally.prompt_tokens,
            "input_tokens_details": {"cached_tokens": tally.cached_tokens},
            "output_tokens": tally.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tally.prompt_tokens + tally.completion_tokens,
        }


def _text_part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
