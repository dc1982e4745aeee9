"""Mutants of a sound model, as folder and as GGUF file: each opens or ends in an error of ours. No crash, hang or gigabyte."""

import json
import subprocess
import sys

import pytest

from tests.cli.processes import ROOT, environment

SEED = 20260
MUTANTS = 100
BATCH = 250  # by hand, this many at a time
BATCHES = 200


def run_batch(first: int, last: int) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.support.fuzz", str(SEED), str(first), str(last)]
    done = subprocess.run(command, cwd=ROOT, env=environment({"RUST_BACKTRACE": "0"}), capture_output=True, text=True)
    *_, line = done.stdout.splitlines() or [str(first)]
    if done.returncode != 0:
        replay = f"python -m tests.support.fuzz {SEED} {line} {int(line) + 1}"
        pytest.fail(f"mutant {line} ended the process with code {done.returncode}; replay with `{replay}`\n{done.stderr[-2000:]}")
    result = json.loads(line)
    assert not result["failures"], "\n".join(result["failures"])
    print(f"{last - first} mutants in {result['seconds']:.1f} s: {result['outcomes']}")
    return dict(result["outcomes"])


# promise: damaged-hostile-model
def test_mutants_open_or_end_in_an_error_of_ours() -> None:
    outcomes = run_batch(0, MUTANTS)
    assert sum(outcomes.values()) == MUTANTS
    assert min(outcomes["opened"], outcomes["LoadError"]) > MUTANTS // 20  # the damage is neither always nor never fatal


@pytest.mark.soak
@pytest.mark.parametrize("batch", range(1, 1 + BATCHES))
def test_many_more_mutants_open_or_end_in_an_error_of_ours(batch: int) -> None:
    assert sum(run_batch(batch * BATCH, (batch + 1) * BATCH).values()) == BATCH
