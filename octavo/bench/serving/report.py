"""What a run comes to: figures over the requests that were answered, and the others by what was wrong with them."""

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from octavo import __version__
from octavo.bench.figures import Figure, Result
from octavo.bench.serving.drive import Asked, Load
from octavo.bench.serving.slo import Slo, keeps
from octavo.errors import RemoteError
from octavo.worker.machine import cpu_model


@dataclass(frozen=True, slots=True)
class Client:
    """Who asked whom: the server's own machine may be another."""

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


def result_of(load: Load, seconds: float, asked: Sequence[Asked], bounds: Slo | None) -> Result:
    done = [request for request in asked if request.error is None]
    if not done:
        raise RemoteError(f"{load.workload.name}: all {len(asked)} requests failed; {'; '.join(failures(asked))}")
    facts = {
        "requests": len(asked),
        "failed": len(asked) - len(done),
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
    if load.concurrency is None:  # else a request may wait for its turn, as it should
        figures["behind_schedule"] = Figure("ms", [1000 * max(request.sent - request.due for request in asked)])
    if facts["input_tokens"] and all(request.cached_tokens is not None for request in done):
        cached = sum(request.cached_tokens or 0 for request in done)
        figures["cache_hit_rate"] = Figure("%", [100 * cached / facts["input_tokens"]])
    if bounds is not None:
        kept = sum(keeps(request, bounds) for request in asked)
        figures["goodput"] = Figure("requests/s", [kept / seconds])
        figures["within_slo"] = Figure("%", [100 * kept / len(asked)])
    return Result(load.workload.name, facts, figures | _times(done), [_told(request, bounds) for request in asked])


def _told(request: Asked, bounds: Slo | None) -> dict[str, object]:
    return request.as_json() | ({} if bounds is None else {"within_slo": keeps(request, bounds)})


def failures(asked: Sequence[Asked]) -> list[str]:
    """Each status with how often it came, and the first of its reasons."""
    failed = [request for request in asked if request.error is not None]
    counts = Counter(request.status for request in failed)
    reasons = {request.status: request.error for request in reversed(failed)}
    return [f"{'no answer' if status is None else status}: {count} (first: {reasons[status]})" for status, count in counts.items()]


def _times(done: Sequence[Asked]) -> dict[str, Figure]:
    times = {
        "first_token": [request.first_token for request in done],
        "inter_token": [gap for request in done for gap in request.gaps],
        "per_output_token": [request.per_token for request in done if request.per_token is not None],
        "end_to_end": [request.end_to_end for request in done],
    }
    return {name: Figure("ms", [1000 * second for second in seconds]) for name, seconds in times.items() if seconds}
