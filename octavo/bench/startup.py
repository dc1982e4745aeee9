"""Measures the start from outside. Each round starts a process of this module, which says on stdout how far it has come:

    import            octavo and torch are loaded
    ready             an LLM is open
    first_token       it has generated a token
    peak_memory N     the most bytes it held

Times count from the start of the process. The phases in between are those log lines of the engine that end in "took S seconds".
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict

from octavo.bench.figures import Figure, Result
from octavo.config import EngineConfig
from octavo.errors import EngineError
from octavo.sampling_params import SamplingParams

MILESTONES = ("import", "ready", "first_token")
PHASE = re.compile(r"INFO (?P<name>[\w -]+) took (?:[\d.]+ GiB and )?(?P<seconds>[\d.]+) seconds")
MIB = 2**20


def measure_startup(config: EngineConfig, name: str, rounds: int) -> Result:
    """Starts a process in each round, and returns the figures of all rounds."""
    samples: dict[str, list[float]] = defaultdict(list)
    for number in range(1, rounds + 1):
        seconds = _start(config)
        print(f"round {number} of {rounds}: {seconds['first_token']:.2f} s to the first token", file=sys.stderr, flush=True)
        for key, value in seconds.items():
            samples[key].append(value)
    figures = {key: Figure("MiB" if key == "peak_memory" else "s", values) for key, values in samples.items()}
    return Result(name, {"rounds": rounds}, figures)


def _start(config: EngineConfig) -> dict[str, float]:
    """Starts one process. Returns the seconds to each milestone and of each phase, and its peak memory in MiB."""
    command = [sys.executable, "-m", "octavo.bench.startup", json.dumps(asdict(config))]
    found: dict[str, float] = {}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                milestone, _, value = line.strip().partition(" ")
                found[milestone] = int(value) / MIB if value else time.perf_counter() - start
        log.seek(0)
        lines = log.read().splitlines()
    missing = [name for name in MILESTONES if name not in found]
    if missing or process.returncode:
        last = lines[-1] if lines else f"exit code {process.returncode}"
        raise EngineError(f"the process that was started did not reach {missing[0] if missing else 'its end'}: {last}")
    phases = (PHASE.search(line) for line in lines)
    return found | {phase["name"].lower().replace(" ", "_"): float(phase["seconds"]) for phase in phases if phase}


# -- the process that is started


def main(settings: str) -> None:
    """Opens an LLM and generates a token. `settings`: the fields of an EngineConfig, as JSON."""
    config = EngineConfig(**json.loads(settings))
    import octavo.engine.build  # noqa: F401  # loads torch, which otherwise is loaded with the model
    from octavo.bench.machine import peak_memory
    from octavo.llm import LLM

    print("import", flush=True)
    with LLM.from_config(config) as llm:
        print("ready", flush=True)
        next(iter(llm.stream([0] if config.skip_tokenizer_init else "Hello", SamplingParams(temperature=0, max_tokens=1))))
        print("first_token", flush=True)
        print("peak_memory", peak_memory(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
