"""What happened to each request: observed for metrics, kept in records for a while, and sent as spans to OpenTelemetry.

    watch = server.observer.watch("cmpl-", requests)     watch.id is the id of the answer
    with watch:                                          an exception that leaves the block says how the request ended
        async for deltas in ...:
            watch.take(deltas)                           updates of all prompts; the index of a delta is prompt * n + sample

A record is found by the id of its answer. It has no text. When there are more than MOST_SAMPLES answers, the oldest records are dropped.
A span is made when a request has ended, under the trace its client named (W3C traceparent). Spans are sent where
OTEL_EXPORTER_OTLP_ENDPOINT says, if the extra `otel` is installed; nothing of it is imported otherwise. Endpoint, headers, sampler and
service name are set by the variables OpenTelemetry defines.
"""

import time
from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from secrets import token_hex
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol

from octavo import __version__, log
from octavo.config import spans_wanted
from octavo.errors import DeadlineError, OverloadError, RequestError
from octavo.log import logger
from octavo.messages import AddRequest, FinishReason, LifeRecord
from octavo.outputs import TextDelta
from octavo.server.metrics import FAILURES, STATUSES, Numbers

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

MOST_SAMPLES = 10_000  # some 5 MB
Attribute = str | int | float | list[str]  # of a span
_TRACE_HEADERS = (b"traceparent", b"tracestate")


# -- arrivals: the guard notes them, and records, spans and log lines have them


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. Its name is its key if the server has several keys, else its address."""

    name: str = ""
    reads_text: bool = False  # whether it may read everybody's text

    def may_read(self, other: "Caller") -> bool:
        """Returns whether it may see what `other` sent."""
        return self.reads_text or self.name == other.name


@dataclass(frozen=True, slots=True)
class Arrival:
    request_id: str = ""  # as in x-request-id; a client may have chosen it
    at: float = field(default_factory=time.monotonic)
    wall: float = field(default_factory=time.time)
    trace_headers: Mapping[str, str] = field(default_factory=dict)  # W3C trace context
    caller: Caller = field(default_factory=Caller)


_current: ContextVar[Arrival] = ContextVar("arrival")


def arrive(request_id: str, headers: Mapping[bytes, bytes]) -> None:
    """Notes the arrival of a request, for this task and those it starts."""
    found = {name.decode(): headers[name].decode("latin-1") for name in _TRACE_HEADERS if name in headers}
    _current.set(Arrival(request_id, trace_headers=found))
    log.request_id.set(request_id)


def arrive_as(caller: Caller) -> None:
    """Notes who sent the request, once its key has been checked."""
    _current.set(replace(current_arrival(), caller=caller))


def current_arrival() -> Arrival:
    """Returns the arrival of the request that this task works on; outside of a request, one that arrives now."""
    return _current.get(None) or Arrival()


# -- records


@dataclass(slots=True)
class Sample:
    """One answer to a prompt."""

    prompt: "Prompt"
    generated_tokens: int = 0
    last_token: float = 0.0  # when it came; 0: there is none yet
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Prompt:
    prompt_tokens: int
    left: int  # samples that have not ended
    seed: int | None = None  # None: a beam search
    first_token: float = 0.0  # when it came; 0: there is none yet
    finished: float = 0.0
    life: LifeRecord | None = None  # the engine's newest


@dataclass(slots=True)
class Record:
    id: str
    arrival: Arrival
    n: int  # samples of each prompt
    prompts: list[Prompt]
    samples: list[Sample]  # in the order of choices: prompt * n + sample
    error: str | None = None  # why it failed, as in the metrics
    finished: float = 0.0  # when its client had the whole answer, or had left

    @property
    def state(self) -> Literal["running", "finished"]:
        return "finished" if self.finished else "running"

    def to_dict(self) -> dict[str, object]:
        samples = [self.samples[at : at + self.n] for at in range(0, len(self.samples), self.n)]
        return {
            "id": self.id,
            "object": "request",
            "request_id": self.arrival.request_id,
            "created": round(self.arrival.wall, 3),
            "state": self.state,
            "error": self.error,
            "prompts": [_prompt_dict(prompt, its, self.arrival.at) for prompt, its in zip(self.prompts, samples, strict=True)],
        }


def _prompt_dict(prompt: Prompt, samples: list[Sample], arrived: float) -> dict[str, object]:
    life = prompt.life or LifeRecord(0.0)
    times = (("queued", life.queued), ("first_scheduled", life.first_scheduled), ("first_token", prompt.first_token))
    return {
        "prompt_tokens": prompt.prompt_tokens,
        "seed": prompt.seed,
        "cached_tokens": life.cached_tokens,
        "pinned_tokens": life.pinned_tokens,
        **({} if life.common_tokens <= life.cached_tokens else {"common_tokens": life.common_tokens}),
        "hit_reason": life.hit_reason,
        **({} if life.hit_group is None else {"hit_group": life.hit_group}),
        "preemptions": life.preemptions,
        "recomputed_tokens": life.recomputed_tokens,
        **({"engine": life.engine, "routing": life.routing, "resumed": life.resumed} if life.routing else {}),
        **{name: round(at - arrived, 6) if at else None for name, at in (*times, ("finished", prompt.finished))},
        "samples": [{"generated_tokens": each.generated_tokens, "finish_reason": each.finish_reason} for each in samples],
    }


@dataclass(slots=True)
class Records:
    _known: dict[str, Record] = field(default_factory=dict)  # oldest first
    _num_samples: int = 0

    def add(self, record: Record) -> None:
        self._known[record.id] = record
        self._num_samples += len(record.samples)
        while self._num_samples > MOST_SAMPLES and len(self._known) > 1:
            oldest = self._known.pop(next(iter(self._known)))
            self._num_samples -= len(oldest.samples)

    def get(self, answer_id: str) -> Record | None:
        return self._known.get(answer_id)




class Spans(Protocol):
    def add(self, record: Record) -> None:
        """Sends the span of a request that has ended."""


class NoSpans:
    def add(self, record: Record) -> None:
        pass


def open_spans(model_name: str) -> Spans:
    """Returns an exporter if the environment asks for one and it is installed, else `NoSpans`."""
    if not spans_wanted():
        return NoSpans()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        logger.warning("an endpoint for OpenTelemetry is set, but %s is not installed: pip install octavo[otel]", error.name)
        return NoSpans()
    resource = Resource({"service.name": "octavo", "service.version": __version__}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OtelSpans(provider, model_name)


class OtelSpans:
    def __init__(self, provider: "TracerProvider", model_name: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("octavo", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def add(self, record: Record) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        arrival = record.arrival
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(arrival.trace_headers),
            kind=SpanKind.SERVER,
            start_time=_wall_ns(record, arrival.at),
            attributes=self._attributes(record),
        )
        for number, prompt in enumerate(record.prompts):
            scheduled = prompt.life.first_scheduled if prompt.life is not None else None
            for name, at in (("first_scheduled", scheduled), ("first_token", prompt.first_token), ("finished", prompt.finished)):
                if at:
                    span.add_event(name, {"prompt": number}, timestamp=_wall_ns(record, at))
        if record.error is not None:
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(end_time=_wall_ns(record, record.finished))

    def _attributes(self, record: Record) -> dict[str, Attribute]:
        """Returns the span's attributes, named as in the semantic conventions or else as in vLLM. Times are those of the slowest prompt."""
        lives = [prompt.life for prompt in record.prompts if prompt.life is not None]
        starts = [life.first_scheduled - life.queued for life in lives if life.first_scheduled is not None]
        tokens = [prompt.first_token - record.arrival.at for prompt in record.prompts if prompt.first_token]
        return {
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.id": record.id,
            "gen_ai.response.finish_reasons": [sample.finish_reason or "" for sample in record.samples],
            "gen_ai.usage.input_tokens": sum(prompt.prompt_tokens for prompt in record.prompts),
            "gen_ai.usage.output_tokens": sum(sample.generated_tokens for sample in record.samples),
            "gen_ai.usage.cached_tokens": sum(life.cached_tokens for life in lives),
            "gen_ai.latency.time_in_queue": max(starts, default=0.0),
            "gen_ai.latency.time_to_first_token": max(tokens, default=0.0),
            "gen_ai.latency.e2e": record.finished - record.arrival.at,
            "octavo.preemptions": sum(life.preemptions for life in lives),
            "octavo.request_id": record.arrival.request_id,
        }


def _wall_ns(record: Record, at: float) -> int:
    return int((record.arrival.wall + at - record.arrival.at) * 1e9)


# -- the observer of requests

TICK_SECONDS = 0.1  # between two calls of `tick`


class Observer:
    def __init__(self, numbers: Numbers | None = None, spans: Spans | None = None) -> None:
        self.numbers = numbers or Numbers()
        self.records = Records()
        self.spans: Spans = spans or NoSpans()
        self._ticked = 0.0

    def watch(self, prefix: str, requests: Sequence[AddRequest]) -> "Watch":
        """Returns the watch of a new request. Its id is `prefix` and 128 random bits, so that the id of a record cannot be guessed."""
        n = requests[0].params.n
        prompts = [Prompt(len(request.prompt_token_ids), n, request.params.seed) for request in requests]
        record = Record(prefix + token_hex(16), current_arrival(), n, prompts, [Sample(prompt) for prompt in prompts for _ in range(n)])
        return Watch(record, self)

    def answered(self, status: int) -> None:
        known = str(status or 499)  # 0: the client left before there was an answer
        self.numbers.http_responses.add(1, known if known in STATUSES else "other")

    def tick(self) -> None:
        """Notes that this process is alive, and how late the call came. Called every TICK_SECONDS, later if the event loop is busy."""
        self.numbers.beat()
        now = time.monotonic()
        if self._ticked:
            self.numbers.loop_lag.observe(max(0.0, now - self._ticked - TICK_SECONDS))
        self._ticked = now


class Watch:
    """Watches one request from its start to its end."""

    __slots__ = ("_numbers", "_observer", "_record")

    def __init__(self, record: Record, observer: Observer) -> None:
        self._record = record
        self._observer = observer
        self._numbers = observer.numbers

    @property
    def id(self) -> str:
        return self._record.id

    def __enter__(self) -> None:
        self._observer.records.add(self._record)

    def take(self, updates: Sequence[TextDelta]) -> None:
        now, samples = time.monotonic(), self._record.samples
        for delta in updates:
            sample = samples[delta.index]
            if delta.life is not None:
                sample.prompt.life = delta.life
            if count := len(delta.token_ids):
                self._numbers.generation_tokens.add(count)
                if sample.last_token:  # tokens that come together share the time since the last one
                    self._numbers.inter_token_latency.observe((now - sample.last_token) / count, count)
                elif not sample.prompt.first_token:
                    self._first_token(sample.prompt, now)
                sample.last_token = now
                sample.generated_tokens += count
            if delta.finish_reason is not None:
                self._end_sample(sample, delta.finish_reason, now)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        now, record = time.monotonic(), self._record
        left_early: FinishReason = "abort"  # the client left
        if error is not None and not isinstance(error, GeneratorExit | CancelledError):
            left_early, record.error = "error", reason_of(error)
            self._numbers.request_failures.add(1, record.error)
        for sample in record.samples:
            if sample.finish_reason is None:
                self._end_sample(sample, left_early, now)
        record.finished = now
        self._observer.spans.add(record)

    def _first_token(self, prompt: Prompt, now: float) -> None:
        prompt.first_token = now
        self._numbers.time_to_first_token.observe(now - self._record.arrival.at)
        self._numbers.prompt_tokens.add(prompt.prompt_tokens)

    def _end_sample(self, sample: Sample, reason: FinishReason, now: float) -> None:
        numbers, prompt = self._numbers, sample.prompt
        sample.finish_reason = reason
        numbers.request_success.add(1, reason)
        if reason in ("stop", "length"):
            numbers.request_generation_tokens.observe(sample.generated_tokens)
        prompt.left -= 1
        if not prompt.left:
            prompt.finished = now
            self._end_prompt(prompt, whole=reason in ("stop", "length"))

    def _end_prompt(self, prompt: Prompt, whole: bool) -> None:
        """Counts a prompt. Its times count only if it was completed: a client's patience says nothing about the server."""
        numbers, life = self._numbers, prompt.life
        if life is not None and life.hit_reason is not None:
            numbers.prefix_lookups.add(1, life.hit_reason)
        if not whole:
            return
        numbers.e2e_latency.observe(prompt.finished - self._record.arrival.at)
        numbers.request_prompt_tokens.observe(prompt.prompt_tokens)
        if life is not None and life.first_scheduled is not None and life.first_token is not None:
            numbers.queue_time.observe(life.first_scheduled - life.queued)
            numbers.prefill_time.observe(life.first_token - life.first_scheduled)
            numbers.decode_time.observe((life.finished or prompt.finished) - life.first_token)


def reason_of(error: BaseException) -> str:
    """Returns the reason of a failure, one of FAILURES."""
    if isinstance(error, RequestError):
        return "invalid_request"
    if isinstance(error, OverloadError):
        return "overloaded"
    if isinstance(error, DeadlineError):
        return error.code
    code = vars(error).get("code")
    return code if code in FAILURES else "other"
