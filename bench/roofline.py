"""Measures the most that this machine can do: `python bench/roofline.py`.

It reads memory with as many threads as the engine uses, and multiplies numbers that stay in registers. roofline.cpp does this; it
is compiled for this CPU first. Other scripts call `measure` to print the share of it that an engine reached in the same run.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from octavo.bench.figures import Figure, number
from octavo.worker.machine import cpu_model, num_threads

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=c++20", "-O3", "-march=native", "-pthread")
LABELS = {
    "read_96_mb": "read, buffer of 96 MB",
    "read_1_gib": "read, buffer of 1 GiB",
    "amx_bf16": "AMX bfloat16, registers",
    "amx_int8": "AMX int8, registers",
    "avx512_bf16": "AVX-512 bfloat16, registers",
    "avx512_vnni": "AVX-512 int8 (VNNI), registers",
}
UNITS = {"read": "GB/s", "amx": "TOP/s", "avx512": "TOP/s"}


class NoRoofline(Exception):
    """The roofline cannot be measured here. The message says why."""


def measure(threads: int, rounds: int = 5) -> dict[str, Figure]:
    """Returns the figures of LABELS by name, without those that the CPU or the kernel does not support."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise NoRoofline("no roofline: there is no C++ compiler (g++) to build bench/roofline.cpp with")
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder, "roofline"))
        _run(compiler, *FLAGS, str(SOURCE), "-o", program)
        return parse(_run(program, str(threads), str(rounds)))


def parse(lines: str) -> dict[str, Figure]:
    """Reads lines `name value`, one for each sample, and `name absent` for what is not supported."""
    samples: dict[str, list[float]] = defaultdict(list)
    for name, value in (line.split() for line in lines.splitlines()):
        if value != "absent":
            samples[name].append(float(value))
    return {name: Figure(UNITS[name.split("_")[0]], values) for name, values in samples.items()}


def report(figures: dict[str, Figure]) -> str:
    lines = []
    for name, label in LABELS.items():
        figure = figures.get(name)
        if figure is None:
            lines.append(f"{label:32} not on this machine")
        else:
            median, low, high = (number(figure.statistic(one)) for one in ("median", "min", "max"))
            lines.append(f"{label:32} {median:>6} {figure.unit:5}  ({low} to {high})")
    return "\n".join(lines)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = next(iter(done.stderr.splitlines()), f"exit code {done.returncode}")
        raise NoRoofline(f"no roofline: {Path(command[0]).name} failed: {said}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description="memory bandwidth and register-only products of this machine")
    parser.add_argument("--threads", type=int, default=num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    try:
        figures = measure(args.threads, args.rounds)
    except NoRoofline as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{cpu_model()}, {args.threads} threads; medians of {args.rounds} (least to most)")
    print(report(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
