"""GET /metrics: the family of names that vLLM's dashboards know, and some of our own, as text for Prometheus.

What the server counts itself comes from `numbers.py`; gauges, and what the scheduler counts, from the engine's last word. After an
engine was started again its counters begin at 0, which Prometheus takes for what it is.
"""

from collections.abc import Iterable, Iterator

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from octavo import __version__
from octavo.messages import STEP_TOKENS
from octavo.server.numbers import histogram_family
from octavo.server.state import Server


class Exposition(Collector):
    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        prefix = self._server.config.metrics_prefix
        labels = {"model_name": self._server.model_name, "engine": "0"}
        yield from self._server.observer.numbers.families(prefix, labels)
        yield from self._engine(prefix, labels)
        version = GaugeMetricFamily(f"{prefix}build_info", "Which Octavo this is.", labels=[*labels, "version"])
        version.add_metric([*labels.values(), __version__], 1)
        yield version

    def _engine(self, prefix: str, labels: dict[str, str]) -> Iterator[Metric]:
        llm = self._server.llm
        facts = getattr(llm, "facts", None)  # known once it was ready
        stats, blocks = llm.stats, max(1, llm.stats.num_blocks - 1)  # block 0 is the null block
        in_use = (blocks - stats.free_blocks) / blocks if stats.num_blocks else 0.0
        gauges = (
            ("num_requests_running", "Sequences in the steps of the engine.", stats.running),
            ("num_requests_waiting", "Sequences that wait for room.", stats.waiting),
            ("kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", in_use),
            ("engine_ready", "1 while requests are served.", int(self._server.state == "ready")),
        )
        counters = (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            ("prefix_cache_hits", "Of these, found.", stats.prefix_hits),
            ("num_preemptions", "Sequences that had to give their blocks back.", stats.preemptions),
            ("engine_restarts", "Engines that died and were replaced.", facts.epoch - 1 if facts else 0),
        )
        for family, members in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, told, value in members:
                metric = family(prefix + name, told, labels=[*labels])
                metric.add_metric([*labels.values()], value)
                yield metric
        told = "Tokens that a step computed."
        yield histogram_family(f"{prefix}iteration_tokens_total", told, labels, STEP_TOKENS, stats.steps, stats.step_tokens)


def router(server: Server) -> APIRouter:
    routes = APIRouter()
    registry = CollectorRegistry()
    registry.register(Exposition(server))

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return routes
