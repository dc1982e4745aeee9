"""Spans: one for each request, under its client's trace, with the times of its record; sent by OTLP where an endpoint is set."""

import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from octavo.errors import OverloadError
from octavo.messages import LifeRecord
from octavo.server.records import Arrival, NoSpans, OtelSpans, Prompt, Record, Sample, open_spans
from tests.cli.processes import ROOT, environment
from tests.server.conftest import Served
from tests.support.http_server import wait_for

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def exported(served: Served, monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(served.observer, "spans", OtelSpans(provider, "stories"))
    return exporter


# promise: opentelemetry-extra-otel
def test_a_request_is_a_span_of_its_clients_trace_with_its_times(served: Served, exported: InMemorySpanExporter) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    before = time.time_ns()
    body = {"prompt": ["Once upon", "Then"], "max_tokens": 4, "ignore_eos": True}
    answer = served.server.http.post("/v1/completions", json=body, headers=headers).json()
    after = time.time_ns()
    (span,) = exported.get_finished_spans()
    assert span.context is not None and span.parent is not None and span.attributes is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    told = dict(span.attributes)
    assert told["gen_ai.response.id"] == answer["id"] and told["gen_ai.request.model"] == "stories" and told["octavo.request_id"] == "mine"
    usage = answer["usage"]
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert told["gen_ai.response.finish_reasons"] == ("length", "length")
    assert 0 < told["gen_ai.latency.time_to_first_token"] < told["gen_ai.latency.e2e"] < (after - before) / 1e9  # type: ignore[operator]
    times = [event.timestamp for event in span.events]
    assert sorted(event.name for event in span.events) == 2 * ["finished"] + 2 * ["first_scheduled"] + 2 * ["first_token"]
    assert span.start_time is not None and span.end_time is not None
    assert before <= span.start_time < min(times) <= max(times) <= span.end_time <= after
    assert "Once" not in span.to_json()


def test_without_a_trace_it_begins_one_and_an_error_is_an_error(served: Served, exported: InMemorySpanExporter) -> None:
    served.llm.trouble = (0, OverloadError("full", 1))
    assert served.server.http.post("/v1/completions", json={"prompt": "a"}, headers={"traceparent": "nonsense"}).status_code == 429
    (span,) = exported.get_finished_spans()
    assert span.parent is None and span.status.status_code == StatusCode.ERROR and span.status.description == "overloaded"


# promise: opentelemetry-extra-otel
def test_spans_are_sent_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "my-octavo")
        prompt, now = Prompt(3, 0, life=LifeRecord(1.0, 2.0)), Arrival()
        open_spans("a-model").add(Record("cmpl-7", now, 1, [prompt], [Sample(prompt)], finished=now.at + 1))
        wait_for(lambda: bool(got))
        server.shutdown()
    path, body = got[0]
    assert path == "/v1/traces" and all(word in body for word in (b"llm_request", b"cmpl-7", b"a-model", b"my-octavo"))


# promise: opentelemetry-extra-otel
def test_nothing_is_imported_unless_an_endpoint_is_set() -> None:
    code = "import sys; from octavo.server.run import open_spans; open_spans('m'); print('opentelemetry.sdk' in sys.modules)"
    env = {name: value for name, value in environment({}).items() if not name.startswith("OTEL_")}
    said = [
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**env, **more}, capture_output=True, text=True, timeout=60).stdout
        for more in ({}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9"})
    ]
    assert said == ["False\n", "True\n"]


def test_an_endpoint_without_the_extra_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert isinstance(open_spans("m"), NoSpans)
    assert "pip install octavo[otel]" in caplog.text
