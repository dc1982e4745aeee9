"""Prompts from the command line or a file, each with its place and its own sampling parameters.

    prompts.txt      one prompt per line
    prompts.jsonl    {"prompt": "Once upon", "max_tokens": 32}
                     {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    -                stdin: JSONL if it begins with {, else one prompt per line

What a line does not set is taken from the flags. Empty lines are skipped. Errors name the file and the line.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from octavo.errors import OctavoError, RequestError, nearest
from octavo.sampling_params import SamplingParams
from octavo.text.prompt import PromptEncoder

NOT_WRITTEN = ("logprobs", "prompt_logprobs")
LINE_SETTINGS = [field.name for field in fields(SamplingParams) if field.init and field.name not in NOT_WRITTEN]


@dataclass(frozen=True, slots=True)
class Row:
    place: str  # "prompts.jsonl line 3"; "" where there is only one
    given: dict[str, Any]  # {"prompt": ...} or {"messages": ...}
    params: SamplingParams

    def encode(self, encoder: PromptEncoder, as_chat: bool) -> list[int]:
        with named(self.place):
            if "messages" in self.given:
                return encoder.encode_chat(self.given["messages"])[1]
            prompt = self.given["prompt"]
            return encoder.encode_chat([{"role": "user", "content": prompt}])[1] if as_chat else encoder.encode(prompt)[1]


def rows_of_words(words: Sequence[str], flags: Mapping[str, Any]) -> list[Row]:
    params = SamplingParams(**flags)
    return [Row(f"prompt {number}" if len(words) > 1 else "", {"prompt": word}, params) for number, word in enumerate(words, 1)]


def rows_of_file(name: str, flags: Mapping[str, Any]) -> list[Row]:
    text = _read(name)
    as_json = name.endswith(".jsonl") or (name == "-" and text.lstrip().startswith("{"))
    shown = "stdin" if name == "-" else name
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        place = f"{shown} line {number}"
        if line.strip():
            with named(place):
                given = _parse(line) if as_json else {"prompt": line.rstrip("\r")}
                settings = {key: given.pop(key) for key in list(given) if key in LINE_SETTINGS}
                rows.append(Row(place, given, SamplingParams(**{**flags, **settings})))
    if not rows:
        raise RequestError(f"{shown} has no prompts", "file")
    return rows


@contextmanager
def named(place: str) -> Iterator[None]:
    """Put the place before the message of an error inside."""
    try:
        yield
    except OctavoError as error:
        raise (RequestError(f"{place}: {error}") if place else error) from error


def _parse(line: str) -> dict[str, Any]:
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


def read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not UTF-8 text (byte {error.start})", "stdin") from error


def _read(name: str) -> str:
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
