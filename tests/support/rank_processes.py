"""Ranks as real processes. A test starts them with the name of a job; each joins the group, does the job and prints its result.

    ranks = Ranks(2, "tests.support.rank_processes:exchanges", {"rounds": 10})
    ranks.results()                                                       one for each rank, once all have ended

With `gloo` they meet through connections instead of shared memory.
"""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import cached_property
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch

from octavo.comm.gloo import GlooComm
from octavo.comm.shared_memory import SharedMemoryComm
from octavo.errors import RankLost
from tests.support.forked import forked
from tests.support.native import the_library

HOST = "127.0.0.1"
PATIENCE = 120  # seconds for a whole job: more than any takes


AnyComm = Any  # SharedMemoryComm or GlooComm


class Ranks:
    """Processes of a group. Those that still run at the end of the `with` are killed."""

    def __init__(
        self, size: int, job: str, given: dict[str, Any] | None = None, seconds: float = 30, slot_bytes: int = 1 << 12, gloo: bool = False
    ) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        if gloo:
            self.store = GlooComm.create(HOST, size, PATIENCE)
            self._start(size, self.store.address, [], seconds, job, given)
            return
        the_library()
        fd = SharedMemoryComm.create(size, slot_bytes)
        self._start(size, str(fd), [fd], seconds, job, given)
        self.comm = SharedMemoryComm.join(fd, 0, size, seconds)  # to look at, or to give up in the place of rank 0
        os.close(fd)

    def _start(self, size: int, where: str, fds: list[int], seconds: float, job: str, given: dict[str, Any] | None) -> None:
        words = [sys.executable, "-m", "tests.support.rank_processes", where, str(size), str(seconds), job, json.dumps(given or {})]
        pipe, environment = subprocess.PIPE, {**os.environ, "OMP_NUM_THREADS": "1"}
        for rank in range(size):
            process = forked([*words, str(rank)], pass_fds=fds, env=environment, stdin=pipe, stdout=pipe, text=True)
            self.processes.append(process)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()

    def line(self, rank: int) -> Any:
        """Returns what a rank prints next."""
        stdout = self.processes[rank].stdout
        assert stdout is not None
        return json.loads(stdout.readline())

    def go(self, rank: int) -> None:
        """Lets a rank go on that waits for a word."""
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write("go\n")
        stdin.flush()

    def results(self) -> list[Any]:
        outputs = [process.communicate(timeout=PATIENCE)[0] for process in self.processes]
        assert [process.returncode for process in self.processes] == [0] * len(outputs)
        return [json.loads(output.splitlines()[-1]) for output in outputs]


def say(result: Any) -> None:
    print(json.dumps(result), flush=True)


# -- jobs


class Draw:
    """What every rank draws alike, so that each knows what all of them show."""

    def __init__(self, seed: int, number: int, size: int, most: int) -> None:
        choice = random.Random(seed * 1_000_003 + number)
        self.gathers = choice.random() < 0.3
        self.count = choice.choice([1, choice.randint(1, 64), choice.randint(1, most)])
        self.dtype = choice.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
        self._generator, self._size = torch.Generator().manual_seed(choice.getrandbits(40)), size

    @cached_property
    def shown(self) -> list[torch.Tensor]:
        scale = 10.0 ** torch.randint(-4, 4, (self._size, self.count), generator=self._generator)
        numbers = torch.randn(self._size, self.count, generator=self._generator) * scale  # so that the order of a sum shows
        return list(numbers.to(self.dtype))

    @property
    def expected(self) -> torch.Tensor:
        if self.gathers:
            return torch.cat(self.shown)
        total = self.shown[0].float()
        for other in self.shown[1:]:
            total = total + other.float()
        return total.to(self.dtype)


def exchanges(comm: AnyComm, given: dict[str, Any]) -> dict[str, int]:
    """Random sums and gathers, with pauses that differ between ranks."""
    most, own, right = given.get("most") or 3 * comm.group.slot_bytes // 4, random.Random(comm.rank), 0
    for number in range(given["rounds"]):
        draw = Draw(given["seed"], number, comm.size, most)
        if own.random() < 0.05:
            time.sleep(own.random() * 0.003)
        mine = draw.shown[comm.rank]
        got = comm.all_gather(mine) if draw.gathers else comm.all_reduce(mine)
        right += int(got.dtype == draw.dtype and torch.equal(got, draw.expected))
    return {"right": right}


def shapes(comm: AnyComm, given: dict[str, Any]) -> dict[str, Any]:
    """Arrays of two dimensions, parts of larger ones, and ids."""
    wide = torch.arange(12.0).reshape(3, 4) + 100 * comm.rank
    ids = torch.tensor([comm.rank, 7 + comm.rank])
    gathered, strided = comm.all_gather(wide), comm.all_reduce(wide.T[1:])
    return {"gathered": gathered.tolist(), "strided": strided.tolist(), "ids": comm.all_gather(ids).tolist(), "kept": wide.tolist()}


def joined_shapes() -> list[dict[str, Any]]:
    """Returns what `shapes` is on two ranks."""
    first, second = (torch.arange(12.0).reshape(3, 4) + 100 * rank for rank in range(2))
    both = {"gathered": torch.cat([first, second], dim=-1).tolist(), "strided": (first + second).T[1:].tolist(), "ids": [0, 7, 1, 8]}
    return [both | {"kept": own.tolist()} for own in (first, second)]


def until_the_end(comm: AnyComm, given: dict[str, Any]) -> dict[str, Any]:
    """Sums until that fails. The rank `given["late"]` waits for a word after the tenth sum."""
    say("joined")
    started = time.monotonic()
    try:
        for number in range(10_000_000):
            if number == 10 and comm.rank == given["late"]:
                say("late")
                sys.stdin.readline()
            started = time.monotonic()
            comm.all_reduce(torch.ones(64))
    except RankLost as error:
        return {"error": str(error), "seconds": time.monotonic() - started}
    raise AssertionError("nothing ended it")


def speed(comm: AnyComm, given: dict[str, Any]) -> dict[str, float]:
    """Microseconds of a sum of so many floats, the median; each rank on a core of its own, if there are as many."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})
    medians = {}
    for count in given["counts"]:
        numbers, times = torch.randn(count), []
        for _ in range(given.get("times", 2000)):
            started = time.perf_counter()
            comm.all_reduce(numbers)
            times.append(time.perf_counter() - started)
        medians[str(count)] = sorted(times)[len(times) // 2] * 1e6
    return medians


def messages(comm: AnyComm, given: dict[str, Any]) -> list[Any]:
    """Rank 0 sends to rank 1 what is sent back doubled, two under way at a time; then both send before either receives."""
    channel, wide = comm.channel(1 - comm.rank), torch.arange(6.0).reshape(2, 3)
    kinds = [wide, wide.T.to(torch.bfloat16), torch.tensor([3, 4]), torch.randn(100_000).clamp(0, 1).round()]
    got = []
    for first, second in pairwise(kinds):
        if comm.rank == 0:
            channel.send(first)
            channel.send(second)
        else:
            for kind in (first, second):
                channel.send(2 * channel.receive(torch.empty_like(kind)))
        if comm.rank == 0:
            got += [bool(torch.equal(channel.receive(torch.empty_like(kind)), 2 * kind)) for kind in (first, second)]
    channel.send(torch.tensor([10 + comm.rank]))
    return [*got, channel.receive(torch.empty(1, dtype=torch.int64)).tolist()]


def parts(comm: AnyComm, given: dict[str, Any]) -> list[float]:
    """Ranks 0 and 2 are one group, 1 and 3 another; then all meet."""
    part = comm.part(f"tensor {comm.rank % 2}", [comm.rank % 2, comm.rank % 2 + 2])
    own, everyone = part.all_reduce(torch.tensor([10.0**comm.rank])), comm.all_reduce(torch.tensor([10.0**comm.rank]))
    return [part.rank, part.size, own.item(), everyone.item()]


def meet(comm: AnyComm) -> None:
    """Waits until all are there: processes start at different times, and that is not what a job tries."""
    comm.all_gather(torch.zeros(1, dtype=torch.int64))


def main() -> None:
    where, size, seconds, name, given, rank = sys.argv[1:]
    comm: AnyComm
    if ":" in where:
        comm = GlooComm.join(where, HOST, int(rank), int(size), PATIENCE)
    else:
        comm = SharedMemoryComm.join(int(where), int(rank), int(size), PATIENCE)
    meet(comm)
    comm.wait_at_most(float(seconds))
    module, _, job = name.partition(":")
    torch.set_num_threads(1)
    say(getattr(importlib.import_module(module), job)(comm, json.loads(given)))


if __name__ == "__main__":
    main()
