"""Memory of a server's two processes while requests pass: `python -m tests.support.http_memory MODEL_FOLDER REQUESTS`."""

import asyncio
import statistics
import sys
from dataclasses import dataclass

import pytest

from tests.support.http_storm import FLAGS, WATCHED, Case, anonymous_bytes, cases, storm, tool_cases
from tests.support.server_process import ServerProcess

PORTION = 2_048  # requests between two looks


@dataclass(frozen=True)
class Slope:
    bytes_per_request: float
    first: int  # bytes held, after warming up
    last: int

    def __str__(self) -> str:
        return f"{self.bytes_per_request:+.2f} bytes a request, {self.first / 2**20:.2f} MiB first and {self.last / 2**20:.2f} MiB last"


def memory_slopes(server: ServerProcess, questions: list[Case], warm_up: int, requests: int) -> dict[str, Slope]:
    """Of the API process and the engine, by a line through what they hold."""
    pids = {"API process": server.process.pid, "engine": server.ask("GET", "/watch").json["engine_pid"]}
    served, used = list[int](), {name: list[int]() for name in pids}
    for number in range((warm_up + requests) // PORTION):
        asyncio.run(storm(server, questions, PORTION, seed=number))
        server.ask("GET", "/watch")  # forgets the lags it kept
        if number * PORTION >= warm_up:
            served.append(number * PORTION)
            for name, pid in pids.items():
                used[name].append(anonymous_bytes(pid))
    return {name: Slope(statistics.linear_regression(served, seen).slope, seen[0], seen[-1]) for name, seen in used.items()}


def watched(folder: str) -> ServerProcess:
    return ServerProcess(WATCHED, folder, *FLAGS, env={"OCTAVO_DEBUG": "runner=fake", "OCTAVO_LOG_LEVEL": "ERROR"}, forks=False)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        asked = cases(sys.argv[1], 100, patch)
    with watched(sys.argv[1]) as started:
        asked += tool_cases(started, 8)
        for process, slope in memory_slopes(started, asked, int(sys.argv[2]) // 4, int(sys.argv[2])).items():
            print(f"{process}: {slope}")
