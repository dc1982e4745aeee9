"""The house rules, applied to the house."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from docs import house, status
from tests.house import documents, rules
from tests.house.rules import Module

ROOT = Path(__file__).resolve().parents[2]
SKIPPED_FOLDERS = {"__pycache__", "build", "dist", "out"}

# (path, module it imports upwards inside a function) -> why it must.
LAZY_IMPORTS: dict[tuple[str, str], str] = {}

# "path", "path::function" or "folder/" -> why it may be longer than the rest of the house.
LONGER: dict[str, str] = {
    "octavo/kernels/": "a kernel is one long thought; cutting it up hides the data flow",
    "octavo/models/": "a model reads best beside its own weight rules",
}


def files(suffix: str = "") -> Iterator[Path]:
    """Everything in the tree that is ours: no hidden folder but .ci, nothing built, no third-party data."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [f for f in folders if f == ".ci" or not (f.startswith(".") or f.endswith(".egg-info") or f in SKIPPED_FOLDERS)]
        yield from (Path(folder) / name for name in sorted(names) if name.endswith(suffix) and name != ".git")


def modules(*folders: str) -> list[Module]:
    paths = [p.relative_to(ROOT).as_posix() for p in files(".py")]
    found = [Module(path, (ROOT / path).read_text()) for path in paths if path.startswith(folders)]
    assert found
    return found


ENGINE = modules("octavo/")


# promise: other-environment-variables
@pytest.mark.parametrize(
    "rule",
    [
        rules.head_offences,
        rules.banned_offences,
        rules.environment_offences,
        rules.config_getattr_offences,
        rules.kwargs_offences,
        rules.word_offences,
    ],
    ids=lambda rule: rule.__name__.removesuffix("_offences"),
)
def test_engine_keeps_the_rule(rule: Callable[[Module], list[str]]) -> None:
    assert [offence for module in ENGINE for offence in rule(module)] == []


def test_imports_point_down_only() -> None:
    assert [offence for module in ENGINE for offence in rules.layer_offences(module, LAZY_IMPORTS)] == []


def test_no_modules_import_each_other() -> None:
    """Also not by imports inside functions. Those under `if TYPE_CHECKING` do not run."""
    assert house.cycles(house.import_graph(house.sources(ROOT), with_types=False)) == []


def test_the_page_of_figures_counts_the_import_cycles_of_today() -> None:
    files, page = house.sources(ROOT), (ROOT / "docs/house.md").read_text()
    counts = {title: len(house.cycles(house.import_graph(files, with_types))) for title, with_types in house.CYCLES.items()}
    assert house.written(page, [house.Figure(title, count, []) for title, count in counts.items()]) == page


def test_files_and_functions_are_short() -> None:
    assert [offence for module in ENGINE for offence in rules.size_offences(module, LONGER)] == []


def test_exceptions_are_needed() -> None:
    """An exception outlives its cause easily; folders are standing permissions."""
    too_long = {offence.rpartition(": ")[0] for module in ENGINE for offence in rules.size_offences(module, {})}
    assert [name for name in LONGER if not name.endswith("/") and name not in too_long] == []
    upward = {(m.path, full) for m in ENGINE if rules.layer_offences(m, {}) for _, full, _ in m.imports()}
    assert [key for key in LAZY_IMPORTS if not any(key[0] == path and full.startswith(key[1]) for path, full in upward)] == []


def test_inheritance_is_flat() -> None:
    assert rules.inheritance_offences(ENGINE) == []


def test_nothing_outside_the_engine_is_banned_either() -> None:
    others = modules("tests/", "examples/", "bench/")
    assert [offence for module in others for offence in rules.banned_offences(module)] == []


def test_no_path_of_a_machine_is_mentioned() -> None:
    offences = []
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("tests/data/") and path.suffix != ".md":
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        offences += documents.machine_path_offences(name, text)
    assert offences == []


def test_decisions_have_three_lines() -> None:
    text = (ROOT / "docs/decisions.md").read_text()
    assert "## 1. " in text
    assert documents.decision_offences(text) == []


def test_the_page_of_promises_lists_the_tests_that_prove_them() -> None:
    page, found = status.PAGE.read_text(), status.proofs(status.read_tests(ROOT / "tests"))
    sections = list(dict.fromkeys(promise.section for promise in status.promises(page)))
    assert sections == ["Command line", "Python", "Start-up and running", "HTTP", "Metrics", "Beyond other engines"]
    assert status.offences(page, found) == []
    assert status.written(page, found) == page, "run: python docs/status.py"


def test_every_failure_mode_names_its_tests() -> None:
    text = (ROOT / "docs/reliability.md").read_text()
    assert len(documents.FAILURE_MODE.findall(text)) == 30
    assert documents.failure_mode_offences(text, source_of) == []


def source_of(path: str) -> str | None:
    return (ROOT / path).read_text() if (ROOT / path).is_file() else None


def python(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout


def module_name(module: Module) -> str:
    return module.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@pytest.mark.parametrize("room", ["base", "policy", "sizing", "text", "grammar", "inspector", "server"])
def test_room_is_free_of_torch(room: str) -> None:
    wanted = rules.BASE if room == "base" else {room}
    names = [module_name(module) for module in ENGINE if module.room in wanted]
    names += ["octavo.engine.async_llm"] if room == "server" else []
    code = f"import importlib, json, sys\nfor name in {names}: importlib.import_module(name)\nprint(json.dumps('torch' in sys.modules))"
    assert json.loads(python(code)) is False


def least_seconds(code: str, enough: float, tries: int = 5) -> float:
    """The best of a few runs, since a busy machine only ever makes them slower; stops at the first that is good enough."""
    best = float("inf")
    for _ in range(tries):
        best = min(best, float(python(code)))
        if best < enough:
            break
    return best


# promise: octavo-import-llm
@pytest.mark.timed("the CPU time of an import")
def test_import_octavo_takes_under_0_3_s() -> None:
    code = "import time; start = time.process_time(); import octavo; print(time.process_time() - start)"
    assert least_seconds(code, 0.3) < 0.3


HELP = """
import contextlib, io, runpy, sys
sys.argv = ["octavo", "--help"]
with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
    runpy.run_module("octavo", run_name="__main__")
print("chat" in text.getvalue() and "torch" not in sys.modules)
"""

TIMED_HELP = """
import resource, subprocess, sys
subprocess.run([sys.executable, "-m", "octavo", "--help"], check=True, stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime)
"""


# promise: octavo-help-answers
def test_help_names_the_commands_without_torch() -> None:
    assert python(HELP) == "True\n"


# promise: octavo-help-answers
@pytest.mark.timed("the CPU time of a command")
def test_help_takes_under_0_5_s() -> None:
    assert least_seconds(TIMED_HELP, 0.5) < 0.5
