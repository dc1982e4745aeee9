"""Writes into docs/status.md which tests prove each promise.

    python docs/status.py

A promise that is done has an id in brackets: `- [x] `octavo chat` [octavo-chat]`. A test names the promises that it proves in a
comment above it, `# promise: octavo-chat`. Nobody writes the lists on the page: a test compares them with what this would write.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/status.md"
WIDTH = 120

ITEM = re.compile(r"^- \[([x ])\] (.+(?:\n  [^ -].*)*)((?:\n  - `tests/.*(?:\n    .*)*)*)", re.MULTILINE)
ID = re.compile(r" \[([a-z0-9-]+)\]$")
COMMENT = re.compile(r"^ *# promise: (.*)$")
DEFINITION = re.compile(r"^ *(?:(?:async )?def|class) (\w+)|^(\w+) = ")

Proofs = dict[str, list[str]]  # id -> tests, as path::name


@dataclass(frozen=True, slots=True)
class Promise:
    section: str
    text: str  # on one line, without the id
    done: bool
    id: str | None


def promises(page: str) -> Iterator[Promise]:
    for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        section = part.partition("\n")[0]
        for item in ITEM.finditer(part):
            yield Promise(section, ID.sub("", _joined(item)), item[1] == "x", _id(item))


def _joined(item: re.Match[str]) -> str:
    return item[2].replace("\n ", "")


def _id(item: re.Match[str]) -> str | None:
    found = ID.search(_joined(item))
    return found[1] if found else None


def read_tests(folder: Path) -> dict[str, str]:
    """Path inside the repository -> text, of every Python file below the folder."""
    return {path.relative_to(folder.parent).as_posix(): path.read_text() for path in sorted(folder.rglob("*.py"))}


def proofs(tests: Mapping[str, str]) -> Proofs:
    """The tests of each promise, by the comments above them."""
    found: Proofs = {}
    for path, text in tests.items():
        named: list[str] = []
        for line in text.splitlines() if "# promise: " in text else []:
            if comment := COMMENT.match(line):
                named += comment[1].split(", ")
            elif named and (definition := DEFINITION.match(line)):
                for name in named:
                    found.setdefault(name, []).append(f"{path}::{definition[1] or definition[2]}")
                named = []
            elif not line.strip():
                named = []  # the test that stood below the comment is gone
    return found


def offences(page: str, found: Proofs) -> list[str]:
    """What a person has to mend: ids and comments that do not fit together."""
    listed = list(promises(page))
    ids = [promise.id for promise in listed if promise.id is not None]
    return [
        *(f"two promises are called {name}" for name in sorted(set(ids)) if ids.count(name) > 1),
        *(f"done, but without an id: {promise.text}" for promise in listed if promise.done and promise.id is None),
        *(f"not done, but with an id: {promise.text}" for promise in listed if not promise.done and promise.id is not None),
        *(f"no test proves {name}" for name in ids if name not in found),
        *(f"{tests[0]} proves {name}, which docs/status.md does not have" for name, tests in found.items() if name not in ids),
    ]


def written(page: str, found: Proofs) -> str:
    """The page with the tests of every promise below it."""

    def item(match: re.Match[str]) -> str:
        head = textwrap.fill(_joined(match), WIDTH - 6, break_on_hyphens=False, break_long_words=False).replace("\n", "\n  ")
        return "\n".join([f"- [{match[1]}] {head}", *_lines(found.get(_id(match) or "", []))])

    return ITEM.sub(item, page)


def _lines(tests: list[str]) -> Iterator[str]:
    """A line for each file with its tests, wrapped."""
    for path in sorted({test.partition("::")[0] for test in tests}):
        names = ", ".join(f"`{name}`" for name in (test.partition("::")[2] for test in tests if test.startswith(f"{path}::")))
        text = f"  - `{path}`: {names}"
        yield textwrap.fill(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)


def main() -> None:
    found, page = proofs(read_tests(ROOT / "tests")), PAGE.read_text()
    if wrong := offences(page, found):
        raise SystemExit("\n".join(wrong))
    PAGE.write_text(written(page, found))


if __name__ == "__main__":
    main()
