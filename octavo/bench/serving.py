"""Measures a server from outside: when requests arrive, what their clients saw, and the figures of it.

`drive` sends each request when it is due, and notes when each piece of its answer came. A piece is an event with text. A server may
put several tokens into one piece, or hold back a token that is half a character. Tokens are therefore counted by the `usage` that
the server reports, and by pieces only if it reports none.
"""

import argparse
import asyncio
import contextlib
import math
import platform
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from random import Random
from typing import Any

from octavo import __version__
from octavo.bench.figures import Figure, Result
from octavo.bench.workload import Ids, Workload
from octavo.client.api import RemoteServer, stream_body
from octavo.errors import ConfigError, RemoteError
from octavo.progress import GenerateProgress
from octavo.worker.machine import cpu_model

# -- when requests arrive, in seconds after the start


def poisson(count: int, rate: float, seed: int) -> list[float]:
    """Returns times of a Poisson process with `rate` requests a second, the first at 0. With rate inf all come at once."""
    if math.isinf(rate):
        return [0.0] * count
    rng = Random(f"{seed} arrivals")
    return list(accumulate((rng.expovariate(rate) for _ in range(count - 1)), initial=0.0))


def replayed(name: str, times: list[float] | None, speedup: float) -> list[float]:
    """Returns the times of a trace, `speedup` times as fast."""
    if times is None:
        raise ConfigError(f"--trace {name} does not say when its requests came; set --request-rate")
    return [(time - times[0]) / speedup for time in times]


# -- sending them

LOOK_EVERY = 0.5  # seconds between two looks at the progress


@dataclass(slots=True)
class TimedRequest:
    """A request as its client saw it. Times are seconds after the start of the run."""

    due: float
    sent: float = 0.0
    pieces: list[float] = field(default_factory=list)  # when each piece came
    ended: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None  # None if the server does not say
    status: int | None = None  # of the answer; None if there was no answer
    error: str | None = None

    @property
    def first_token(self) -> float:
        return self.pieces[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.pieces)]

    @property
    def per_token(self) -> float | None:
        return (self.ended - self.pieces[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def end_to_end(self) -> float:
        return self.ended - self.sent

    def as_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, and how."""

    workload: Workload
    due: Sequence[float]
    model: str
    concurrency: int | None  # the most requests at the same time
    temperature: float


async def probe(server: RemoteServer, model: str, highest_id: int) -> None:
    """Sends one small request. If every request would fail, this one raises the error; it also warms the server up."""
    await server.stream("/v1/completions", _body(model, [highest_id] * 4, 2, 0.0), lambda _now, _event: None)


async def drive(server: RemoteServer, load: Load) -> tuple[float, list[TimedRequest]]:
    """Sends all requests. Returns the seconds from the start to the end of the last one, and what the client saw of each."""
    requests = [TimedRequest(due) for due in load.due]
    # What is due at once is written before the clock starts: this client stands for many, and must not be slower than they are.
    prompts = load.workload.requests
    bodies = [b"" if due else _body(load.model, *prompt, load.temperature) for due, prompt in zip(load.due, prompts)]
    gate = asyncio.Semaphore(load.concurrency) if load.concurrency else contextlib.nullcontext()
    start = time.perf_counter()

    async def send(request: TimedRequest, ids: Ids, wanted: int, body: bytes) -> None:
        async with gate:
            request.sent = time.perf_counter() - start
            await _send(server, request, body or _body(load.model, ids, wanted, load.temperature), start)

    with GenerateProgress(len(requests), enabled=True) as progress:
        watch = asyncio.create_task(_watch(requests, progress))
        try:
            async with asyncio.TaskGroup() as group:
                for request, prompt, body in sorted(zip(requests, prompts, bodies, strict=True), key=lambda one: one[0].due):
                    await asyncio.sleep(max(0.0, start + request.due - time.perf_counter()))
                    group.create_task(send(request, *prompt, body))
        finally:
            watch.cancel()
    return max(request.ended for request in requests), requests


def _body(model: str, ids: Ids, wanted: int, temperature: float) -> bytes:
    body = {"model": model, "prompt": ids, "max_tokens": wanted, "ignore_eos": True, "temperature": temperature}
    return stream_body(body | {"stream_options": {"include_usage": True}})


async def _send(server: RemoteServer, request: TimedRequest, body: bytes, start: float) -> None:
    def take(now: float, event: dict[str, Any]) -> None:
        for choice in event.get("choices") or ():
            request.ended = now - start
            if choice.get("text") or choice.get("finish_reason") is None:
                request.pieces.append(now - start)
        if usage := event.get("usage"):
            request.input_tokens, request.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            request.cached_tokens = details.get("cached_tokens")

    try:
        await server.stream("/v1/completions", body, take)
        if not request.pieces:  # no text came: the end counts as the only piece
            request.pieces.append(request.ended)
        request.status, request.output_tokens = 200, request.output_tokens or len(request.pieces)
    except RemoteError as error:
        request.status, request.error, request.ended = error.status, str(error), time.perf_counter() - start


async def _watch(requests: Sequence[TimedRequest], progress: GenerateProgress) -> None:
    """Shows the progress twice a second, so that this costs the same however many tokens come."""
    shown = (0, 0, 0)
    while True:
        await asyncio.sleep(LOOK_EVERY)
        done = [request for request in requests if request.status is not None or request.error is not None]
        now = (len(done), sum(request.input_tokens for request in done), sum(len(request.pieces) for request in requests))
        progress.count(*(new - old for new, old in zip(now, shown, strict=True)))
        progress.show()
        shown = now


# -- service level objectives: limits that a request keeps or does not
#
#    ttft   to the first token                        tpot   per token after the first, on average
#    itl    between two pieces of text, every time    e2e    to the end

Slo = Mapping[str, float]  # name -> seconds
UNITS = {"ms": 1e-3, "s": 1.0}
NAMES = ("ttft", "itl", "tpot", "e2e")


def slo(text: str) -> Slo:
    """Reads ttft:500ms,itl:50ms."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        found = re.fullmatch(r"(\w+):(\d{1,9}(?:\.\d{1,9})?)(ms|s)", part.strip(), re.ASCII)
        if found is None or found[1] not in NAMES or found[1] in bounds:
            raise argparse.ArgumentTypeError(f"wanted bounds like ttft:500ms,itl:50ms, of {', '.join(NAMES)}, each once; got {part!r:.40}")
        bounds[found[1]] = float(found[2]) * UNITS[found[3]]
    return bounds


def keeps(request: TimedRequest, bounds: Slo) -> bool:
    """Whether the request kept all limits. One that failed did not."""
    if request.error is not None:
        return False
    seen = {"ttft": request.first_token, "itl": max(request.gaps, default=0.0), "tpot": request.per_token or 0.0, "e2e": request.end_to_end}
    return all(seen[name] <= bound for name, bound in bounds.items())


# -- the figures of a run


@dataclass(frozen=True, slots=True)
class Client:
    """Who asked which server. The server may run on another machine."""

    model: str
    server: str
    cpu: str
    system: str
    python: str
    octavo: str

    def __str__(self) -> str:
        return f"{self.model} at {self.server}; asked from {self.cpu}, octavo {self.octavo}, Python {self.python}, {self.system}"


def client_here(model: str, server: str) -> Client:
    system = f"{platform.system()} {platform.machine()}"
    return Client(model, server, cpu_model(), system, platform.python_version(), __version__)


def result_of(load: Load, seconds: float, requests: Sequence[TimedRequest], bounds: Slo | None) -> Result:
    """Returns the figures over all requests that were answered. Raises an error if none was."""
    done = [request for request in requests if request.error is None]
    if not done:
        raise RemoteError(f"{load.workload.name}: all {len(requests)} requests failed; {'; '.join(failures(requests))}")
    facts = {
        "requests": len(requests),
        "failed": len(requests) - len(done),
        "input_tokens": sum(request.input_tokens for request in done),
        "output_tokens": sum(request.output_tokens for request in done),
        "output_tokens_wanted": load.workload.output_tokens,
        "clipped": load.workload.clipped,
    }
    figures = {
        "output_throughput": Figure("tokens/s", [facts["output_tokens"] / seconds]),
        "input_throughput": Figure("tokens/s", [facts["input_tokens"] / seconds]),
        "request_throughput": Figure("requests/s", [len(done) / seconds]),
        "wall": Figure("s", [seconds]),
    }
    if load.concurrency is None:  # with a limit on concurrency, requests wait for their turn
        figures["behind_schedule"] = Figure("ms", [1000 * max(request.sent - request.due for request in requests)])
    if facts["input_tokens"] and all(request.cached_tokens is not None for request in done):
        cached = sum(request.cached_tokens or 0 for request in done)
        figures["cache_hit_rate"] = Figure("%", [100 * cached / facts["input_tokens"]])
    if bounds is not None:
        kept = sum(keeps(request, bounds) for request in requests)
        figures["goodput"] = Figure("requests/s", [kept / seconds])
        figures["within_slo"] = Figure("%", [100 * kept / len(requests)])
    return Result(load.workload.name, facts, figures | _times(done), [_as_dict(request, bounds) for request in requests])


def _as_dict(request: TimedRequest, bounds: Slo | None) -> dict[str, object]:
    return request.as_json() | ({} if bounds is None else {"within_slo": keeps(request, bounds)})


def failures(requests: Sequence[TimedRequest]) -> list[str]:
    """Returns a line for each status of failed requests: how often it came, and its first reason."""
    failed = [request for request in requests if request.error is not None]
    counts = Counter(request.status for request in failed)
    reasons = {request.status: request.error for request in reversed(failed)}
    return [f"{'no answer' if status is None else status}: {count} (first: {reasons[status]})" for status, count in counts.items()]


def _times(done: Sequence[TimedRequest]) -> dict[str, Figure]:
    times = {
        "first_token": [request.first_token for request in done],
        "inter_token": [gap for request in done for gap in request.gaps],
        "per_output_token": [request.per_token for request in done if request.per_token is not None],
        "end_to_end": [request.end_to_end for request in done],
    }
    return {name: Figure("ms", [1000 * second for second in seconds]) for name, seconds in times.items() if seconds}
