"""What `make test` leaves to `make soak`: of many cases that differ in little, some run with every change, and all of them by hand."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def rarely(*cases: Any) -> list[Any]:
    """Cases that only `make soak` runs."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak) for case in cases]


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """Every so many of the cases run with every change, the first of them in any case."""
    return [case if number % count == 0 else rarely(case)[0] for number, case in enumerate(cases)]


def pairs(rows: Sequence[Any], columns: Sequence[Any], also: Iterable[tuple[Any, Any]] = (), shift: int = 0) -> list[Any]:
    """All pairs. Those that run with every change have each row and each column at least once. `also`: further ones that do"""
    often = {(rows[at % len(rows)], columns[(at + shift) % len(columns)]) for at in range(max(len(rows), len(columns)))} | set(also)
    every = [(row, column) for row in rows for column in columns]
    return [pair if pair in often else rarely(pair)[0] for pair in every]
