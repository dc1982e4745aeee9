"""Every hostile and broken model file is refused at the door: one line that names file and reason, quickly, in little memory.

All cases of tests/support/hostile_files.py go through `octavo generate` in one process; the first of each group also in a
process of its own, as a user would meet it.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.cli.processes import ROOT, environment
from tests.support.doors import MAX_SECONDS, Outcome
from tests.support.forked import forked
from tests.support.hostile_case import Case
from tests.support.hostile_files import GROUPS, all_cases
from tests.support.tiny_files import folder_files, gguf_file, gguf_keys, sentencepiece_keys, sharded_files, write_files
from tests.support.tiny_quantized import fp8_files, gptq_files, quantized_files, words_files

FOLDERS = [folder_files, sharded_files, quantized_files, gptq_files, fp8_files, words_files]
CASES = {case.id: case for case in all_cases()}
FIRST = {case.group: case for case in reversed(CASES.values())}
NO_SUCH_MODEL = 130  # its first case: an empty start
MAX_MB = 100
MAX_LINE = 2500  # eight names of weights, and a path


class Doors:
    """One process that tries model after model; where one of them ends it, the next starts another."""

    def __init__(self, sound: Path) -> None:
        self._sound = sound
        self._process: subprocess.Popen[str] | None = None

    def try_model(self, model: Path, case: Case) -> Outcome:
        if self._process is None:
            command = [sys.executable, "-m", "tests.support.doors", str(self._sound)]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment({}))
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps([str(model), case.flags, case.group != 130]), file=process.stdin, flush=True)
        if answer := process.stdout.readline():
            return Outcome(**json.loads(answer))
        self._process = None
        return Outcome(process.wait(), "(the process ended)", 0.0, 0.0)

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


@pytest.fixture(scope="module")
def out() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # whoever is not root must get as far as what is forbidden
        yield Path(folder)


@pytest.fixture(scope="module")
def doors(out: Path) -> Iterator[Doors]:
    doors = Doors(write_files(out / "sound", folder_files()))
    yield doors
    doors.close()


def new_folder(out: Path) -> Path:
    """One for each try: a case that is tried again finds nothing there."""
    folder = Path(tempfile.mkdtemp(dir=out))
    folder.chmod(0o755)
    return folder


def assert_refused(outcome: Outcome, case: Case) -> None:
    assert outcome.code == 1, (outcome.code, outcome.stderr)
    assert outcome.stderr.startswith("octavo: error: ") and outcome.stderr.count("\n") == 1
    assert len(outcome.stderr) < MAX_LINE and outcome.stderr.rstrip("\n").isprintable()
    for word in case.words:
        assert word in outcome.stderr
    assert outcome.seconds < MAX_SECONDS and outcome.peak_mb < MAX_MB


# promise: damaged-hostile-model
@pytest.mark.parametrize("name", CASES)
def test_hostile_file_is_refused_in_one_line(out: Path, doors: Doors, name: str) -> None:
    case = CASES[name]
    model = case.write(new_folder(out))
    assert_refused(doors.try_model(model, case), case)
    assert not list(model.parent.rglob("*.ran"))  # what custom code would leave behind


@pytest.mark.parametrize("make", [*FOLDERS, gguf_keys, sentencepiece_keys])
def test_the_files_the_cases_are_made_of_are_sound(out: Path, doors: Doors, make: Callable[[], dict[str, bytes]]) -> None:
    """Otherwise each of them could be refused for a reason of its own."""
    model = out / f"{make.__name__}.gguf"
    if make in FOLDERS:
        write_files(model, make())
    else:
        model.write_bytes(gguf_file(make()))
    few_blocks = ("--kv-cache-memory-bytes", "65536")  # for speed alone
    outcome = doors.try_model(model, Case(0, "", lambda path: path, (), few_blocks))
    assert outcome.code == 0 and outcome.stderr == ""


@dataclass(frozen=True)
class Ended:
    code: int
    stderr: str
    peak_mb: float


@pytest.fixture(scope="module")
def alone(out: Path) -> Callable[[int], Ended]:
    """The first case of a group in a process of its own, run once."""

    @cache
    def run(group: int) -> Ended:
        case = FIRST[group]
        command = [sys.executable, "-m", "octavo", "generate", "--model", str(case.write(new_folder(out))), "x", *case.flags]
        with tempfile.TemporaryFile() as stderr:
            process = forked(command, stdout=subprocess.DEVNULL, stderr=stderr, cwd=ROOT, env=environment({}))
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            stderr.seek(0)
            return Ended(process.returncode, stderr.read().decode(), usage.ru_maxrss / 1024)

    return run


# promise: damaged-hostile-model
@pytest.mark.parametrize("group", GROUPS)
def test_a_process_of_its_own_ends_with_code_1_and_one_line(alone: Callable[[int], Ended], group: int) -> None:
    ended = alone(group)
    assert ended.code == 1 and ended.stderr.count("\n") == 1 and all(word in ended.stderr for word in FIRST[group].words)
    assert ended.peak_mb - alone(NO_SUCH_MODEL).peak_mb < MAX_MB
