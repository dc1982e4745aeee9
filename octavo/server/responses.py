"""/v1/responses, without memory: every request brings the whole conversation, and nothing of it is kept."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.engine.async_llm import Ask
from octavo.outputs import TextDelta
from octavo.server.answer_grammar import asked_form, param_of
from octavo.server.answer_parts import AnswerForm, AnswerParts, reasoning_counters
from octavo.server.body import takes
from octavo.server.chat_ask import chat_ask
from octavo.server.generation import News, all_news, collect, respond
from octavo.server.request_bodies import ResponseBody, read_generation_body
from octavo.server.response_input import messages_of, tools_of
from octavo.server.response_items import Output
from octavo.server.sampling import named
from octavo.server.state import Server
from octavo.server.usage import Tally
from octavo.structured_outputs import PARAM

NAMES = {"max_tokens": "max_output_tokens", "prompt": "input", "messages": "input"}  # what the engine calls otherwise
FORMAT = "text.format"


def router(server: Server) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/responses", openapi_extra=takes(ResponseBody))
    async def responses(request: Request) -> Response:
        body = await read_generation_body(request, ResponseBody, server)
        tools, choice = tools_of(body)
        names = NAMES | {PARAM: param_of(body.structured_outputs, FORMAT, choice)}
        with named(names):
            asked = asked_form(body.structured_outputs, body.text and body.text.format, FORMAT)
            own = {"max_tokens": body.max_output_tokens}
            ask, form = await chat_ask(request, server, body, own, partial(messages_of, body), choice.offered(tools), choice, asked)
        watch = server.observer.watch("resp_", [ask])
        answer = _Answer(server, body, ask, form, watch.id, all_news(server.llm, [ask], names, watch))
        return await respond(request, server, answer, body.stream)

    return routes


class _Answer:
    def __init__(self, server: Server, body: ResponseBody, ask: Ask, form: AnswerForm, answer_id: str, news: News) -> None:
        assert ask.prompt is not None
        self._body = body
        self._params = ask.params
        self._news = news
        self._tally = Tally([ask], reasoning_counters(server, form, ask.prompt, 1))
        self._parts = AnswerParts(form, ask.prompt, bool(body.stream))
        self._output = Output()
        self._finish_reason: str | None = None
        self._head = {"id": answer_id, "object": "response", "created_at": int(time.time()), "model": server.model_name}

    async def whole(self) -> Response:
        await collect(self._news, self._tally, self._take)
        self._end()
        return JSONResponse(self._response(self._status))

    async def events(self) -> AsyncGenerator[str, None]:
        begun = False
        async with aclosing(self._news) as news:
            async for deltas in news:
                self._tally.count(deltas)
                written = "" if begun else self._beginning()
                begun = True
                written += "".join([self._take(delta) for delta in deltas])
                if written:
                    yield written
        yield self._end() + self._output.event(self._status, {"response": self._response(self._status)})

    def _beginning(self) -> str:
        response: dict[str, object] = {"response": self._response("in_progress")}
        return self._output.event("created", response) + self._output.event("in_progress", response)

    def _take(self, delta: TextDelta) -> str:
        """Its parts go into the output; the events that tell of them."""
        self._finish_reason = delta.finish_reason
        return "".join([self._output.add(part) for part in self._parts.push(delta.text, delta.finish_reason is not None)])

    def _end(self) -> str:
        """The last item is over; an answer of nothing is an empty message."""
        empty = "" if self._output.items else self._output.add("")
        return empty + self._output.close(self._status)

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

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
            "output": [item.written() for item in self._output.items] if ended else [],
            "parallel_tool_calls": self._body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": float(self._params.temperature),
            "text": {"format": (self._body.text and self._body.text.format) or {"type": "text"}},
            "tool_choice": self._body.tool_choice or "auto",
            "tools": self._body.tools or [],
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
            "output_tokens_details": {"reasoning_tokens": tally.reasoning_tokens},
            "total_tokens": tally.prompt_tokens + tally.completion_tokens,
        }
