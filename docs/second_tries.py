"""Writes into docs/reliability.md which tests get a second try, and why.

    python docs/second_tries.py

A test that judges how long something takes has the decorator `@pytest.mark.timed("what it measures")`. Nothing else may grant a second
try. A test compares the page with what this would write.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from docs.status import read_tests

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/reliability.md"
TABLE = re.compile(r"(?<=^\| test \| what it measures \|\n\|---\|---\|\n)(?:\|.*\n)*", re.MULTILINE)
RERUN = re.compile(r"\bflaky\b|\breruns?\b|\bonly_rerun\b|--reruns")
MAY_NAME_IT = ("tests/conftest.py", "tests/house/test_second_tries.py")  # the place that grants second tries, and its test


def timed_tests(tests: Mapping[str, str]) -> dict[str, str]:
    """path::name -> what the test measures, by the decorators; "" if a decorator does not say it."""
    found = {}
    for path, text in tests.items():
        for node in ast.walk(ast.parse(text)) if ".timed(" in text else []:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for call in filter(_is_mark, node.decorator_list):
                    found[f"{path}::{node.name}"] = _reason(call)
    return found


def _is_mark(node: ast.expr) -> bool:
    return ast.unparse(node).startswith("pytest.mark.timed")


def _reason(call: ast.expr) -> str:
    arguments = call.args if isinstance(call, ast.Call) and not call.keywords else []
    only = arguments[0] if len(arguments) == 1 else None
    return only.value.strip() if isinstance(only, ast.Constant) and isinstance(only.value, str) else ""


def offences(tests: Mapping[str, str]) -> Iterator[str]:
    """Marks without a reason or elsewhere than on a test, other ways to a second try, and tests that measure time without the mark."""
    found = timed_tests(tests)
    yield from (f"{test} does not say what it measures" for test, reason in found.items() if not reason)
    for path, text in tests.items():
        if path in MAY_NAME_IT:
            continue
        yield from (f"{path} grants second tries by {word[0]}" for word in RERUN.finditer(text))
        if text.count("mark.timed") != sum(test.startswith(f"{path}::") for test in found):
            yield f"{path} has a mark `timed` that is no decorator of a test"
        unmarked = (name for name in _clocked(text) if f"{path}::{name}" not in found)
        yield from (f"{path}::{name} asks a FairClock and is not marked `timed`" for name in unmarked)


def _clocked(text: str) -> Iterator[str]:
    """Tests that ask a clock how long something took."""
    if "FairClock" in text:
        for node in ast.walk(ast.parse(text)):
            is_test = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
            if is_test and any(isinstance(each, ast.Name) and each.id == "FairClock" for each in ast.walk(node)):
                yield node.name


def written(page: str, found: Mapping[str, str]) -> str:
    rows = "".join(f"| `{test}` | {reason} |\n" for test, reason in sorted(found.items()))
    assert TABLE.search(page), "docs/reliability.md has no table of second tries"
    return TABLE.sub(lambda _: rows, page)


def main() -> None:
    tests = read_tests(ROOT / "tests")
    if wrong := list(offences(tests)):
        raise SystemExit("\n".join(wrong))
    PAGE.write_text(written(PAGE.read_text(), timed_tests(tests)))


if __name__ == "__main__":
    main()
