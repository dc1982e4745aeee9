"""What happened to each request: records, which the server keeps for a while, and spans, which it sends to OpenTelemetry.

A record is found by the id of its answer. It has no text. When there are more than MOST_SAMPLES answers, the oldest records are dropped.

A span is made when a request has ended, under the trace its client named (W3C traceparent). Spans are sent where
OTEL_EXPORTER_OTLP_ENDPOINT says, if the extra `otel` is installed; nothing of it is imported otherwise. Endpoint, headers, sampler and
service name are set by the variables OpenTelemetry defines.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from octavo import __version__
from octavo.config import spans_wanted
from octavo.log import logger
from octavo.messages import FinishReason, LifeRecord
from octavo.server.access import Arrival

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

MOST_SAMPLES = 10_000  # some 5 MB
Attribute = str | int | float | list[str]  # of a span


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

    def told(self) -> dict[str, object]:
        samples = [self.samples[at : at + self.n] for at in range(0, len(self.samples), self.n)]
        return {
            "id": self.id,
            "object": "request",
            "request_id": self.arrival.request_id,
            "created": round(self.arrival.wall, 3),
            "state": self.state,
            "error": self.error,
            "prompts": [_told(prompt, its, self.arrival.at) for prompt, its in zip(self.prompts, samples, strict=True)],
        }


def _told(prompt: Prompt, samples: list[Sample], arrived: float) -> dict[str, object]:
    life = prompt.life or LifeRecord(0.0)
    times = (("queued", life.queued), ("first_scheduled", life.first_scheduled), ("first_token", prompt.first_token))
    return {
        "prompt_tokens": prompt.prompt_tokens,
        "cached_tokens": life.cached_tokens,
        "pinned_tokens": life.pinned_tokens,
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
