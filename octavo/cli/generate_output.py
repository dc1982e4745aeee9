"""Where the texts of `octavo generate` go: to stdout while they come, or as lines of JSON, each when its prompt is done.

Both keep the order of the prompts, whichever ends first. A text that is not yet due waits in memory:

    prompt 1   ████████▒▒▒       written as it comes
    prompt 2   ░░░░░░░░          waits, and is written at once when prompt 1 ends
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from octavo.cli.terminal import for_stdout
from octavo.errors import ConfigError
from octavo.outputs import TextDelta

SEPARATOR = "---"


@dataclass(slots=True)
class Sample:
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None


@dataclass(slots=True)
class Answer:
    """What has come for one prompt."""

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
        samples = [{"text": one.text, "finish_reason": one.finish_reason, "tokens": one.tokens} for one in self.samples]
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sum(one.tokens for one in self.samples),
            "cached_tokens": self.cached_tokens,
        }
        return {**self.given, "outputs": samples, "usage": usage}


class Writer(Protocol):
    def advance(self) -> None:
        """Write what is due by now."""
        ...

    def __enter__(self) -> "Writer": ...

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None: ...


class TextWriter:
    """Texts on stdout, a line with --- between two of them."""

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
                piece, self._written = sample.text[self._written :], len(sample.text)  # before it is written: Ctrl-C may come in it
                print(for_stdout(piece), end="", flush=True)
            if sample.finish_reason is None:
                return
            self._current, self._written = self._current + 1, 0
            if self._current < len(self._samples):
                print(f"\n{SEPARATOR}\n", end="", flush=True)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        """The last line ends, also one that Ctrl-C cut off."""
        if kind is None or self._current or self._written:
            print(flush=True)


@dataclass(slots=True)
class JsonWriter:
    """A line of JSON for each prompt, on stdout (-) or in a file, which is replaced when the first prompt is done."""

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
