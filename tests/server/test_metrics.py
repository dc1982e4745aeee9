"""/metrics: every name of the family, each with what really happened; sums over processes; a dashboard that names nothing else."""

import asyncio
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx2 as httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from octavo.errors import DeadlineError, EngineError, OverloadError, RequestError, UnavailableError
from octavo.messages import AddRequest
from octavo.metrics import Counter, Gauge, engine_metrics
from octavo.outputs import TextDelta
from octavo.sampling_params import SamplingParams
from octavo.server.app import build_app
from octavo.server.metrics import FAILURES, SECONDS, Numbers, shared_file
from octavo.server.records import TICK_SECONDS, Observer
from octavo.server.state import Server
from octavo.server_config import ServerConfig
from tests.server.conftest import Served
from tests.support.http_server import wait_for
from tests.support.stand_in_llm import StandInLLM

DASHBOARD = Path(__file__).resolve().parents[2] / "docs/grafana/octavo.json"
GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}
COUNTERS = {
    "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens", "request_success",
}  # fmt: skip
HISTOGRAMS = {
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "iteration_tokens_total",
}  # fmt: skip

Samples = dict[str, float]  # name{label that is not on all of them="value"} -> value


def samples_of(text: str, prefix: str = "octavo:") -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("engine") == "0" and labels.pop("model_name") and sample.name.startswith(prefix)
            label = "".join(f'{{{name}="{value}"}}' for name, value in labels.items())
            found[sample.name.removeprefix(prefix) + label] = sample.value
    return found


@contextmanager
def change(served: Served) -> Iterator[Samples]:
    """What a block changed, once it is left."""
    before, changed = samples_of(served.server.http.get("/metrics").text), Samples()
    yield changed
    after = samples_of(served.server.http.get("/metrics").text)
    changed |= {name: after[name] - before[name] for name in after if after[name] != before[name]}


# promise: metrics, labels-model-name, counters-prefix-cache, histograms-time-first, histograms-request-queue, histograms-request-prompt
def test_requests_are_counted_by_what_was_answered(served: Served) -> None:
    prompts, tokens = [[1, 40, 50, 60, 70], [1, 9, 8]], 6
    with change(served) as new:
        body = {"prompt": prompts, "n": 2, "max_tokens": tokens, "ignore_eos": True}
        answer = served.server.post("/v1/completions", body).json()
        again = served.server.post("/v1/completions", {"prompt": prompts[0], "max_tokens": 1, "stream": True}).text
    assert answer["usage"]["completion_tokens"] == 4 * tokens and "[DONE]" in again
    assert new["prompt_tokens_total"] == 5 + 3 + 5 and new["generation_tokens_total"] == 4 * tokens + 1
    assert new['request_success_total{finished_reason="length"}'] == 5
    assert new["prefix_cache_queries_total"] == 13 and new["prefix_cache_hits_total"] == 4
    assert sum(value for name, value in new.items() if name.startswith("prefix_cache_lookups_total")) == 3
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert new[f"{name}_seconds_count"] == 3 and new[f"{name}_seconds_sum"] > 0
    assert new["e2e_request_latency_seconds_sum"] > new["time_to_first_token_seconds_sum"]
    assert new["inter_token_latency_seconds_count"] == 4 * (tokens - 1)
    assert (new["request_prompt_tokens_count"], new["request_prompt_tokens_sum"]) == (3, 13)
    assert (new["request_generation_tokens_count"], new["request_generation_tokens_sum"]) == (5, 4 * tokens + 1)
    computed = 4 + 2 + 4 + 4 * (tokens - 1) + 1  # a prompt's last token once a sample, then all but the last of an answer; 4 were found
    assert new["iteration_tokens_total_sum"] == computed and new['iteration_tokens_total_bucket{le="+Inf"}'] >= tokens
    assert new['http_responses_total{status="200"}'] >= 2


ERRORS: list[tuple[Exception, int, str]] = [
    (OverloadError("full", 1), 429, "overloaded"),
    (UnavailableError("slow", 1, "queue_timeout"), 503, "queue_timeout"),
    (UnavailableError("gone", 1, "engine_dead"), 503, "engine_dead"),
    (UnavailableError("new", 1, "a_code_of_tomorrow"), 503, "other"),
    (DeadlineError("late"), 504, "deadline_exceeded"),
    (RequestError("no", "logprobs"), 400, "invalid_request"),
    (EngineError("nan", "numerical_error"), 500, "numerical_error"),
    (EngineError("twice", "engine_lost"), 500, "engine_lost"),
    (OSError("surprise"), 500, "other"),
]


# promise: requests-fail-counted
@pytest.mark.parametrize(("error", "status", "reason"), ERRORS, ids=lambda value: value if isinstance(value, str) else "")
def test_what_fails_is_counted_by_its_reason(served: Served, error: Exception, status: int, reason: str) -> None:
    assert {each for _, _, each in ERRORS} == set(FAILURES)
    served.llm.trouble = (0, error)
    with change(served) as new:
        assert served.server.post("/v1/completions", {"prompt": "Once", "max_tokens": 4}).status_code == status
    assert new[f'request_failures_total{{reason="{reason}"}}'] == 1 and new['request_success_total{finished_reason="error"}'] == 1
    assert new[f'http_responses_total{{status="{status}"}}'] == 1
    assert "e2e_request_latency_seconds_count" not in new and "generation_tokens_total" not in new


# promise: counters-prefix-cache
def test_clients_that_leave_are_counted_with_what_they_got(served: Served) -> None:
    served.llm.pause = 0.01
    with change(served) as new:
        body = {"prompt": "Once", "max_tokens": 200, "stream": True, "ignore_eos": True}
        with served.server.http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        wait_for(lambda: served.llm.is_idle)
    assert new['request_success_total{finished_reason="abort"}'] == 1 and 1 <= new["generation_tokens_total"] < 200
    assert new["time_to_first_token_seconds_count"] == 1 and "e2e_request_latency_seconds_count" not in new


def scraped(llm: StandInLLM, prefix: str = "octavo:") -> Samples:
    async def scrape() -> str:
        app = build_app(Server(llm, ServerConfig(metrics_prefix=prefix), "m"))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as client:
            answer = await client.get("/metrics")
            assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=")
            return answer.text

    return samples_of(asyncio.run(scrape()), prefix)


# promise: metrics-prefix, aiperf-works-metrics, prometheus-prefix-octavo, metrics-prefix-vllm, labels-model-name, gauges-num-requests
# promise: grafana-dashboard-family
def test_the_family_is_complete_under_any_prefix_and_the_dashboard_names_what_is_there() -> None:
    names = {sample.partition("{")[0] for sample in scraped(StandInLLM())}
    assert GAUGES | {f"{name}_total" for name in COUNTERS} <= names
    assert {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")} <= names
    assert {sample.partition("{")[0] for sample in scraped(StandInLLM(), "vllm:")} == names
    recurrent = StandInLLM()
    recurrent.stats = replace(recurrent.stats, state_slots=20)
    states = {sample.partition("{")[0] for sample in scraped(recurrent)} - names
    assert states and all(name.startswith("state_") for name in states)
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [each["query"] for each in dashboard["templating"]["list"]]
    used = set(re.findall(r"octavo:(\w+)", " ".join(asked)))
    assert states <= used <= names | states, "the dashboard asks for what nobody tells"
    shown = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in used}
    assert {re.sub(r"_total$", "", name) for name in GAUGES | COUNTERS | HISTOGRAMS} <= shown | {"iteration_tokens"}


def test_states_are_counted_only_of_recurrent_models() -> None:
    llm = StandInLLM()
    assert not any(sample.startswith("state_") for sample in scraped(llm))
    llm.stats = replace(llm.stats, state_slots=20, held_states=4, checkpoints=9, checkpoints_kept=12, checkpoints_used=5)
    llm.stats = replace(llm.stats, checkpoints_evicted=3, stateless_tokens=700)
    names = "slots", "slots_in_use", "checkpoints", "checkpoints_kept_total", "checkpoints_used_total", "checkpoints_evicted_total"
    samples = scraped(llm)
    assert [samples[f"state_{name}"] for name in names] == [20, 4, 9, 12, 5, 3] and samples["state_recomputed_tokens_total"] == 700
    found = {metric.name: metric for metric in engine_metrics(llm.stats, 0, "m")}
    assert found["octavo:state_recomputed_tokens"] == Counter("octavo:state_recomputed_tokens", {"model_name": "m", "engine": "0"}, 700)
    assert isinstance(found["octavo:state_slots"], Gauge) and found.keys().isdisjoint({"octavo:state_slots_total"})
    assert not any(":state_" in metric.name for metric in engine_metrics(StandInLLM().stats, 0, "m"))
    later = llm.stats.after(replace(llm.stats, state_slots=20, held_states=20))
    assert (later.state_slots, later.held_states, later.checkpoints, later.checkpoints_kept) == (20, 4, 9, 24)


# promise: metrics
def test_an_engine_that_was_never_ready_has_metrics_too() -> None:
    for state in ("loading", "dead"):
        llm = StandInLLM(state=state)  # type: ignore[arg-type]
        llm.facts = None  # type: ignore[assignment]
        samples = scraped(llm)
        assert samples["engine_ready"] == 0 and samples["engine_restarts_total"] == 0


OBSERVED = st.lists(st.tuples(st.integers(0, 2), st.one_of(st.sampled_from(SECONDS), st.floats(0, 3000)), st.integers(1, 4)), max_size=30)


# promise: histograms-time-first, several-api-processes
@settings(max_examples=30, deadline=None)
@given(OBSERVED)
def test_processes_together_tell_what_prometheus_own_histogram_would(observed: list[tuple[int, float, int]]) -> None:
    shared = shared_file()
    rows = [Numbers(shared, row, 3) for row in range(3)]
    registry = CollectorRegistry()
    theirs = Histogram("e2e_request_latency_seconds", "", buckets=SECONDS, registry=registry)
    for row, value, times in observed:
        rows[row].e2e_latency.observe(value, times)
        rows[row].request_success.add(times, "stop")
        for _ in range(times):
            theirs.observe(value)
    rows[1] = Numbers(shared, 1, 3)  # started again
    expected = {(s.name, s.labels.get("le")): s.value for f in registry.collect() for s in f.samples if not s.name.endswith("_created")}
    for numbers in rows:
        families = {family.name: family for family in numbers.families("", {})}
        found = {(s.name, s.labels.get("le")): s.value for s in families["e2e_request_latency_seconds"].samples}
        assert found == pytest.approx(expected)
        assert families["request_success"].samples[0].value == sum(times for _, _, times in observed)
    assert os.fstat(shared).st_mode & 0o077 == 0 and os.fstat(shared).st_nlink == 0 and generate_latest(registry)
    os.close(shared)


def test_tokens_that_come_together_share_the_time_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    observer, now = Observer(), 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    watch = observer.watch("cmpl-", [AddRequest("", [1], SamplingParams())])
    with watch:
        for later, count in ((1.0, 2), (0.25, 1), (4.0, 4)):
            now += later
            watch.take([TextDelta("r", 0, "", [7] * count)])
    found = family_of(observer.numbers, "inter_token_latency_seconds")
    assert (found["count", None], found["sum", None]) == (5, 4.25) and (found["bucket", "0.3"], found["bucket", "1.0"]) == (1, 5)


def family_of(numbers: Numbers, name: str) -> dict[tuple[str, str | None], float]:
    family = next(family for family in numbers.families("", {}) if family.name == name)
    return {(sample.name.rpartition("_")[2], sample.labels.get("le")): sample.value for sample in family.samples}


def test_lag_is_what_a_tick_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    observer, now = Observer(), 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    for late in (0.0, 0.0, 0.04, 2.0):
        now += TICK_SECONDS + late
        observer.tick()
    values = family_of(observer.numbers, "event_loop_lag_seconds")
    assert values["count", None] == 3 and values["sum", None] == pytest.approx(2.04) and values["bucket", "0.05"] == 2
