"""Seeded bugs: each `NN-name.patch` beside this file plants one mistake in a copy of `octavo/`.

    A prefix hit may cover the whole prompt: ...          what is wrong
    Caught-by: tests/policy/test_x.py::test_y             the test of the suite that must fail on it
    Shown-by: examples/fake_kv.py --nan 4                 if there: the command that shows it, for docs/exercises.md
    --- a/octavo/...                                      the mistake, as a diff

The copy stands in a folder that has the real tests beside it, so a named test runs there as it is.
"""

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120


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
    """`tree` becomes a checkout with that bug."""
    shutil.copytree(ROOT / "octavo", tree / "octavo")  # with what Python compiled of it, which holds for files that stay as they are
    for name in ("tests", "examples", "pyproject.toml"):
        (tree / name).symlink_to(ROOT / name)
    # without the ceiling, git would look for a repository above the folder and apply nothing outside of it
    applied = _run(["git", "apply", str(bug.path)], tree, GIT_CEILING_DIRECTORIES=str(tree.parent))
    assert applied.returncode == 0, f"{bug.name} no longer fits the code, make it anew: {applied.stderr}"
    return tree


def failures(test: str, tree: Path) -> list[str]:
    """Messages of the named test's failures in `tree`; [] if it passes. Anything else that goes wrong raises."""
    report = tree / "report.xml"
    options = ["-q", "--maxfail=1", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}"]
    done = _run([sys.executable, "-m", "pytest", *options, test], tree, CI="true", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert done.returncode in (0, 1) and suite is not None and suite.get("errors") == "0", done.stdout + done.stderr
    return [failure.get("message", "") for failure in suite.iter("failure")]


def show(command: list[str], tree: Path) -> "subprocess.CompletedProcess[str]":
    return _run([sys.executable, *command], tree)


def _run(command: list[str], tree: Path, **more: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", **more}
    env.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=SECONDS)
