"""`octavo generate` completes prompts, all in one batch. Texts are written while they come, in the order of the prompts.

    prompts.txt      one prompt per line
    prompts.jsonl    {"prompt": "Once upon", "max_tokens": 32}
                     {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    -                stdin: JSONL if it begins with {, else one prompt per line

What a line does not set is taken from the flags. Empty lines are skipped. Errors name the file and the line.
"""

import argparse
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from octavo.cli.args import add_engine_flags, add_sampling_flags, engine_config, sampling_values
from octavo.cli.chat_session import chat_params
from octavo.cli.in_out import check_target, for_stdout, read_stdin
from octavo.cli.opening import opened
from octavo.cli.words import named_model
from octavo.errors import ConfigError, OctavoError, RequestError, nearest
from octavo.outputs import TextDelta
from octavo.progress import GenerateProgress
from octavo.sampling_params import SamplingParams
from octavo.text.prompt import PromptEncoder

if TYPE_CHECKING:
    from octavo.llm import LLM

EXAMPLES = """examples:
  octavo generate "Once upon a time"                          the default model continues the text
  octavo generate "Once upon a time" "The sea" --max-tokens 40
  octavo generate --model Qwen/Qwen3-0.6B --chat "Name three primes."
  octavo generate --file prompts.jsonl --output answers.jsonl

Texts are written to stdout as they are generated, in the order of the prompts, with a line --- between them.
Ctrl-C ends the command and keeps what was written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] PROMPT... | --file FILE"
    parser.epilog = EXAMPLES
    parser.add_argument("words", nargs="*", metavar="PROMPT", help="a prompt; - reads one from stdin")
    text = "a .txt file with one prompt per line, a .jsonl file (prompt or messages, and sampling fields), or - for stdin"
    parser.add_argument("--file", metavar="FILE", help=text)
    text = "write one JSON object per prompt (prompt, outputs, usage) to this file; - is stdout"
    parser.add_argument("--output", metavar="FILE", help=text)
    parser.add_argument("--chat", action="store_true", help="answer each prompt as a chat message, with the chat template")
    add_sampling_flags(parser, {})
    parser.add_argument("-n", type=int, metavar="N", default=argparse.SUPPRESS, help="samples per prompt (default: 1)")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    flags = sampling_values(args)
    if bool(args.words) == (args.file is not None):
        args.fail("give prompts as words, or a file of prompts with --file")
    if args.words and args.model is None and args.config is None and (model := named_model(args.words[0])) is not None:
        args.fail(f"{args.words[0]} is the name of a model, not a prompt: octavo generate --model {model} PROMPT")
    words = [read_stdin() if word == "-" else word for word in args.words]
    rows = rows_of_file(args.file, flags) if args.file else rows_of_words(words, flags)
    if args.output != "-":
        check_target("--output", args.output)
    with opened(config) as llm:
        answers = _generate(llm, rows, args)
    return _report_errors(rows, answers)


def _generate(llm: "LLM", rows: "Sequence[Row]", args: argparse.Namespace) -> "list[Answer]":
    keeps_states = llm.stats().state_slots > 0
    encoded = [row.encode(llm.encoder, args.chat, keeps_states) for row in rows]
    prompts, ends = [ids for ids, _ in encoded], [checkpoints for _, checkpoints in encoded]
    params = [_params(llm, row, args.chat) for row in rows]
    answers = [Answer(row.given, len(ids), [Sample() for _ in range(one.n)]) for row, ids, one in zip(rows, prompts, params, strict=True)]
    with _writer(args.output, answers) as writer, GenerateProgress(len(rows), _writes_a_file(args.output)) as progress:
        try:
            with closing(llm.stream_batch(prompts, params, ends)) as deltas:
                for index, delta in deltas:
                    answers[index].take(delta)
                    writer.advance()
                    ended = delta.finish_reason is not None and answers[index].is_finished
                    progress.count(int(ended), len(prompts[index]) if ended else 0, len(delta.token_ids))
                    progress.show()
        except RequestError as error:
            with named("" if error.index is None else rows[error.index].place):
                raise
    return answers


def _writes_a_file(target: str | None) -> bool:
    """Whether the texts go to a file, so that a progress bar is shown. At a terminal a bar would stand between the texts."""
    return target not in (None, "-") or stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)


def _writer(target: str | None, answers: "list[Answer]") -> "Writer":
    return TextWriter(answers) if target is None else JsonWriter(answers, target)


def _params(llm: "LLM", row: "Row", as_chat: bool) -> SamplingParams:
    """Returns the row's own parameters. What neither a flag nor the line sets is what the model recommends."""
    return chat_params(llm, row.params) if as_chat or "messages" in row.given else row.params.with_defaults(llm.sampling_defaults)


def _report_errors(rows: "Sequence[Row]", answers: "Sequence[Answer]") -> int:
    """Prints the errors of samples that failed. Returns the exit code."""
    failed = [
        f"{row.place or 'the prompt'}: {sample.error}"
        for row, answer in zip(rows, answers, strict=True)
        for sample in answer.samples
        if sample.finish_reason == "error"
    ]
    for line in failed:
        print(f"octavo: error: {line}", file=sys.stderr)
    return 1 if failed else 0


# -- the prompts, each with its place and its own sampling parameters

NOT_WRITTEN = ("logprobs", "prompt_logprobs")  # the output has no place for them
LINE_SETTINGS = [field.name for field in fields(SamplingParams) if field.init and field.name not in NOT_WRITTEN]


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt."""

    place: str  # "prompts.jsonl line 3"; "" if there is only one prompt
    given: dict[str, Any]  # {"prompt": ...} or {"messages": ...}
    params: SamplingParams

    def encode(self, encoder: PromptEncoder, as_chat: bool, keeps_states: bool = False) -> tuple[list[int], list[int]]:
        """Returns the ids of the prompt, and the ends of its messages if it is a chat with a model that keeps states."""
        with named(self.place):
            if "prompt" in self.given and not as_chat:
                return encoder.encode(self.given["prompt"])[1], []
            messages = self.given["messages"] if "messages" in self.given else [{"role": "user", "content": self.given["prompt"]}]
            encoded = encoder.encode_chat(messages)
            return encoded[1], encoder.message_ends(messages, encoded) if keeps_states else []


def rows_of_words(words: Sequence[str], flags: Mapping[str, Any]) -> list[Row]:
    params = SamplingParams(**flags)
    return [Row(f"prompt {number}" if len(words) > 1 else "", {"prompt": word}, params) for number, word in enumerate(words, 1)]


def rows_of_file(name: str, flags: Mapping[str, Any]) -> list[Row]:
    text = _read_text(name)
    as_json = name.endswith(".jsonl") or (name == "-" and text.lstrip().startswith("{"))
    shown = "stdin" if name == "-" else name
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        place = f"{shown} line {number}"
        if line.strip():
            with named(place):
                given = _parse_line(line) if as_json else {"prompt": line.rstrip("\r")}
                settings = {key: given.pop(key) for key in list(given) if key in LINE_SETTINGS}
                rows.append(Row(place, given, SamplingParams(**{**flags, **settings})))
    if not rows:
        raise RequestError(f"{shown} has no prompts", "file")
    return rows


@contextmanager
def named(place: str) -> Iterator[None]:
    """Puts the place before the message of an error that is raised inside."""
    try:
        yield
    except OctavoError as error:
        raise (RequestError(f"{place}: {error}") if place else error) from error


def _parse_line(line: str) -> dict[str, Any]:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not valid JSON: {error}") from error
    if not isinstance(given, dict) or ("prompt" in given) == ("messages" in given):
        raise RequestError('must be an object with "prompt" or "messages"')
    for key in given:
        if key not in ("prompt", "messages", *LINE_SETTINGS):
            raise RequestError(f"unknown field {key!r}{nearest(key, ['prompt', 'messages', *LINE_SETTINGS])}")
    return given


def _read_text(name: str) -> str:
    try:
        if name == "-":
            return read_stdin()
        if not name.endswith((".txt", ".jsonl")):
            raise RequestError(f"{name}: a file of prompts must end in .txt (one prompt per line) or .jsonl", "file")
        return Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 text (byte {error.start})", "file") from error
    except OSError as error:
        raise RequestError(f"{name}: {error.strerror}", "file") from error


# -- the texts: both writers keep the order of the prompts, whichever ends first
#
#    prompt 1   ████████▒▒▒       written as it comes
#    prompt 2   ░░░░░░░░          waits in memory, and is written when prompt 1 ends

SEPARATOR = "---"


@dataclass(slots=True)
class Sample:
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None


@dataclass(slots=True)
class Answer:
    """What has come for one prompt so far."""

    given: dict[str, Any]  # {"prompt": ...} or {"messages": ...}
    prompt_tokens: int
    samples: list[Sample]
    cached_tokens: int = 0

    def take(self, delta: TextDelta) -> None:
        sample = self.samples[delta.index]
        sample.text += delta.text
        sample.tokens += len(delta.token_ids)
        sample.finish_reason, sample.error = delta.finish_reason, delta.error
        if delta.life is not None:
            self.cached_tokens = delta.life.cached_tokens

    @property
    def is_finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    def record(self) -> dict[str, object]:
        """Returns the line of JSON for this prompt."""
        samples = [{"text": one.text, "finish_reason": one.finish_reason, "tokens": one.tokens} for one in self.samples]
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sum(one.tokens for one in self.samples),
            "cached_tokens": self.cached_tokens,
        }
        return {**self.given, "outputs": samples, "usage": usage}


class Writer(Protocol):
    """Where the texts go."""

    def advance(self) -> None:
        """Writes what can be written by now."""
        ...

    def __enter__(self) -> "Writer": ...

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None: ...


class TextWriter:
    """Writes the texts to stdout, with a line --- between two of them."""

    def __init__(self, answers: list[Answer]) -> None:
        self._samples = [sample for answer in answers for sample in answer.samples]
        self._current = 0  # the sample that is being written
        self._written = 0  # characters of it

    def __enter__(self) -> "TextWriter":
        return self

    def advance(self) -> None:
        while self._current < len(self._samples):
            sample = self._samples[self._current]
            if len(sample.text) > self._written:
                piece, self._written = sample.text[self._written :], len(sample.text)  # counted first, for Ctrl-C may interrupt the writing
                print(for_stdout(piece), end="", flush=True)
            if sample.finish_reason is None:
                return
            self._current, self._written = self._current + 1, 0
            if self._current < len(self._samples):
                print(f"\n{SEPARATOR}\n", end="", flush=True)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        """Ends the last line, also one that Ctrl-C cut off."""
        if kind is None or self._current or self._written:
            print(flush=True)


@dataclass(slots=True)
class JsonWriter:
    """Writes a line of JSON for each prompt, to stdout (-) or a file. A file is replaced when the first prompt is done."""

    answers: list[Answer]
    target: str
    _written: int = 0  # lines

    def __enter__(self) -> "JsonWriter":
        return self

    def advance(self) -> None:
        while self._written < len(self.answers) and self.answers[self._written].is_finished:
            self._write(json.dumps(self.answers[self._written].record(), ensure_ascii=False) + "\n")
            self._written += 1

    def _write(self, line: str) -> None:
        if self.target == "-":
            print(for_stdout(line), end="", flush=True)
            return
        try:
            with Path(self.target).open("a" if self._written else "w", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise ConfigError(f"--output {self.target}: {error.strerror}") from error

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if kind is KeyboardInterrupt and self.target != "-":
            print(f"stopped: {self._written} of {len(self.answers)} outputs are in {self.target}", file=sys.stderr)
