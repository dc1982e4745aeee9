"""`Case`: one hostile or broken model, and the words its refusal must contain; and short ways to make one.

A case is the smallest model that opens (tiny_files.py) with one thing spoiled.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import tiny_files as tiny

Words = str | Sequence[str]
Files = Callable[[], dict[str, bytes]]


@dataclass(frozen=True)
class Case:
    group: int
    name: str
    build: Callable[[Path], Path]  # writes the model into this folder and returns what to name as --model
    words: tuple[str, ...]  # all of them stand in the one line
    flags: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.group} {self.name}"

    def write(self, out: Path) -> Path:
        folder = out / "".join(char if char.isalnum() else "-" for char in self.id)
        folder.mkdir(parents=True)
        return self.build(folder)


def gguf_case(group: int, name: str, words: Words, content: bytes, size: int | None = None) -> Case:
    """A file with this content, made `size` long without taking that room."""

    def build(folder: Path) -> Path:
        path = folder / "model.gguf"
        path.write_bytes(content)
        if size is not None:
            os.truncate(path, size)
        return path

    return Case(group, name, build, ("model.gguf", *several(words)))


def keys_case(group: int, name: str, words: Words, changes: Mapping[str, bytes | None], keys: tiny.Keys | None = None) -> Case:
    """A sound GGUF file but for these keys; None leaves one out."""
    changed = {**(tiny.gguf_keys() if keys is None else keys), **changes}
    return gguf_case(group, name, words, tiny.gguf_file({name: value for name, value in changed.items() if value is not None}))


def folder_case(group: int, name: str, words: Words, files: Mapping[str, Any], base: Files = tiny.folder_files) -> Case:
    """A sound folder but for these files: bytes, text, JSON, or a function that makes one of these; None leaves a file out."""

    def build(folder: Path) -> Path:
        contents = {**base(), **{file: _raw(content) for file, content in files.items()}}
        return tiny.write_files(folder, {file: content for file, content in contents.items() if content is not None})

    return Case(group, name, build, several(words))


def _raw(content: Any) -> bytes | None:
    if callable(content):
        return _raw(content())
    if content is None or isinstance(content, bytes):
        return content
    return (content if isinstance(content, str) else json.dumps(content)).encode()


def several(words: Words) -> tuple[str, ...]:
    return (words,) if isinstance(words, str) else tuple(words)
