"""A setting written in every way, for tests of files and flags: in TOML, as words of a command line, and what it then is."""

import re
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Way = tuple[str, list[str], Any]
Chosen = dict[str, Way]  # setting -> the way it is written


def choices(ways: dict[str, list[Way]]) -> SearchStrategy[Chosen]:
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(some) for name, some in ways.items()})


def in_toml(filed: Chosen, dashes: bool) -> str:
    return "".join(f"{name.replace('_', '-') if dashes else name} = {way[0]}\n" for name, way in filed.items())


def in_words(file: Path, flags: Chosen) -> list[str]:
    return ["--config", str(file), *(word for way in flags.values() for word in way[1])]


def meant(filed: Chosen, flags: Chosen) -> dict[str, Any]:
    return {name: way[2] for name, way in {**filed, **flags}.items()}


def origin(name: str, file: Path, filed: Chosen, flags: Chosen) -> str:
    return "flag" if name in flags else f"file {file}" if name in filed else "default"


def shown(out: str) -> dict[str, tuple[str, str]]:
    """What --show-config printed: value and origin of each setting, under a line that says so."""
    head, *rows = [re.split(r"  +", line, maxsplit=2) for line in out.splitlines()]
    assert head == ["setting", "value", "from"]
    return {name: (value, origin) for name, value, origin in rows}
