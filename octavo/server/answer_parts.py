"""An answer taken apart as it comes: thinking, text, tool calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.server.state import Server
from octavo.text.call_reader import ToolCallDelta
from octavo.text.reasoning import ReasoningTokens, reasoning_family, reasoning_splitter
from octavo.text.tool_calls import tool_call_family, tool_call_parser
from octavo.text.tools import tool_name


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


Part = Thought | str | ToolCallDelta


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What the answers to a request may consist of."""

    reasoning: str  # family of tags
    calls: str  # family of calls
    names: tuple[str, ...]  # of the tools offered
    parallel: bool  # whether an answer may have several calls

    @property
    def is_plain(self) -> bool:
        """Nothing but text."""
        return self.reasoning == "none" and (self.calls == "none" or not self.names)


def answer_form(server: Server, tools: Sequence[Mapping[str, object]], parallel: bool | None) -> AnswerForm:
    template = server.llm.encoder.template
    reasoning = reasoning_family(server.config.reasoning_parser, template)
    calls = tool_call_family(server.config.tool_call_parser, template)
    return AnswerForm(reasoning, calls, tuple(map(tool_name, tools)), parallel is not False)


def reasoning_counters(server: Server, form: AnswerForm, prompt: str, n: int) -> list[ReasoningTokens]:
    """One for each sample, where the model thinks."""
    return [ReasoningTokens(prompt, server.llm.tokenizer.token_bytes) for _ in range(n)] if form.reasoning != "none" else []


class AnswerParts:
    def __init__(self, form: AnswerForm, prompt: str, stream: bool) -> None:
        self._parallel = form.parallel
        self._splitter = reasoning_splitter(form.reasoning, prompt)
        self._parser = tool_call_parser(form.calls, form.names, stream)

    def push(self, text: str, ended: bool) -> list[Part]:
        """What is now certain, in order."""
        parts: list[Part] = []
        for piece in self._splitter.push(text) + (self._splitter.flush() if ended else []):
            if piece.kind == "reasoning":
                parts.append(Thought(piece.text))
            elif piece.kind == "content":
                parts += self._parser.push(piece.text)
        parts += self._parser.flush() if ended else []
        return [part for part in parts if self._parallel or not isinstance(part, ToolCallDelta) or part.index == 0]

    @property
    def has_calls(self) -> bool:
        return self._parser.num_calls > 0


def thoughts_of(parts: Sequence[Part]) -> str:
    return "".join([part.text for part in parts if isinstance(part, Thought)])
