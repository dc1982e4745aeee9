"""In CI only a test marked `gpu` may skip: the real conftest is run over a small suite of every kind of skip. And such tests are found
on a machine that has a GPU and few libraries."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CONFTEST = TESTS / "conftest.py"
BARE = """
import sys
for name in ("msgspec", "zmq", "fastapi", "uvicorn", "pydantic", "prometheus_client", "llguidance", "gguf", "rich", "ray"):
    sys.modules[name] = None
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""

ALLOWED = """
import pytest

def test_passes(): pass

@pytest.mark.gpu
@pytest.mark.skip(reason="no GPU")
def test_gpu(): pass

@pytest.mark.xfail
def test_known_bug(): assert False
"""

FORBIDDEN = """
import pytest

@pytest.mark.skip(reason="later")
def test_by_mark(): pass

@pytest.mark.skipif(True, reason="later")
def test_by_condition(): pass

def test_in_the_body(): pytest.importorskip("no_such_module")
"""

WHOLE_MODULE = "import pytest\npytest.skip('later', allow_module_level=True)\n"


def run_suite(folder: Path, ci: str, files: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: needs a GPU\n    timed: judges a duration\n")
    for name, source in files.items():
        (folder / name).write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--continue-on-collection-errors", *options, str(folder)]
    env = {**os.environ, "CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # most of the time would go to plugins that it does not use
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


# promise: linux-aarch64-suite
def test_every_kind_of_skip_fails_in_ci_but_that_of_a_gpu_test(tmp_path: Path) -> None:
    run = run_suite(tmp_path, "true", {"test_a.py": ALLOWED, "test_b.py": FORBIDDEN, "test_c.py": WHOLE_MODULE})
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 3 errors" in run.stdout
    assert "only tests marked gpu may be: Skipped: later" in run.stdout
    assert run.returncode == 1


# promise: linux-aarch64-suite
def test_a_skip_in_a_worker_process_fails_in_ci(tmp_path: Path) -> None:
    run = run_suite(tmp_path, "true", {"test_b.py": FORBIDDEN}, "-p", "xdist", "-n", "1")
    assert "1 failed, 2 errors" in run.stdout
    assert run.returncode == 1


def test_a_skip_is_no_failure_outside_ci(tmp_path: Path) -> None:
    run = run_suite(tmp_path, "", {"test_a.py": ALLOWED, "test_b.py": FORBIDDEN, "test_c.py": WHOLE_MODULE})
    assert "1 passed, 5 skipped, 1 xfailed" in run.stdout
    assert run.returncode == 0


@pytest.mark.soak
def test_tests_of_a_gpu_are_found_without_the_libraries_of_a_server() -> None:
    files = ("gpu", "equivalence", "engine/test_gpu_ready.py")
    options = ("--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", *(str(TESTS / one) for one in files))
    env = {**os.environ, "CI": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # whole files are skipped there for want of these libraries
    found = subprocess.run([sys.executable, "-c", BARE, *options], cwd=TESTS.parent, env=env, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout
    assert "tests/engine/test_gpu_ready.py::" in found.stdout and "tests/gpu/test_transformers.py::" in found.stdout
