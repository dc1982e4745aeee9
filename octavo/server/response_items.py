"""The output of a response, item by item: thinking, messages, function calls. Whole at the end, or told by events as it grows.

output_item.added  (content_part.added)  ....delta ...  ....done  (content_part.done)  output_item.done
"""

from dataclasses import dataclass, field
from secrets import token_hex
from typing import Literal

from octavo.server.answer_parts import Part, Thought
from octavo.server.events import event
from octavo.text.call_reader import ToolCallDelta

Kind = Literal["reasoning", "message", "function_call"]
PREFIXES: dict[Kind, str] = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
EVENTS: dict[Kind, str] = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}


@dataclass(slots=True)
class Item:
    kind: Kind
    place: int  # in the output
    call: ToolCallDelta | None = None  # the first of its deltas
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
        """What its events begin with."""
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
    """Takes in parts of an answer, and says what each of them is told by."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._number = -1  # of the last event

    def event(self, name: str, data: dict[str, object]) -> str:
        self._number += 1
        return event({"type": f"response.{name}", "sequence_number": self._number, **data}, f"response.{name}")

    def add(self, part: Part) -> str:
        """A part goes on with the last item, or that one is complete and another begins."""
        kind, text = _kind_and_text(part)
        told = ""
        is_new_call = isinstance(part, ToolCallDelta) and part.id is not None
        if not self.items or self.items[-1].kind != kind or is_new_call:
            told = self.close("completed") + self._open(Item(kind, len(self.items), part if isinstance(part, ToolCallDelta) else None))
        item = self.items[-1]
        item.texts.append(text)
        logprobs: dict[str, object] = {"logprobs": []} if kind == "message" else {}
        return told + (self.event(f"{EVENTS[kind]}.delta", {**item.where, "delta": text, **logprobs}) if text else "")

    def _open(self, item: Item) -> str:
        self.items.append(item)
        told = self.event("output_item.added", {"output_index": item.place, "item": item.written()})
        if item.kind == "function_call":
            return told
        return told + self.event("content_part.added", {**item.where, "part": item.part()})

    def close(self, status: str) -> str:
        """The last item, if it is not yet, is over."""
        if not self.items or self.items[-1].status != "in_progress":
            return ""
        item = self.items[-1]
        item.status = status
        name = f"{EVENTS[item.kind]}.done"
        if item.kind == "function_call":
            assert item.call is not None
            told = self.event(name, {**item.where, "arguments": item.text, "name": item.call.name})
        else:
            logprobs: dict[str, object] = {"logprobs": []} if item.kind == "message" else {}
            told = self.event(name, {**item.where, "text": item.text, **logprobs})
            told += self.event("content_part.done", {**item.where, "part": item.part()})
        return told + self.event("output_item.done", {"output_index": item.place, "item": item.written()})


def _kind_and_text(part: Part) -> tuple[Kind, str]:
    if isinstance(part, str):
        return "message", part
    return ("reasoning", part.text) if isinstance(part, Thought) else ("function_call", part.arguments)
