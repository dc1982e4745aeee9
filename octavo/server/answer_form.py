"""The form of an answer: the grammar it must follow, and its parts (thinking, text, tool calls), taken apart as it comes.

A request asks for a form by `response_format`, `text.format`, `structured_outputs`, or a tool that must be called:

    answer  ->  calls of tools            tool_choice required or named
                JSON, a regex, ...        a form
                one or the other          a form, and tools that may be called

Where the model thinks, the thought comes first and is free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.grammar.text import check_limits, joined_grammars
from octavo.server.state import Server
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text.call_reader import ToolCallDelta
from octavo.text.reasoning import ReasoningTokens, behind_thought, reasoning_family, reasoning_splitter
from octavo.text.tool_calls import FAMILIES, forced_call, tool_call_family, tool_call_parser
from octavo.text.tools import ToolChoice, text_parameters, tool_name

TOOL_TEMPLATE_PARSERS = ("hermes", "qwen3_coder")  # they read the calls that PromptEncoder's TOOL_TEMPLATE describes


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


Part = Thought | str | ToolCallDelta


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What the answers to a request may consist of: thinking, text, calls of tools."""

    reasoning: str  # family of the tags around thinking
    calls: str  # family of the format of calls
    names: tuple[str, ...]  # names of the tools offered
    parallel: bool  # whether an answer may have several calls
    texts: frozenset[tuple[str, str]] = frozenset()  # tools and their parameters that are text
    only_calls: bool = False  # whether a call is forced, so that none of the answer is content
    in_thought: bool = False  # the prompt ends inside a thought, which the answer continues

    @property
    def is_plain(self) -> bool:
        """Whether the whole answer is text."""
        return self.reasoning == "none" and (self.calls == "none" or not self.names)


def add_tool_template(server: Server) -> bool:
    """Adds our template for conversations with tools if the format of calls is set to the one it describes. Returns whether it is used."""
    return server.config.tool_call_parser in TOOL_TEMPLATE_PARSERS and server.llm.encoder.add_tool_template()


def answer_form(server: Server, tools: Sequence[Mapping[str, object]], choice: ToolChoice, parallel: bool | None) -> AnswerForm:
    template = server.llm.encoder.template
    reasoning = reasoning_family(server.config.reasoning_parser, template)
    calls = tool_call_family(server.config.tool_call_parser, template)
    names = tuple(map(tool_name, tools))
    return AnswerForm(reasoning, calls, names, parallel is not False, text_parameters(tools), choice.mode == "required")


def reasoning_counters(server: Server, form: AnswerForm, prompt: str, n: int) -> list[ReasoningTokens]:
    """Returns a counter for each sample if the model thinks, else none."""
    if form.reasoning == "none":
        return []
    return [ReasoningTokens(prompt, server.llm.tokenizer.token_bytes, form.reasoning, form.in_thought) for _ in range(n)]


def chat_grammar(
    structured: StructuredOutputsParams | None, form: AnswerForm, tools: Sequence[Mapping[str, object]], choice: ToolChoice, prompt: str
) -> StructuredOutputsParams | None:
    """Returns the grammar that the answer to `prompt` must follow, or None: the form asked for, calls of the tools offered, or either.

    A form that becomes part of a larger grammar, or is not needed, has its limits checked here, because it is not checked later.
    """
    forced = choice.mode == "required"
    parts: dict[str, StructuredOutputsParams] = {} if structured is None or forced else {"form": structured}
    if forced or (parts and tools and form.calls in FAMILIES):
        rules = forced_call(form.calls, tools, form.parallel and choice.name is None)
        parts["calls"] = StructuredOutputsParams(grammar=f"start: answer\n{rules}")
    if parts == {"form": structured} and form.reasoning == "none":
        return structured
    if structured is not None:
        check_limits(structured)
    frame = behind_thought(f"answer: {' | '.join(f'@{name}' for name in parts)}\n", form.reasoning, prompt, form.in_thought)
    return StructuredOutputsParams(grammar=joined_grammars(frame, parts)) if parts else None


class AnswerParts:
    """Takes an answer apart into thinking, text and tool calls, as its text comes."""

    def __init__(self, form: AnswerForm, prompt: str, stream: bool) -> None:
        self._parallel, self._only_calls = form.parallel, form.only_calls
        self._splitter = reasoning_splitter(form.reasoning, prompt, form.in_thought)
        self._parser = tool_call_parser(form.calls, form.names, stream and not form.only_calls, form.texts)

    def push(self, text: str, ended: bool) -> list[Part]:
        """Takes the next piece of text, and returns the parts that are now certain, in order.

        Where a call is forced, the only text is what `max_tokens` left of an unfinished call. It is dropped.
        """
        parts: list[Part] = []
        for piece in self._splitter.push(text) + (self._splitter.flush() if ended else []):
            if piece.kind == "reasoning":
                parts.append(Thought(piece.text))
            elif piece.kind == "content":
                parts += self._parser.push(piece.text)
        parts += self._parser.flush() if ended else []
        return [part for part in parts if self._belongs(part)]

    def _belongs(self, part: Part) -> bool:
        if isinstance(part, ToolCallDelta):
            return self._parallel or part.index == 0
        return isinstance(part, Thought) or not self._only_calls

    @property
    def num_calls(self) -> int:
        """The number of complete calls."""
        return self._parser.num_calls


def thoughts_of(parts: Sequence[Part]) -> str:
    return "".join([part.text for part in parts if isinstance(part, Thought)])
