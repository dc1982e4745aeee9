"""The house rules for documents: three lines a decision, tests behind every failure mode, no path of anybody's machine."""

import ast
import re
from collections.abc import Callable

# Spelled in two pieces, so that this file does not offend against itself.
MACHINE_PATH = re.compile(r"(?<![\w.~}>])/" + r"(work|root|home/\w+|Users/\w+|tmp/\w+_jobs)(/|\b)")

PARTS = ("- Context: ", "- Choice: ", "- Cost: ")
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
FAILURE_MODE = re.compile(r"^\| (?P<number>\d+) \| (?P<mode>[^|]+) \| (?P<tests>[^|]+) \|$", re.MULTILINE)


def machine_path_offences(name: str, text: str) -> list[str]:
    return [
        f"{name}:{number}: path of a machine: {found.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        if (found := MACHINE_PATH.search(line))
    ]


def decision_offences(text: str) -> list[str]:
    """Every `## ` entry is numbered in order and has exactly the three lines. A `# ` line begins a part."""
    offences = []
    for number, entry in enumerate(re.split(r"^## ", text, flags=re.MULTILINE)[1:], 1):
        title, *lines = [line for line in entry.splitlines() if line.strip() and not line.startswith("# ")]
        if not title.startswith(f"{number}. "):
            offences.append(f"{title!r} should be number {number}")
        if len(lines) != len(PARTS) or any(not line.startswith(part) for line, part in zip(lines, PARTS)):
            offences.append(f"{title!r} wants three lines: context, choice, cost")
    return offences


def failure_mode_offences(text: str, source_of: Callable[[str], str | None]) -> list[str]:
    """Rows of docs/reliability.md: numbered from 1, each `not yet` or nothing but tests that exist."""
    offences = []
    for number, row in enumerate(FAILURE_MODE.finditer(text), 1):
        tests = NAMED_TEST.findall(row["tests"])
        if int(row["number"]) != number:
            offences.append(f"{row['mode']} should be number {number}")
        if row["tests"] != "not yet" and row["tests"] != ", ".join(f"`{path}::{name}`" for path, name in tests):
            offences.append(f"{row['mode']}: {row['tests']!r} is neither `not yet` nor a list of tests")
        offences += _missing_tests(row["mode"], tests, source_of)
    return offences


def _missing_tests(what: str, tests: list[tuple[str, str]], source_of: Callable[[str], str | None]) -> list[str]:
    sources = {path: source_of(path) for path, _ in tests}
    found = {path: set() if source is None else defined_names(source) for path, source in sources.items()}
    return [f"{what}: there is no {path}::{name}" for path, name in tests if name not in found[path]]


def defined_names(source: str) -> set[str]:
    """Tests a file defines: functions, methods, classes, and classes made by assignment (state machines)."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names
