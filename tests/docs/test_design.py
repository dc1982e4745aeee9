"""docs/design.md, docs/reading.md and the exercises name what is there: files, rooms, signatures, functions."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.house import import_graph, module_name, sources
from tests.docs.sources import ROOT, documents
from tests.docs.test_references import rows
from tests.house.rules import BASE, MAY_IMPORT

DESIGN = (ROOT / "docs/design.md").read_text()
README = (ROOT / "README.md").read_text()
READING = (ROOT / "docs/reading.md").read_text()
EXERCISES = (ROOT / "docs/exercises.md").read_text()
FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|cpp|h|js|toml|md)|(?:[\w.-]+/)+)`")  # `policy/rows.py`, `native/step.cpp`, `web/`
WIDTH = 120


def place(name: str) -> Path:
    """Names are relative to the repository, or to octavo/."""
    return ROOT / name if (ROOT / name).exists() else ROOT / "octavo" / name


# -- files


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md", "docs/exercises.md", "docs/reading.md"])
def test_every_file_that_a_page_about_the_code_names_exists(page: str) -> None:
    named = FILE.findall((ROOT / page).read_text())
    assert named
    assert [name for name in named if not place(name).exists()] == []


def test_functions_that_an_exercise_tells_to_read_are_in_the_file() -> None:
    lines = re.findall(r"^Read (.*)\.$", EXERCISES, re.MULTILINE)
    pairs = [re.findall(r"`([^`]+)`", part) for line in lines for part in line.split(";")]
    missing = [(name, word) for name, *words in pairs for word in words if not re.search(rf"\b{word}\b", place(name).read_text())]
    assert len(pairs) > 36
    assert missing == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/design.md", "docs/house.md", "docs/reading.md"])
def test_lines_of_text_are_at_most_120_columns_long(page: str) -> None:
    long = [line for line in (ROOT / page).read_text().splitlines() if len(line) > WIDTH and not line.startswith(("|", "!["))]
    assert long == []


# -- rooms


def test_the_table_of_rooms_has_every_room_with_what_it_may_import() -> None:
    table = DESIGN.partition("\n## The rooms\n")[2].partition("\n## ")[0]
    shown = {row[0].strip("`").removesuffix("/").removesuffix(".py"): set(re.findall(r"`(\w+)`", row[3])) for row in rows(table)}
    known = {room: set(MAY_IMPORT[room]) - {"octavo"} for room in MAY_IMPORT.keys() - BASE - {"octavo", "__main__"}}
    folders = {path.name for path in (ROOT / "octavo").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert shown == known | {room: set() for room in folders - known.keys()}


# -- signatures


def stubs() -> Iterator[tuple[str, ast.ClassDef]]:
    """(file, class) of every class in a block whose first line names a file."""
    for path, text in re.findall(r"^```py\n# (\S+)\n(.*?)^```", DESIGN, re.MULTILINE | re.DOTALL):
        yield from ((path, node) for node in ast.parse(text).body if isinstance(node, ast.ClassDef))


def signatures(node: ast.ClassDef, with_methods: bool) -> dict[str, str]:
    """Name -> its annotation, or its arguments and what it returns."""
    found = {}
    for member in node.body:
        if isinstance(member, ast.AnnAssign):
            found[ast.unparse(member.target)] = ast.unparse(member.annotation).strip("'")
        elif with_methods and isinstance(member, ast.FunctionDef):
            marks = [ast.unparse(mark) for mark in member.decorator_list]
            returned = "" if member.returns is None else ast.unparse(member.returns)
            found[member.name] = f"{marks} ({ast.unparse(member.args)}) -> {returned}"
    return found


def test_the_signatures_of_seams_and_plans_are_those_of_the_code() -> None:
    """A protocol is shown with its methods, a dataclass with its fields."""
    every = list(stubs())
    assert {"Executor", "Program", "AttentionBackend", "Family", "KVStore", "CacheGroup", "StepPlan"} <= {node.name for _, node in every}
    for path, shown in every:
        (real,) = [node for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.ClassDef) and node.name == shown.name]
        is_protocol = [ast.unparse(base) for base in real.bases] == ["Protocol"]
        assert signatures(shown, True) == signatures(real, is_protocol), f"{path}: {shown.name}"


# -- the reading path


def test_the_reading_path_goes_from_what_is_imported_to_what_imports_it() -> None:
    """So each file needs only files before it. What pages say of its length is true within 3 %."""
    path = re.findall(r"^\d+\. `(octavo/[^`]+)`: [^\n]", READING, re.MULTILINE)
    graph = import_graph(sources(ROOT), with_types=True)
    modules = [module_name(name) for name in path if name.endswith(".py")]
    early = [(name, later) for index, name in enumerate(modules) for later in modules[index + 1 :] if later in graph[name]]
    assert len(path) > 10 and early == []
    lines = {name: (ROOT / name).read_text().count("\n") for name in path}
    lengths = [sum(lines[name] for name in path if name.endswith(suffix)) for suffix in (".py", (".cpp", ".h"))]
    for page in (README, READING):
        said = re.search(r"([\d,]+) lines of Python and\s+([\d,]+)( lines)? of C\+\+", page)
        assert said is not None
        for number, length in zip(said.groups(), lengths):
            assert length == pytest.approx(int(number.replace(",", "")), rel=0.03)
    assert f"a list of {len(path)} files" in README


def test_the_picture_is_in_the_readme_and_in_the_design() -> None:
    shown = {path.name for path in documents() if "pictures/architecture.svg)" in path.read_text()}
    assert shown == {"README.md", "design.md"}
