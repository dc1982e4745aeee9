"""Seeded bugs: each `NN-name.patch` beside this file plants one mistake in a copy of `octavo/`.

    A prefix hit may cover the whole prompt: ...          what is wrong
    Caught-by: tests/policy/test_x.py::test_y             the test of the suite that must fail on it
    Shown-by: examples/fake_kv.py --nan 4                 if there: the command that shows it, for docs/exercises.md
    --- a/octavo/...                                      the mistake, as a diff

The copy stands in a folder that has the real tests beside it, so a named test runs there as it is. It runs in a process that
`Nursery` forks from one which has imported pytest and torch, and nothing of Octavo: to import them for every bug takes most of the time.

A mistake in a source of the native library is compiled alone, without optimisation, and linked with what was built of the others.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120
OBJECTS = ROOT / "build/native/CMakeFiles/octavo.dir/octavo/native"


@dataclass(frozen=True)
class SeededBug:
    path: Path
    caught_by: str
    shown_by: list[str]  # a Python file and its arguments, or nothing

    @property
    def name(self) -> str:
        return self.path.stem

    @staticmethod
    def read(path: Path) -> "SeededBug":
        head = dict(re.findall(r"^([A-Z]\w+-by): ?(.*)$", path.read_text().partition("\n--- ")[0], re.MULTILINE))
        return SeededBug(path, head["Caught-by"], head.get("Shown-by", "").split())


BUGS = [SeededBug.read(path) for path in sorted(Path(__file__).parent.glob("*.patch"))]


def plant(bug: SeededBug, tree: Path) -> Path:
    """`tree` becomes a checkout with that bug: what it changes is copied, all else are links."""
    changed = re.findall(r"^--- a/(\S+)", bug.path.read_text(), re.MULTILINE)
    tree.mkdir()
    _link(Path(), {Path(name) for name in changed}, tree)
    # without the ceiling, git would look for a repository above the folder and apply nothing outside of it
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    applied = subprocess.run(["git", "apply", str(bug.path)], cwd=tree, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert applied.returncode == 0, f"{bug.name} no longer fits the code, make it anew: {applied.stderr}"
    if sources := [name for name in changed if name.endswith(".cpp")]:
        _link_library(sources, tree)
    return tree


def _link_library(sources: list[str], tree: Path) -> None:
    """The library becomes one with these sources of `tree`."""
    objects = {path.name.removesuffix(".o"): str(path) for path in OBJECTS.glob("*.cpp.o")}
    assert objects, f"the native library was not built in {OBJECTS}"
    changed = {Path(source).name: str(tree / Path(source).name) + ".o" for source in sources}
    for source in sources:
        _compile(["-c", source, "-o", changed[Path(source).name]], tree)
    library = tree / "octavo/native/liboctavo.so"
    library.unlink()
    # in ascending order of the levels: the linker keeps the first copy of an inline function
    ordered = sorted(objects, key=lambda name: (name.startswith("level_"), name != "level_portable.cpp", len(name), name))
    _compile(["-shared", "-o", str(library), *(changed.get(name, objects[name]) for name in ordered)], tree)


def _compile(arguments: list[str], tree: Path) -> None:
    command = ["c++", "-std=c++20", "-fPIC", "-fvisibility=hidden", *arguments]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr


def _link(folder: Path, changed: set[Path], tree: Path) -> None:
    parents = {parent for path in changed for parent in path.parents}
    for name in sorted(os.listdir(ROOT / folder)) if folder.parts else ("octavo", "tests", "examples", "pyproject.toml"):
        path = folder / name
        if path in changed:
            shutil.copy(ROOT / path, tree / path)
        elif path in parents:
            (tree / path).mkdir()
            _link(path, changed, tree)
        else:
            (tree / path).symlink_to(ROOT / path)


class Nursery:
    """A process that is forked for every run, so that what is imported is imported once."""

    def __init__(self) -> None:
        env = {**os.environ, "CI": "true", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        env.pop("PYTEST_ADDOPTS", None)
        command = [sys.executable, "-P", str(Path(__file__).with_name("nursery.py")), str(SECONDS)]
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def close(self) -> None:
        self._process.communicate()

    def failures(self, test: str, tree: Path) -> list[str]:
        """Messages of the named test's failures in `tree`; [] if it passes. Anything else that goes wrong raises."""
        report = tree / "report.xml"
        options = ["-q", "--maxfail=1", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}"]
        done = self._run(["-m", "pytest", *options, test], tree)
        suite = ElementTree.parse(report).getroot().find("testsuite")
        assert done.returncode in (0, 1) and suite is not None and suite.get("errors") == "0", done.stdout + done.stderr
        return [failure.get("message", "") for failure in suite.iter("failure")]

    def show(self, command: list[str], tree: Path) -> "subprocess.CompletedProcess[str]":
        return self._run(command, tree)

    def _run(self, command: list[str], tree: Path) -> "subprocess.CompletedProcess[str]":
        """As `python COMMAND` in that folder."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            print(json.dumps([command, str(tree), str(out), str(err)]), file=self._process.stdin, flush=True)
            code = int(self._process.stdout.readline())
            return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())
