"""A request's arrival, known wherever it is worked on: the guard says when and as what it came, records, spans and log lines take it up."""

import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from octavo import log

_HEADERS = (b"traceparent", b"tracestate")


@dataclass(frozen=True, slots=True)
class Arrival:
    request_id: str = ""  # as in x-request-id; a client may have chosen it
    client: str = ""  # whose it is, as far as turns among clients go
    at: float = field(default_factory=time.monotonic)
    wall: float = field(default_factory=time.time)
    trace_headers: Mapping[str, str] = field(default_factory=dict)  # W3C trace context


_current: ContextVar[Arrival] = ContextVar("arrival")


def arrive(request_id: str, headers: Mapping[bytes, bytes], client: str = "") -> None:
    """For this task, and those it starts."""
    found = {name.decode(): headers[name].decode("latin-1") for name in _HEADERS if name in headers}
    _current.set(Arrival(request_id, client, trace_headers=found))
    log.request_id.set(request_id)


def current_arrival() -> Arrival:
    """That of the request being worked on; where nobody said, now."""
    return _current.get(None) or Arrival()
