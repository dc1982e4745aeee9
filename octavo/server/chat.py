"""/v1/chat/completions: a conversation through the model's template, and its next message."""

import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.engine.async_llm import Ask
from octavo.errors import RequestError
from octavo.outputs import TextDelta
from octavo.server.body import takes
from octavo.server.encoding import encode_chat
from octavo.server.events import EventStream, disconnect, unless
from octavo.server.generation import Frame, News, all_news, chunk_events, collect
from octavo.server.logprobs import chat_logprobs
from octavo.server.request_bodies import ChatBody, read_generation_body
from octavo.server.sampling import named, priority_of, salt_of, sampling_params, timeout_of
from octavo.server.state import Server
from octavo.server.usage import Tally

ROLE = '{{"index":{},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}'


def router(server: Server) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=takes(ChatBody))
    async def chat_completions(request: Request) -> Response:
        body = await read_generation_body(request, ChatBody, server)
        names = {"logprobs": "top_logprobs", "prompt": "messages"}  # what the engine calls otherwise
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        with named(names):
            ask = await _ask(server, body)
        answer = _Answer(server, body, ask, all_news(server.llm, [ask], names))
        return EventStream(answer.events()) if body.stream else await unless(disconnect(request.receive), answer.whole())

    return routes


async def _ask(server: Server, body: ChatBody) -> Ask:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is given, but stream is not true", "stream_options")
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs is given, but logprobs is not true", "top_logprobs")
    longest = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    own = {"n": body.n, "max_tokens": longest, "logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    params = sampling_params(body, own, server.config, server.llm.sampling_defaults).for_chat()
    priority, salt, timeout = priority_of(body), salt_of(body), timeout_of(body, server.config)
    text, ids = await encode_chat(server, body.messages, body.chat_template_kwargs)
    return Ask(text, ids, params, priority, salt, timeout)


@dataclass(slots=True)
class _Choice:
    begun: bool = False
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, object]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Answer:
    def __init__(self, server: Server, body: ChatBody, ask: Ask, news: News) -> None:
        self._tokenizer = server.llm.tokenizer
        self._most_logprobs = ask.params.logprobs
        self._news = news
        self._tally = Tally([ask])
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._frame = Frame("chatcmpl", kind, server.model_name, self._tally, body.stream_options, bool(body.include_timings))
        self._choices = [_Choice() for _ in range(ask.params.n)]

    def events(self) -> AsyncGenerator[str, None]:
        return chunk_events(self._news, self._tally, self._frame, self._chunks_of)

    async def whole(self) -> Response:
        await collect(self._news, self._tally, self._take)
        return JSONResponse(self._frame.whole([self._written(index) for index in range(len(self._choices))]))

    def _chunks_of(self, delta: TextDelta) -> Iterator[str]:
        choice = self._choices[delta.index]
        if not choice.begun:
            choice.begun = True
            yield ROLE.format(delta.index)
        if not (delta.text or delta.finish_reason or delta.logprobs):
            return
        content = f'{{"content":{json.dumps(delta.text)}}}' if delta.text or delta.logprobs else "{}"
        found = "null" if delta.logprobs is None else json.dumps(self._logprobs(delta))
        end = "null" if delta.finish_reason is None else f'"{delta.finish_reason}","stop_reason":{json.dumps(delta.stop_reason)}'
        yield f'{{"index":{delta.index},"delta":{content},"logprobs":{found},"finish_reason":{end}}}'

    def _take(self, delta: TextDelta) -> None:
        choice = self._choices[delta.index]
        choice.texts.append(delta.text)
        if delta.logprobs is not None:
            choice.logprobs += self._logprobs(delta)["content"]
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason

    def _logprobs(self, delta: TextDelta) -> dict[str, list[dict[str, object]]]:
        return {"content": chat_logprobs(self._tokenizer, delta, self._most_logprobs or 0)}

    def _written(self, index: int) -> dict[str, object]:
        choice = self._choices[index]
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": None if self._most_logprobs is None else {"content": choice.logprobs},
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
