"""The far end of `process.py`, run by an environment's own Python: JSON lines in, JSON lines out. Standard library only.

    first argument   settings, as JSON
    stdin            a line for each call: [[prompt ids, tokens wanted], ...], all of which arrive at once
    stdout           a line for each call: seconds it took, ids of every answer, and, where known, seconds until each of their tokens
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

Requests = list[tuple[list[int], int]]
Answers = list[list[int]]


class Engine(Protocol):
    times: list[list[float]]  # of the last call: when each token of each answer came, by time.perf_counter; empty where it is not known

    def prepare(self, requests: Requests) -> None:
        """Not timed: forget what earlier calls left, make room for this one."""

    def generate(self, requests: Requests) -> Answers:
        """Greedy, past ending ids."""


def serve(start: Callable[[dict[str, Any]], Engine]) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes the way of their errors
    engine = start(json.loads(sys.argv[1]))
    for line in sys.stdin:
        requests = [(ids, count) for ids, count in json.loads(line)]
        engine.prepare(requests)
        begin = time.perf_counter()
        answers = engine.generate(requests)
        seconds = time.perf_counter() - begin
        times = [[moment - begin for moment in each] for each in engine.times]
        print(json.dumps({"seconds": seconds, "answers": answers, "times": times}), file=replies, flush=True)
