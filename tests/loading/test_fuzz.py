"""Mutants of a sound model, as folder and as GGUF file: each opens or ends in an error of ours. No crash, hang or gigabyte."""

import json
import subprocess
import sys

import pytest

from tests.cli.processes import ROOT, environment

SEED = 20260
MUTANTS, BATCHES = 10_000, 2
SOAK = 10  # times as many


def run_batch(first: int, last: int) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.support.fuzz", str(SEED), str(first), str(last)]
    done = subprocess.run(command, cwd=ROOT, env=environment({"RUST_BACKTRACE": "0"}), capture_output=True, text=True)
    *_, at = done.stdout.splitlines() or [""]
    replay = f"mutant {at[:20]} ended the process (code {done.returncode}); replay with `{' '.join(command[1:4])} {at[:20]} LAST`"
    assert done.returncode == 0, f"{replay}\n{done.stderr[-2000:]}"
    result = json.loads(at)
    assert not result["failures"], "\n".join(result["failures"])
    print(f"{last - first} mutants in {result['seconds']:.1f} s: {result['outcomes']}")
    return dict(result["outcomes"])


@pytest.mark.parametrize("batch", range(BATCHES))
def test_mutants_open_or_end_in_an_error_of_ours(batch: int) -> None:
    size = MUTANTS // BATCHES
    outcomes = run_batch(batch * size, (batch + 1) * size)
    assert sum(outcomes.values()) == size
    assert min(outcomes["opened"], outcomes["LoadError"]) > size // 20  # the damage is neither always nor never fatal


@pytest.mark.soak
@pytest.mark.parametrize("batch", range(BATCHES * SOAK))
def test_many_more_mutants_open_or_end_in_an_error_of_ours(batch: int) -> None:
    size = MUTANTS // BATCHES
    assert sum(run_batch(MUTANTS + batch * size, MUTANTS + (batch + 1) * size).values()) == size
