"""Counts what docs/house.md says about the source, on the tree of any commit.

    python docs/house.py                  prints the figures of this tree
    python docs/house.py --tree FOLDER    prints the figures of another tree, for example a git worktree
    python docs/house.py --names          also lists what was counted
    python docs/house.py --write          writes the figures into the column "today" of docs/house.md

The files of a request are found by serving the default model. This needs the packages of this environment and, in the tree, the
native library (`make native`). Everything else is read from the source.
"""

import argparse
import ast
import json
import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/house.md"
SHORT = 40  # lines
IDLE_SECONDS, END_SECONDS = 2, 1  # without a request; for what runs after the last chunk. An engine returns memory every 5 s
KERNELS = ("octavo/kernels/", "octavo/native/")
# Names of a dense layer's matrices, in a checkpoint and here, and the keys of a config.json that give their sizes.
LAYER_WORDS = re.compile(r"\b([qkvo]_proj|gate_proj|up_proj|down_proj|gate_up|intermediate_size|num_key_value_heads)\b")
CYCLES = {"Import cycles": False, "Import cycles, with imports for types": True}  # title -> whether those for types count
STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)  # where an import can stand
READY = re.compile(r"Octavo is ready: (http://\S+)")

# Runs when an interpreter starts, in the server and in every process that it starts. While the switch is on, it writes down every
# function that is called.
HOOK = """
import mmap, os, sys, threading

calls, seen = open(os.environ["HOUSE_CALLS"], "a", buffering=1), set()
with open(os.environ["HOUSE_SWITCH"], "rb") as file:
    switch = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)

def record(frame, event, arg):
    window = switch[0]
    if window and event == "call" and (window, frame.f_code) not in seen:
        seen.add((window, frame.f_code))
        calls.write(f"{window}\\t{frame.f_code.co_filename}\\t{frame.f_code.co_qualname}\\n")

threading.setprofile(record)
sys.setprofile(record)
"""
OFF, IDLE, BUSY = range(3)  # the switch: which window calls are written down for

Graph = dict[str, set[str]]  # module -> the modules that it imports


# -- the files


def sources(tree: Path) -> dict[str, str]:
    """Path inside the tree -> text, of every Python file below octavo/."""
    return {path.relative_to(tree).as_posix(): path.read_text() for path in sorted((tree / "octavo").rglob("*.py"))}


def lines_without_kernels(files: dict[str, str]) -> int:
    return sum(text.count("\n") for path, text in files.items() if not path.startswith(KERNELS))


def short_files(files: dict[str, str]) -> list[str]:
    return [path for path, text in files.items() if not path.endswith("__init__.py") and text.count("\n") <= SHORT]


def layer_files(files: dict[str, str]) -> list[str]:
    """Files whose code lists the matrices of a dense layer. Words in comments and docstrings do not count."""
    return [path for path, text in files.items() if not path.startswith(KERNELS) and LAYER_WORDS.search(code_alone(text))]


def code_alone(text: str) -> str:
    """Returns a file's code without comments and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None
    return ast.unparse(tree)


# -- imports


def module_name(path: str) -> str:
    """octavo/policy/request.py -> octavo.policy.request, octavo/policy/__init__.py -> octavo.policy"""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def import_graph(files: dict[str, str], with_types: bool) -> Graph:
    """Imports of modules by modules, anywhere in a file. `with_types`: also those under `if TYPE_CHECKING`."""
    names = {module_name(path) for path in files}
    graph: Graph = {}
    for path, text in files.items():
        module = module_name(path)
        package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
        imported = (_in_tree(full, names) for full in _imports(parsed(text), package, with_types))
        graph[module] = {name for name in imported if name is not None} - {module}
    return graph


def _imports(tree: ast.Module, package: str, with_types: bool) -> Iterator[str]:
    """The full dotted name of everything that is imported."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            origin = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif with_types or not (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")):
            waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, STATEMENTS)]


def _in_tree(full: str, names: set[str]) -> str | None:
    """The module that is imported: the name itself, or the module that defines it; None for other packages."""
    return next((name for name in (full, full.rpartition(".")[0]) if name in names), None)


def with_one_importer(graph: Graph) -> list[str]:
    importers = [name for imported in graph.values() for name in imported]
    return sorted(name for name in graph if importers.count(name) == 1)


def cycles(graph: Graph) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""
    reach = {name: _reachable(graph, name) for name in graph}
    groups = {tuple(sorted(other for other in reach[name] if name in reach[other])) for name in graph if name in reach[name]}
    return [list(group) for group in sorted(groups)]


def _reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph[name]
    return found


# -- one request


def request_files(tree: Path) -> list[str]:
    """Files that run from the POST of a request to the end of its answer, in all threads and processes of the server.

    A first request loads what is loaded once. A function that runs without any request, such as a timer, does not count.
    """
    with tempfile.TemporaryDirectory() as folder:
        calls, switch = Path(folder, "calls"), Path(folder, "switch")
        Path(folder, "sitecustomize.py").write_text(HOOK)
        switch.write_bytes(bytes([OFF]))
        settings = {"PYTHONPATH": f"{folder}:{tree}", "HOUSE_CALLS": str(calls), "HOUSE_SWITCH": str(switch)}
        with Server(tree, os.environ | settings) as url, open(switch, "r+b") as file, mmap.mmap(file.fileno(), 1) as window:
            complete(url, "One, two, three,")
            time.sleep(END_SECONDS)
            window[0] = IDLE
            time.sleep(IDLE_SECONDS)
            window[0] = BUSY
            complete(url, "The capital of France is")
            time.sleep(END_SECONDS)
            window[0] = OFF
        called = [line.split("\t", 1) for line in calls.read_text().splitlines()]
    functions = {call for window, call in called if int(window) == BUSY} - {call for window, call in called if int(window) == IDLE}
    paths = {Path(call.partition("\t")[0]) for call in functions}
    return sorted(path.relative_to(tree).as_posix() for path in paths if path.is_relative_to(tree / "octavo"))


class Server:
    """`octavo serve` of a tree, as a context that gives its address."""

    def __init__(self, tree: Path, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "octavo", "serve", "--port", "0"]
        self._process = subprocess.Popen(command, cwd=tree, env=environment, stderr=subprocess.PIPE, text=True)

    def __enter__(self) -> str:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if ready := READY.search(line):
                return ready[1]
        raise SystemExit("the server did not start")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()


def complete(url: str, prompt: str) -> None:
    """Reads the whole stream of a short completion."""
    body = {"prompt": prompt, "max_tokens": 8, "stream": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        assert b"[DONE]" in answer.read()


# -- the table


@dataclass(frozen=True, slots=True)
class Figure:
    title: str  # begins its row in docs/house.md
    number: int
    names: list[str]


def figures(tree: Path) -> list[Figure]:
    files = sources(tree)
    lists = {
        f"Files of at most {SHORT} lines": short_files(files),
        "Modules with one importer": with_one_importer(import_graph(files, with_types=True)),
        "Files that a request runs through": request_files(tree),
        "Files that describe a dense layer": layer_files(files),
        **{title: [" <-> ".join(cycle) for cycle in cycles(import_graph(files, types))] for title, types in CYCLES.items()},
    }
    return [
        Figure("Lines without kernels", lines_without_kernels(files), []),
        *(Figure(title, len(names), names) for title, names in lists.items()),
    ]


def written(page: str, found: list[Figure]) -> str:
    """The page with these numbers in the last column."""
    for figure in found:
        row = re.compile(rf"^(\| {re.escape(figure.title)} \|.*\| )[^|]*( \|)$", re.MULTILINE)
        page, count = row.subn(rf"\g<1>{figure.number:,}\g<2>", page)
        assert count == 1, f"no row {figure.title!r}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="FOLDER")
    parser.add_argument("--names", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    found = figures(options.tree.resolve())
    for figure in found:
        print(f"{figure.number:7,}  {figure.title}")
        if options.names:
            print("".join(f"{'':9}  {name}\n" for name in figure.names), end="")
    if options.write:
        PAGE.write_text(written(PAGE.read_text(), found))


if __name__ == "__main__":
    main()
