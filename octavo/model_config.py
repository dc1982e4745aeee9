"""What a model is: `ModelConfig`, and the reader that takes checked values out of a config.json.

A family (`models/family.py`) reads the fields of its own layers with the same reader. GGUF metadata is translated into the keys
of a config.json first. Every value is checked while it is read, so that the model code can trust it.
"""

import json
import reprlib
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from octavo.errors import LoadError

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
NORM_EPSILONS = (1e-15, 1.0)
ROPE_THETAS = (1.001, 1e15)  # what logarithms and powers of the rotary tables can bear, and more than any model has
ROPE_SCALES = (1e-6, 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0  # llama3, yarn and longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn and longrope; None: computed from factor, and for yarn from mscale, mscale_all_dim
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    factors: tuple[float, ...] = ()  # longrope: each frequency is divided by its own
    long_factors: tuple[float, ...] = ()  # longrope: taken instead if max_model_len is above original_max_position

    def up_to(self, max_len: int) -> "RopeConfig":
        """Returns the config for sequences of at most this length, with one list of factors."""
        is_long = max_len > self.original_max_position
        return replace(self, factors=self.long_factors if is_long else self.factors, long_factors=())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the engine has to know of every model. Each family derives its own from it, with the fields of its layers."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position: int
    tie_embeddings: bool
    dtype: str | None  # what the checkpoint says, if it says
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def is_json_object(value: object) -> bool:
    """Whether this could be a config.json, or a part of one."""
    try:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value) and bool(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return False


class ConfigReader:
    """Takes checked values out of a raw config.json. Every error names the file and the key."""

    def __init__(self, raw: dict[str, Any], source: str) -> None:
        self.raw = raw
        self.source = source

    def fail(self, key: str, wanted: str) -> LoadError:
        shown = reprlib.repr(self.raw.get(key, "(missing)"))
        return LoadError(f"{self.source}: {key} must be {wanted}, got {shown}")

    def integer(self, key: str, default: int | None = None, high: int = 2**31, low: int = 1) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if type(value) is not int or not low <= value <= high:
            raise self.fail(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float, low: float, high: float) -> float:
        value = self.raw.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.fail(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Reads factors of single frequencies."""
        values, (low, high) = self.raw.get(key), ROPE_SCALES
        if isinstance(values, list) and len(values) == count and all(type(one) in (int, float) and low <= one <= high for one in values):
            return tuple(float(one) for one in values)
        raise self.fail(key, f"{count} numbers from {low:g} to {high:g}")

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        value = default if value is None else value
        if type(value) is not bool:
            raise self.fail(key, "true or false")
        return value

    def object(self, key: str) -> dict[str, Any]:
        """Returns a copy, empty if there is none."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.fail(key, "an object")
        return dict(value or {})

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.raw.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int and item >= 0 for item in values):
            raise self.fail(key, "a token id or a list of them")
        return tuple(values)

    def common(self, architecture: str) -> dict[str, Any]:
        """Returns the fields of `ModelConfig`, under the keys that all families share."""
        bos = self.ids("bos_token_id")
        return {
            "architecture": architecture,
            "vocab_size": self.integer("vocab_size", high=2**24),
            "hidden_size": self.integer("hidden_size", high=2**20),
            "num_layers": self.integer("num_hidden_layers", high=1024),
            "max_position": self.integer("max_position_embeddings", 2048),
            "tie_embeddings": self.flag("tie_word_embeddings", False),
            "dtype": self.dtype(),
            "eos_token_ids": self.ids("eos_token_id"),
            "bos_token_id": bos[0] if bos else None,
        }

    def dtype(self) -> str | None:
        name = self.raw.get("dtype") or self.raw.get("torch_dtype")
        if name is not None and not isinstance(name, str):
            raise self.fail("dtype", "a name such as bfloat16")
        return name

    def rope(self, rotated: int, parameters: Any = None, theta: float | None = None) -> RopeConfig:
        """Reads `rope_parameters` (new files), or `rope_theta` with `rope_scaling` (older ones).

        `rotated`: how many numbers of a head are; `parameters`, `theta`: what to read instead, where a model has several rotations
        """
        if parameters is None:
            parameters = self.object("rope_parameters") or self.object("rope_scaling")
        if not isinstance(parameters, dict):
            raise self.fail("rope_parameters", "objects")
        inner = ConfigReader(parameters, f"{self.source}: rope")
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        if kind not in ROPE_KINDS:
            raise LoadError(f"{self.source}: rope_type is {reprlib.repr(kind)}; supported: {', '.join(ROPE_KINDS)}")
        theta = self.number("rope_theta", 10000.0, *ROPE_THETAS) if theta is None else theta
        longest = self.integer("max_position_embeddings", 2048)
        original = inner.integer("original_max_position_embeddings", self.integer("original_max_position_embeddings", longest))
        return RopeConfig(
            kind=cast(RopeKind, kind),
            theta=inner.number("rope_theta", theta, *ROPE_THETAS),
            factor=inner.number("factor", longest / original if kind == "longrope" else 1.0, *ROPE_SCALES),
            original_max_position=original,
            **inner._llama3_fields(kind),
            **inner._yarn_fields(),
            **inner._longrope_fields(kind, rotated),
        )

    def _llama3_fields(self, kind: str) -> dict[str, Any]:
        low, high = self.number("low_freq_factor", 1.0, *ROPE_SCALES), self.number("high_freq_factor", 4.0, *ROPE_SCALES)
        if kind == "llama3" and low >= high:
            raise self.fail("high_freq_factor", f"above low_freq_factor {low:g}")
        return {"low_freq_factor": low, "high_freq_factor": high}

    def _yarn_fields(self) -> dict[str, Any]:
        given = [key for key in ("attention_factor", "mscale", "mscale_all_dim") if self.raw.get(key) is not None]
        return {
            **{key: self.number(key, 1.0, *ROPE_SCALES) for key in given},
            "beta_fast": self.number("beta_fast", 32.0, *ROPE_SCALES),
            "beta_slow": self.number("beta_slow", 1.0, *ROPE_SCALES),
            "truncate": self.flag("truncate", True),
        }

    def _longrope_fields(self, kind: str, rotated: int) -> dict[str, Any]:
        if kind != "longrope":
            return {}
        return {"factors": self.numbers("short_factor", rotated // 2), "long_factors": self.numbers("long_factor", rotated // 2)}
