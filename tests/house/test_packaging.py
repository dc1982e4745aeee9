"""All of it comes from `pip install`: what is imported is declared, nothing wants CUDA's toolkit to be built, and CI tries it."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from docs.house import parsed

ROOT = Path(__file__).resolve().parents[2]
BROUGHT = {"triton"}  # by torch, where it has CUDA
OPTIONAL = {"flashinfer": ["flashinfer-python"]}  # need not be installed where this runs


def declared() -> set[str]:
    """Distributions that an installation or one of its extras has; those of developers do not count."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for extra, some in project["optional-dependencies"].items() if extra != "dev" for each in some]
    wanted = [*project["dependencies"], *extras]
    assert not any("@" in each or "://" in each for each in wanted), "not from an index"
    return {name(each) for each in wanted}


def name(requirement: str) -> str:
    return re.split(r"[<>=!~;\[ (]", requirement)[0].lower().replace("_", "-")


def installed_with(distributions: set[str]) -> set[str]:
    """And what those bring themselves."""
    brought = [each for one in distributions - {home for homes in OPTIONAL.values() for home in homes} for each in requires(one) or []]
    return distributions | {name(each) for each in brought if "extra ==" not in each} | BROUGHT


def imported() -> set[str]:
    """The first names of all modules that are imported, also inside functions."""
    nodes = [node for file in (ROOT / "octavo").rglob("*.py") for node in ast.walk(parsed(file.read_text()))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"octavo"}


# promise: all-pip-install
def test_whatever_is_imported_is_installed_with_it() -> None:
    homes, there = OPTIONAL | packages_distributions(), installed_with(declared())
    assert {module for module in imported() if not set(map(name, homes[module])) & there} == set()


# promise: all-pip-install
def test_nothing_is_built_with_cuda() -> None:
    assert not [*(ROOT / "octavo").rglob("*.cu"), *(ROOT / "octavo").rglob("*.cuh")]
    assert "CUDA" not in (ROOT / "CMakeLists.txt").read_text()


def test_ci_runs_every_check_in_turn() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert [line for line in lines if line.startswith("make ")] == ["make test", "make sanitize", "make cross", "make package"]
