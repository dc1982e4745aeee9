"""What the project says to its users: help texts, string literals of the code, the page's scripts, documents."""

import ast
import contextlib
import importlib
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs.house import parsed
from octavo.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
GAP = "…"  # a value that is filled in
PLACEHOLDER = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[sdifgrx]")


@dataclass(frozen=True, slots=True)
class Said:
    where: str  # file:line, or the command
    text: str


@cache
def helps() -> dict[str, str]:
    """Command -> its --help."""
    shown = {"octavo": _help([])}
    for name in COMMANDS:
        shown[f"octavo {name}"] = _help([name])
        with contextlib.suppress(ModuleNotFoundError):  # another name for a command has no module of its own
            for part in getattr(importlib.import_module(f"octavo.cli.{name}"), "SUBCOMMANDS", {}):
                shown[f"octavo {name} {part}"] = _help([name, part])
    return shown


def _help(words: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return out.getvalue()


@cache
def literals() -> tuple[Said, ...]:
    """Every string of octavo/**/*.py that is no docstring, with gaps where values are filled in."""
    found: list[Said] = []
    for path in sorted((ROOT / "octavo").rglob("*.py")):
        nodes = list(ast.walk(parsed(path.read_text())))
        parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        skipped = parts | {id(text) for text in _docstrings(nodes)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
                found.append(_said(path, node, PLACEHOLDER.sub(GAP, node.value)))
            elif isinstance(node, ast.JoinedStr):
                found.append(_said(path, node, "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)))
    return tuple(found)


def notes(folder: str) -> Iterator[Said]:
    """Every docstring and comment of a folder of octavo/, in Python and C++."""
    for path in sorted((ROOT / "octavo" / folder).rglob("*.py")):
        yield from (_said(path, text, str(text.value)) for text in _docstrings(ast.walk(parsed(path.read_text()))))
        with path.open("rb") as file:
            comments = [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
        yield from (Said(f"{path.relative_to(ROOT).as_posix()}:{token.start[0]}", token.string) for token in comments)
    for path in sorted((ROOT / "octavo" / folder).glob("*.[ch]*")):
        yield from (Said(line.where, line.text.partition("//")[2]) for line in lines(path) if "//" in line.text)


def _said(path: Path, node: ast.expr, text: str) -> Said:
    return Said(f"{path.relative_to(ROOT).as_posix()}:{node.lineno}", text)


def _docstrings(nodes: Iterable[ast.AST]) -> Iterator[ast.Constant]:
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.value


def lines(path: Path) -> list[Said]:
    name = path.relative_to(ROOT).as_posix()
    return [Said(f"{name}:{number}", line) for number, line in enumerate(path.read_text().splitlines(), 1)]


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]


def page() -> list[Path]:
    """The page's own files, without libraries."""
    return [ROOT / "octavo/web/index.html", *sorted((ROOT / "octavo/web").glob("*.js"))]
