"""/v1/responses. The server keeps no conversation: every request brings all of it.

    messages_of, tools_of    the input of a response as messages and tools of a chat; errors name the fields of the response
    Output                   the answer as items (thinking, messages, function calls), whole at the end or as events while it grows:
                             output_item.added  (content_part.added)  ....delta ...  ....done  (content_part.done)  output_item.done
"""

import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex
from typing import Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.errors import RequestError
from octavo.messages import AddRequest
from octavo.outputs import TextDelta
from octavo.server.answer_form import AnswerForm, AnswerParts, Part, Thought, reasoning_counters
from octavo.server.body import named, param_of, read_generation_body, structured_outputs_of, takes
from octavo.server.fields import ResponseBody
from octavo.server.generation import Tally, Updates, all_updates, collect, event, respond
from octavo.server.requests import chat_request, timeout_of
from octavo.server.state import Server
from octavo.structured_outputs import PARAM
from octavo.text.call_reader import ToolCallDelta
from octavo.text.conversation import check_count, check_medium, check_messages
from octavo.text.tools import ToolChoice, check_tool_choice, check_tools

NAMES = {"max_tokens": "max_output_tokens", "prompt": "input", "messages": "input"}  # the engine's name of a field -> its name here
FORMAT = "text.format"
TEXT_PARTS = ("input_text", "output_text", "text")
Kind = Literal["reasoning", "message", "function_call"]
PREFIXES: dict[Kind, str] = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
EVENTS: dict[Kind, str] = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}


def router(server: Server) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/responses", openapi_extra=takes(ResponseBody))
    async def responses(request: Request) -> Response:
        body = await read_generation_body(request, ResponseBody, server)
        tools, choice = tools_of(body)
        names = NAMES | {PARAM: param_of(body.structured_outputs, FORMAT, choice)}
        with named(names):
            structured = structured_outputs_of(body.structured_outputs, body.text and body.text.format, FORMAT)
            own = {"max_tokens": body.max_output_tokens}
            offered = choice.offered(tools)
            text, engine_request, form = await chat_request(
                request, server, body, own, partial(messages_of, body), offered, choice, structured
            )
        watch = server.observer.watch("resp_", [engine_request])
        updates = all_updates(server.llm, [engine_request], timeout_of(body, server.config), names, watch)
        answer = _Answer(server, body, text, engine_request, form, watch.id, updates)
        return await respond(request, server, answer, body.stream)

    return routes


def messages_of(body: ResponseBody) -> list[dict[str, object]]:
    """Returns the conversation as messages of a chat. Raises RequestError, which names the field of the response."""
    system: list[dict[str, object]] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if not body.input:
        raise RequestError("the input is empty", "input")
    if isinstance(body.input, str):
        return [*system, {"role": "user", "content": body.input}]
    check_count(body.input, "input")
    messages = [_message(item, f"input[{position}]") for position, item in enumerate(body.input)]
    with _in_other_words("messages", "input"):
        check_messages(messages)
    return system + _calls_joined(messages)


def tools_of(body: ResponseBody) -> tuple[list[dict[str, object]], ToolChoice]:
    """Returns the tools as a chat has them, and the choice among them. In a body they are flat: {"type": "function", "name": ...}."""
    tools: list[object] = []
    for position, tool in enumerate(body.tools or []):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise RequestError(f'tools[{position}] must have "type": "function"', f"tools[{position}]")
        tools.append({"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}})
    choice: object = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    with _in_other_words(".function", ""):
        checked = check_tools(tools or None)
        return checked, check_tool_choice(choice, checked)


@contextmanager
def _in_other_words(ours: str, theirs: str) -> Iterator[None]:
    """Replaces `ours` by `theirs` in the errors raised inside it: a client knows the fields of a response only."""
    try:
        yield
    except RequestError as error:
        raise RequestError(str(error).replace(ours, theirs, 1), (error.param or "").replace(ours, theirs, 1), error.code) from None


def _message(item: object, where: str) -> dict[str, object]:
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    check_medium(item, where)
    if not isinstance(item, Mapping) or kind not in ("message", "function_call", "function_call_output"):
        shown = str(kind)[:80] if isinstance(item, Mapping) else type(item).__name__
        raise RequestError(f"{where} must be a message, a function_call or a function_call_output, not {shown}", where)
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "type": "function", "function": function}]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"), f"{where}.output")}
    return {"role": item.get("role"), "content": _content(item.get("content"), f"{where}.content")}


def _content(content: object, where: str) -> object:
    return [_part(part, f"{where}[{position}]") for position, part in enumerate(content)] if isinstance(content, list) else content


def _part(part: object, where: str) -> dict[str, object]:
    check_medium(part, where)
    if not isinstance(part, Mapping) or part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
        raise RequestError(f'{where} must be {{"type": "input_text", "text": ...}}', where)
    return {"type": "text", "text": part["text"]}


def _calls_joined(messages: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Joins calls with the assistant's message or calls before them into one message, as templates expect."""
    joined: list[dict[str, object]] = []
    for message in messages:
        before = joined[-1] if joined else {}
        calls, earlier = message.get("tool_calls"), before.get("tool_calls", [])
        if isinstance(calls, list) and isinstance(earlier, list) and before.get("role") == "assistant":
            joined[-1] = {**before, "tool_calls": [*earlier, *calls]}
        else:
            joined.append(message)
    return joined


class _Answer:
    def __init__(
        self, server: Server, body: ResponseBody, prompt: str, request: AddRequest, form: AnswerForm, answer_id: str, updates: Updates
    ) -> None:
        self._body = body
        self._params = request.params
        self._fingerprint = server.fingerprint
        self._updates = updates
        self._tally = Tally([request], reasoning_counters(server, form, prompt, 1))
        self._parts = AnswerParts(form, prompt, bool(body.stream))
        self._output = Output()
        self._finish_reason: str | None = None
        self._head = {"id": answer_id, "object": "response", "created_at": int(time.time()), "model": server.model_name}

    async def whole(self) -> Response:
        await collect(self._updates, self._tally, self._take)
        self._end()
        return JSONResponse(self._response(self._status))

    async def events(self) -> AsyncGenerator[str, None]:
        begun = False
        async with aclosing(self._updates) as updates:
            async for deltas in updates:
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
        """Puts the parts of a delta into the output, and returns the events for them."""
        self._finish_reason = delta.finish_reason
        return "".join([self._output.add(part) for part in self._parts.push(delta.text, delta.finish_reason is not None)])

    def _end(self) -> str:
        """Closes the last item, and returns the events for it. An empty answer becomes an empty message."""
        empty = "" if self._output.items else self._output.add("")
        calls = [item for item in self._output.items if item.kind == "function_call"]
        is_whole = calls[-1:] == self._output.items[-1:] and self._parts.num_calls >= len(calls)  # what was cut off came after it
        return empty + self._output.close("completed" if is_whole else self._status)

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
            "seed": self._params.seed,
            "store": False,
            "system_fingerprint": self._fingerprint,
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


@dataclass(slots=True)
class Item:
    """One item of the output, and its text so far."""

    kind: Kind
    place: int  # its index in the output
    call: ToolCallDelta | None = None  # the first delta of a call, which has its id and name
    texts: list[str] = field(default_factory=list)
    id: str = ""
    status: str = "in_progress"

    def __post_init__(self) -> None:
        self.id = f"{PREFIXES[self.kind]}_{token_hex(16)}"

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def where(self) -> dict[str, object]:
        """The fields that every event about this item begins with."""
        place = {} if self.kind == "function_call" else {"content_index": 0}
        return {"item_id": self.id, "output_index": self.place, **place}

    def part(self) -> dict[str, object]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def written(self) -> dict[str, object]:
        head: dict[str, object] = {"id": self.id, "type": self.kind, "status": self.status}
        content = [self.part()] if self.status != "in_progress" and self.kind != "function_call" else []
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        if self.kind == "message":
            return {**head, "role": "assistant", "content": content}
        assert self.call is not None
        return {**head, "call_id": self.call.id, "name": self.call.name, "arguments": self.text}


class Output:
    """Collects the parts of an answer into items, and returns the events for each part."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._number = -1  # sequence number of the last event

    def event(self, name: str, data: dict[str, object]) -> str:
        self._number += 1
        return event({"type": f"response.{name}", "sequence_number": self._number, **data}, f"response.{name}")

    def add(self, part: Part) -> str:
        """Adds a part to the last item, or closes that one and opens another; returns the events for it."""
        kind, text = _kind_and_text(part)
        events = ""
        is_new_call = isinstance(part, ToolCallDelta) and part.id is not None
        if not self.items or self.items[-1].kind != kind or is_new_call:
            events = self.close("completed") + self._open(Item(kind, len(self.items), part if isinstance(part, ToolCallDelta) else None))
        item = self.items[-1]
        item.texts.append(text)
        logprobs: dict[str, object] = {"logprobs": []} if kind == "message" else {}
        return events + (self.event(f"{EVENTS[kind]}.delta", {**item.where, "delta": text, **logprobs}) if text else "")

    def _open(self, item: Item) -> str:
        self.items.append(item)
        events = self.event("output_item.added", {"output_index": item.place, "item": item.written()})
        if item.kind == "function_call":
            return events
        return events + self.event("content_part.added", {**item.where, "part": item.part()})

    def close(self, status: str) -> str:
        """Closes the last item if it is still open, and returns the events for it."""
        if not self.items or self.items[-1].status != "in_progress":
            return ""
        item = self.items[-1]
        item.status = status
        name = f"{EVENTS[item.kind]}.done"
        if item.kind == "function_call":
            assert item.call is not None
            events = self.event(name, {**item.where, "arguments": item.text, "name": item.call.name})
        else:
            logprobs: dict[str, object] = {"logprobs": []} if item.kind == "message" else {}
            events = self.event(name, {**item.where, "text": item.text, **logprobs})
            events += self.event("content_part.done", {**item.where, "part": item.part()})
        return events + self.event("output_item.done", {"output_index": item.place, "item": item.written()})


def _kind_and_text(part: Part) -> tuple[Kind, str]:
    if isinstance(part, str):
        return "message", part
    return ("reasoning", part.text) if isinstance(part, Thought) else ("function_call", part.arguments)
