"""Reads settings from a TOML file, reads sizes such as 32k, and prints the table of where each setting came from.

    # octavo.toml: the names of the flags, with - or _; sizes as in flags
    model = "models/SmolLM2"
    max-model-len = "32k"
    enable_prefix_caching = false

A flag wins over the file, and the file over the default. The file may have settings of the engine and of the server, and nothing
else. Paths in it are relative to the current folder, as those of flags are.
"""

import argparse
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, fields
from fractions import Fraction
from typing import Any

from octavo import config, server_config
from octavo.config import EngineConfig, environment
from octavo.errors import ConfigError, nearest
from octavo.server_config import SECRETS, ServerConfig

UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
SETTINGS = tuple(field.name for field in fields(EngineConfig) if field.name != "skip_tokenizer_init")  # commands work with text
SERVER_SETTINGS = tuple(field.name for field in fields(ServerConfig))
MOST_BYTES = 2**20


def read_settings(path: str) -> dict[str, Any]:
    """Returns the settings of a file, as fields of EngineConfig and ServerConfig. Each value is checked alone."""
    settings: dict[str, Any] = {}
    known = (*SETTINGS, *SERVER_SETTINGS)
    for key, value in _parse(path).items():
        name = key.replace("-", "_")
        if name not in known:
            hint = nearest(name, known) or "; it takes the settings of the engine and the server, which --show-config lists"
            raise ConfigError(f"{path}: unknown setting {key[:80]!r}{hint}")
        if name in settings:
            raise ConfigError(f"{path}: {name} is set twice, once with - and once with _")
        settings[name] = _converted(path, name, value)
    return settings


def _parse(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    if len(data) > MOST_BYTES:
        raise ConfigError(f"--config {path}: more than {MOST_BYTES:,} bytes, too many for settings")
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}: not UTF-8 text (at line {line})") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deep") from error
    except ValueError as error:  # its message has the line, unless the file ends too early
        last = len(data.splitlines())
        raise ConfigError(f"{path}: not valid TOML: {str(error).replace('at end of document', f'at line {last}, the last')}") from error


def _converted(path: str, name: str, value: object) -> object:
    """Returns the value that the flag of this name would give. TOML has types: 32k needs quotes, a plain number must have none."""
    field, kind = _field(name), _field(name).type
    try:
        if is_size(field) and isinstance(value, str):
            value = size(value)
        if kind == dict[str, Any] | None and isinstance(value, str):
            value = json_object(value)
        if kind == str | None and not isinstance(value, str):
            raise ConfigError(f"{name} must be text in quotes, got {value!r}")
        (config if name in SETTINGS else server_config).check_setting(name, value)
    except (ConfigError, argparse.ArgumentTypeError) as error:
        message = str(error) if isinstance(error, ConfigError) else f"{name}: {error}"
        raise ConfigError(f"{path}: {message[:300]}") from error
    if isinstance(value, list):
        return tuple(value)
    return float(value) if kind is float and isinstance(value, int) else value  # TOML reads 1 as an integer


def _field(name: str) -> Field[Any]:
    return (EngineConfig if name in SETTINGS else ServerConfig).__dataclass_fields__[name]


def settings_table(configs: Sequence[EngineConfig | ServerConfig], names: frozenset[str], origins: Mapping[str, str]) -> str:
    """Returns a table of the settings in `names`, each with its value and origin, and of the environment variables that are set."""
    rows = [("setting", "value", "from")]
    values = {name: value for one in configs for name, value in asdict(one).items() if name in names}
    shown = {name: "(set)" if name in SECRETS and value else _text(name, value) for name, value in values.items()}
    rows += [(name, text, origins.get(name, "default")) for name, text in shown.items()]
    rows += [(name, value, "environment") for name, value in environment().items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}" for name, value, origin in rows)


def _text(name: str, value: object) -> str:
    if value is None and is_size(_field(name)):
        return "auto"  # a number that the engine chooses
    if value is None or value == ():
        return "not set"
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def is_size(field: Field[Any]) -> bool:
    """Whether the field's number may have a unit, such as 32k."""
    return field.type == int | None or field.name.endswith("_bytes")


def size(text: str) -> int | None:
    """Reads 4096, 32k, 512m, 1.5g, 24GiB or 24gb. All units are powers of 1024. Returns None for auto."""
    found = re.fullmatch(r"(\d+|\d*\.\d+)([kmg]?)(?:(?<=[kmg])i?b)?", text.lower())
    if found is None and text.lower() != "auto":
        raise argparse.ArgumentTypeError(f"must be a size like 4096, 32k, 512m, 1.5g, 24GiB or auto, got {text!r}")
    return None if found is None else int(Fraction(found[1]) * UNITS[found[2]])


def json_object(text: str) -> dict[str, Any]:
    """Reads a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text[:80]!r} ({str(error)[:80]})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text[:80]!r}")
    return value
