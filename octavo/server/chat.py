"""/v1/chat/completions: a conversation through the model's template, and its next message."""

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.messages import AddRequest
from octavo.outputs import TextDelta
from octavo.server.answer_form import AnswerForm, AnswerParts, Part, Thought, reasoning_counters, thoughts_of
from octavo.server.body import named, param_of, read_generation_body, structured_outputs_of, takes
from octavo.server.fields import ChatBody
from octavo.server.generation import Frame, Tally, Updates, all_updates, chunk_events, collect, respond
from octavo.server.logprobs import chat_logprobs
from octavo.server.requests import chat_request, timeout_of
from octavo.server.state import Server
from octavo.structured_outputs import PARAM
from octavo.text.call_parser import AnswerPiece
from octavo.text.tool_calls import collected
from octavo.text.tools import ToolChoice, check_tool_choice, check_tools

FORMAT = "response_format"
ROLE = '{{"index":{},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}'


def router(server: Server) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=takes(ChatBody))
    async def chat_completions(request: Request) -> Response:
        body = await read_generation_body(request, ChatBody, server)
        names = {"logprobs": "top_logprobs", "prompt": "messages"}  # the engine's name of a field -> its name here
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        tools = check_tools(body.tools or None)
        choice = check_tool_choice(body.tool_choice, tools)
        names[PARAM] = param_of(body.structured_outputs, FORMAT, choice)
        with named(names):
            text, engine_request, form = await _read(request, server, body, choice.offered(tools), choice)
        watch = server.observer.watch("chatcmpl-", [engine_request])
        updates = all_updates(server.llm, [engine_request], timeout_of(body, server.config), names, watch)
        answer = _Answer(server, body, text, engine_request, form, watch.id, updates)
        return await respond(request, server, answer, body.stream)

    return routes


async def _read(
    request: Request, server: Server, body: ChatBody, offered: list[dict[str, object]], choice: ToolChoice
) -> tuple[str, AddRequest, AnswerForm]:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs is given, but logprobs is not true", "top_logprobs")
    structured = structured_outputs_of(body.structured_outputs, body.response_format, FORMAT)
    longest = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    own = {"n": body.n, "max_tokens": longest, "logprobs": (body.top_logprobs or 0) if body.logprobs else None}
    return await chat_request(request, server, body, own, lambda: body.messages, offered, choice, structured)


@dataclass(slots=True)
class _Choice:
    taking_apart: AnswerParts | None  # None: the whole answer is text
    begun: bool = False
    parts: list[Part] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)  # as JSON
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def parts_of(self, delta: TextDelta) -> Sequence[Part]:
        """Returns the parts that a delta brings, and keeps how the choice ended if it did."""
        parts: Sequence[Part] = [delta.text] if delta.text else []
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if self.taking_apart is not None:
            parts = self.taking_apart.push(delta.text, delta.finish_reason is not None)
            if delta.finish_reason == "stop" and self.taking_apart.num_calls:
                self.finish_reason = "tool_calls"
        return parts


class _Answer:
    def __init__(
        self, server: Server, body: ChatBody, prompt: str, request: AddRequest, form: AnswerForm, answer_id: str, updates: Updates
    ) -> None:
        self._tokenizer = server.llm.tokenizer
        self._most_logprobs = request.params.logprobs
        self._updates = updates
        self._tally = Tally([request], reasoning_counters(server, form, prompt, request.params.n))
        stream = bool(body.stream)
        kind = "chat.completion.chunk" if stream else "chat.completion"
        timings = bool(body.include_timings)
        self._frame = Frame(answer_id, kind, server, request.params.seed, self._tally, body.stream_options, timings)
        apart = [None if form.is_plain else AnswerParts(form, prompt, stream) for _ in range(request.params.n)]
        self._choices = [_Choice(one) for one in apart]

    def events(self) -> AsyncGenerator[str, None]:
        return chunk_events(self._updates, self._tally, self._frame, self._chunks_of)

    async def whole(self) -> Response:
        await collect(self._updates, self._tally, self._take)
        return self._frame.whole([self._written(index) for index in range(len(self._choices))])

    def _chunks_of(self, delta: TextDelta) -> Iterator[str]:
        """Yields the role first, then a chunk for each part. The first part has the logprobs, the last one the finish reason."""
        choice = self._choices[delta.index]
        if not choice.begun:
            choice.begun = True
            yield ROLE.format(delta.index)
        parts = choice.parts_of(delta)
        if not (parts or choice.finish_reason or delta.logprobs):
            return
        found = "null" if delta.logprobs is None else _content(self._logprobs(delta))
        for part in parts[:-1]:
            yield f'{{"index":{delta.index},"delta":{_delta(part)},"logprobs":{found},"finish_reason":null}}'
            found = "null"
        end = "null" if choice.finish_reason is None else f'"{choice.finish_reason}","stop_reason":{json.dumps(choice.stop_reason)}'
        last = _delta(parts[-1]) if parts else '{"content":""}' if delta.logprobs else "{}"
        yield f'{{"index":{delta.index},"delta":{last},"logprobs":{found},"finish_reason":{end}}}'

    def _take(self, delta: TextDelta) -> None:
        choice = self._choices[delta.index]
        choice.parts += choice.parts_of(delta)
        if delta.logprobs is not None:
            choice.logprobs += self._logprobs(delta)

    def _logprobs(self, delta: TextDelta) -> list[str]:
        return chat_logprobs(self._tokenizer, delta, self._most_logprobs or 0)

    def _written(self, index: int) -> str:
        choice = self._choices[index]
        message, found = json.dumps(_message(choice.parts)), "null" if self._most_logprobs is None else _content(choice.logprobs)
        end = f'"finish_reason":{json.dumps(choice.finish_reason)},"stop_reason":{json.dumps(choice.stop_reason)}'
        return f'{{"index":{index},"message":{message},"logprobs":{found},{end}}}'


def _content(logprobs: Sequence[str]) -> str:
    return f'{{"content":[{",".join(logprobs)}]}}'


def _delta(part: Part) -> str:
    if isinstance(part, str):
        return f'{{"content":{json.dumps(part)}}}'
    if isinstance(part, Thought):
        return f'{{"reasoning_content":{json.dumps(part.text)}}}'
    function = {"arguments": part.arguments} if part.name is None else {"name": part.name, "arguments": part.arguments}
    head = {"index": part.index} if part.id is None else {"index": part.index, "id": part.id, "type": "function"}
    return json.dumps({"tool_calls": [{**head, "function": function}]})


def _message(parts: Sequence[Part]) -> dict[str, object]:
    answer: list[AnswerPiece] = [part for part in parts if not isinstance(part, Thought)]
    text, calls = collected(answer)
    message: dict[str, object] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if thoughts := thoughts_of(parts):
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
        ]
    return message
