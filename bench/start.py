"""Seconds from starting a process to the first token of the default model, median and best of several fresh processes.

    python bench/start.py [--rounds 5]
"""

import argparse
import statistics
import subprocess
import sys
import time

PROGRAM = """
from octavo import LLM, SamplingParams
with LLM() as llm:
    next(iter(llm.stream_chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0, max_tokens=1))))
    print("first token", flush=True)
"""


def once() -> float:
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "first token"
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    seconds = [once() for _ in range(args.rounds)]
    print(f"start to first token: median {statistics.median(seconds):.2f} s, best {min(seconds):.2f} s of {args.rounds}")


if __name__ == "__main__":
    main()
