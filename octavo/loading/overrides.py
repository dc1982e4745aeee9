"""`hf_overrides`: keys of a config.json that the user overrides. It uses no torch, because plans use it.

A value replaces the one of the file; only `text_config` is merged key by key. A key that is neither in the file nor read by the
model's family is refused, because it would have no effect.
"""

from typing import Any

from octavo.errors import ConfigError, nearest
from octavo.model_config import ModelConfig
from octavo.models.registry import read_config

MERGED = "text_config"  # contains a whole config
ROPE, OLDER_ROPE, THETA = "rope_parameters", "rope_scaling", "rope_theta"  # two names of the same key; readers use the first one present


class _Asked(dict[str, Any]):
    """Records which keys a reader requested."""

    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__(raw)
        self.keys_asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.keys_asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.keys_asked.add(str(key))
        return super().__contains__(key)


def overridden(raw: dict[str, Any], overrides: dict[str, Any] | None) -> dict[str, Any]:
    """Returns a config.json with the overrides applied."""
    if not overrides:
        return raw
    merged = {**raw, **overrides}
    if isinstance(inner := raw.get(MERGED), dict) and isinstance(overrides.get(MERGED), dict):
        merged[MERGED] = {**inner, **overrides[MERGED]}
    if THETA in overrides:  # also if the file has it among its rotation parameters, which would take precedence
        inside = [key for key in (ROPE, OLDER_ROPE) if key not in overrides and isinstance(merged.get(key), dict) and THETA in merged[key]]
        merged |= {key: {**merged[key], THETA: overrides[THETA]} for key in inside}
    if OLDER_ROPE in overrides and ROPE not in overrides and isinstance(rope := merged.pop(ROPE, None), dict) and THETA in rope:
        merged.setdefault(THETA, rope[THETA])
    return merged


def read_overridden(raw: dict[str, Any], overrides: dict[str, Any] | None, source: str) -> ModelConfig:
    """Reads a config.json with the overrides applied. `source`: the file, for messages"""
    if not overrides:
        return read_config(raw, source)
    merged = _Asked(overridden(raw, overrides))
    config = read_config(merged, f"{source} with hf_overrides")
    known = merged.keys_asked | raw.keys()
    for key in overrides:
        if key not in known:
            why = f"which {source} does not have and its family does not read"
            raise ConfigError(f"hf_overrides has {key[:80]!r}, {why}{nearest(key, known)}")
    return config
