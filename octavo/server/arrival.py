"""When a request arrived, its id and its caller: set by the guard, read by records, spans and log lines."""

import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from octavo import log
from octavo.server.keys import Caller

_HEADERS = (b"traceparent", b"tracestate")


@dataclass(frozen=True, slots=True)
class Arrival:
    request_id: str = ""  # as in x-request-id; a client may have chosen it
    at: float = field(default_factory=time.monotonic)
    wall: float = field(default_factory=time.time)
    trace_headers: Mapping[str, str] = field(default_factory=dict)  # W3C trace context
    caller: Caller = field(default_factory=Caller)


_current: ContextVar[Arrival] = ContextVar("arrival")


def arrive(request_id: str, headers: Mapping[bytes, bytes]) -> None:
    """For this task, and those it starts."""
    found = {name.decode(): headers[name].decode("latin-1") for name in _HEADERS if name in headers}
    _current.set(Arrival(request_id, trace_headers=found))
    log.request_id.set(request_id)


def arrive_as(caller: Caller) -> None:
    """Its key has been checked."""
    _current.set(replace(current_arrival(), caller=caller))


def current_arrival() -> Arrival:
    """That of the request being worked on; where nobody said, now."""
    return _current.get(None) or Arrival()
