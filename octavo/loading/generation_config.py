"""generation_config.json: how a model's makers would sample from it, and the ids that end its answers."""

import reprlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.errors import LoadError, RequestError
from octavo.loading.files import read_json_object
from octavo.sampling_params import SamplingParams

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
