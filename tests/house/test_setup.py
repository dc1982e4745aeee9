"""`make serve` and `make check` for real, in a folder of their own: a Python that is none writes down what pip is asked to install."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = f"""#!{sys.executable} -S
import os, shutil, sys
words = sys.argv[1:]
with open("calls", "a") as calls:
    print(os.path.basename(sys.argv[0]), *words, file=calls)
if words[:2] == ["-m", "venv"]:
    os.makedirs(words[2] + "/bin")
    for name in ("python", "pip", "cmake", "octavo", "ruff"):
        shutil.copy(sys.argv[0], words[2] + "/bin/" + name)
if "-e" in words:
    os.makedirs("build/native", exist_ok=True)
    for made in ("build/native/CMakeCache.txt", "octavo/native/liboctavo.so"):
        open(made, "w").close()
print("a line of", *words)
sys.exit("no space left on device" if os.environ.get("FAIL", "nothing") in words else 0)
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("Makefile", "CMakeLists.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    (tmp_path / "octavo/native").mkdir(parents=True)
    (tmp_path / "python-none").write_text(STAND_IN)
    (tmp_path / "python-none").chmod(0o755)
    return tmp_path


def make(clone: Path, target: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """How it ended, and what it had pip install."""
    (clone / "calls").unlink(missing_ok=True)
    command = ["make", "--no-print-directory", target, f"PYTHON={clone / 'python-none'}"]
    ended = subprocess.run(command, cwd=clone, env=os.environ | variables, capture_output=True, text=True, timeout=60)
    calls = (clone / "calls").read_text().splitlines()
    return ended, [found[1] for call in calls if (found := re.search(r" pip .*install .*?(-r .*|--no-deps .*)", call))]


# promise: serve-base-only
def test_make_serve_installs_what_octavo_runs_on_with_a_line_for_each_step_and_only_once(clone: Path) -> None:
    ended, installed = make(clone, "serve")
    assert ended.returncode == 0
    assert installed[0] == "-r requirements/base.txt -r requirements/build.txt" and len(installed) == 3
    *steps, served = ended.stdout.splitlines()
    assert [step[:5] for step in steps] == [f"[{number}/4]" for number in (1, 2, 3, 4)] and served == "a line of serve"
    again, installed = make(clone, "serve")
    assert (installed, again.stdout) == ([], "a line of serve\n")


# promise: serve-base-only
def test_checks_add_their_packages_before_or_after_a_server_was_run(clone: Path) -> None:
    _, installed = make(clone, "check")
    assert [words for words in installed if "dev.txt" in words] == installed[-1:] and len(installed) == 4
    assert make(clone, "serve")[1] == make(clone, "check")[1] == []
    shutil.rmtree(clone / ".venv")
    make(clone, "serve")
    assert make(clone, "check")[1] == ["-r requirements/dev.txt"]


# promise: serve-base-only
def test_a_step_that_fails_shows_its_log_and_is_done_again(clone: Path) -> None:
    ended, _ = make(clone, "serve", FAIL="requirements/base.txt")
    assert ended.returncode != 0 and ended.stdout.splitlines()[-1].startswith("[2/4]")
    assert "a line of -m pip" in ended.stderr and "no space left on device" in ended.stderr
    assert "no space left on device" in (clone / "build/setup.log").read_text() and "build/setup.log" in ended.stderr
    assert len(make(clone, "serve")[1]) == 3


def test_pins_stand_once_and_those_of_a_server_hold_for_checks_too() -> None:
    files = {path.stem: path.read_text() for path in (ROOT / "requirements").glob("*.txt")}
    pins = {name: re.findall(r"^([\w.-]+)==", text, re.MULTILINE) for name, text in files.items()}
    names = [pin.lower() for found in pins.values() for pin in found]
    assert len(names) == len(set(names)) and "torch" in pins["base"]
    assert {"-r base.txt", "-r build.txt"} <= set(files["dev"].splitlines())
