"""Measures how much of a decode step is Python and not the native call: `python bench/host_share.py [--rows 1,32] [--rounds 5]`.

The default model, greedy, 64 tokens in and 150 out; the share is the time outside the native calls over all of it.
"""

import argparse
import time
from typing import Any

from octavo import LLM, SamplingParams

PROMPT, OUTPUT = 64, 150


class Watched:
    """The functions of the native library, with the step timed."""

    def __init__(self, calls: Any) -> None:
        self._calls, self.seconds = calls, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._calls, name)

    def octavo_step(self, *given: Any) -> None:
        start = time.perf_counter()
        self._calls.octavo_step(*given)
        self.seconds += time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    with LLM(max_model_len=1024) as llm:
        library: Any = llm._core.executor.program.library  # type: ignore[attr-defined]
        watched = library.call = Watched(library.call)
        for rows in map(int, args.rows.split(",")):
            prompts = [list(range(100 + row, 100 + row + PROMPT)) for row in range(rows)]
            for _ in range(args.rounds):
                llm.reset_prefix_cache()
                watched.seconds, start = 0.0, time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                total = time.perf_counter() - start
                host = total - watched.seconds
                print(f"{rows} rows: {1000 * total / OUTPUT:.2f} ms a step, host {1000 * host / OUTPUT:.2f} ms, {100 * host / total:.1f} %")


if __name__ == "__main__":
    main()
