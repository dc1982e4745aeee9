"""Routes about the server itself.

    /health, /version, /v1/models    whether it serves requests, which version of Octavo it is, and which model it has
    /metrics                         its counters, under the names that vLLM's dashboards know, as text for Prometheus
    /v1/requests/{id}                the record of a request, for the client that sent it and clients that may read text (guard.py)
    /v1/view                         the state of an engine, as lines of JSON while the client reads (docs/view.md)
    /reset_prefix_cache              for the admin
    /admin/restart                   replaces all engines, if there are several, one after the other; for the admin
"""

from collections.abc import Iterable

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse, Response

from octavo import __version__
from octavo.errors import UnavailableError
from octavo.inspector.hub import ViewHub
from octavo.sampling_params import SamplingParams
from octavo.server.body import check_model
from octavo.server.errors import ApiError
from octavo.server.generation import EventStream
from octavo.server.metrics import engine_families
from octavo.server.records import current_arrival
from octavo.server.state import Server

# Defaults of a chat request that /v1/models shows. `max_tokens` null: the rest of the context.
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")


def router(server: Server) -> APIRouter:
    routes = APIRouter()
    _add_basic(routes, server)
    _add_observed(routes, server)
    return routes


def _add_basic(routes: APIRouter, server: Server) -> None:
    system_prompt = server.llm.encoder.default_system_prompt()  # found now, because a template may take long

    @routes.get("/health")
    async def health() -> JSONResponse:
        """Answers 200 while requests are served, else 503 (loading, draining, dead). Of several engines one is enough."""
        engines = server.llm.replicas
        ready = sum(engine.state == "ready" for engine in engines)
        several = {"engines": {"ready": ready, "all": len(engines)}} if len(engines) > 1 else {}
        return JSONResponse({"status": server.state, **several}, 200 if server.state == "ready" else 503)

    @routes.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @routes.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [_model(server, system_prompt)]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, object]:
        check_model(server, name)
        return _model(server, system_prompt)

    if server.config.admin_key is not None:

        @routes.post("/reset_prefix_cache")
        async def reset_prefix_cache() -> dict[str, str]:
            await server.llm.reset_prefix_cache()
            return {"status": "ok"}

        @routes.post("/admin/restart")
        async def restart() -> JSONResponse:
            """Has all engines replaced, one after the other. The answer comes at once; /health tells how many are ready."""
            count = server.config.data_parallel_size
            if count < 2:
                raise ApiError(400, "one engine serves, and nothing would serve while it is replaced (--data-parallel-size)")
            if server.engines_to_replace:
                raise ApiError(409, "the engines are being replaced already", code="restarting")
            server.observer.numbers.restarts_asked.add()
            return JSONResponse({"status": "restarting", "engines": count}, 202)


def _add_observed(routes: APIRouter, server: Server) -> None:
    registry = CollectorRegistry()
    registry.register(_Metrics(server))

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/v1/requests/{id}")
    async def request_record(id: str) -> dict[str, object]:
        record = server.observer.records.get(id)
        if record is None or not current_arrival().caller.may_read(record.arrival.caller):
            raise ApiError(404, "there is no record with this id, or it is no longer kept", param="id", code="request_not_found")
        return record.to_dict()

    if server.config.inspector:

        @routes.get("/v1/view")
        async def view(engine: str = "0") -> Response:
            if server.state != "ready":
                raise UnavailableError(f"the engine is {server.state}", retry_after=1)
            lines = _chosen_view(server, engine).lines(with_text=current_arrival().caller.reads_text)
            return EventStream(lines, "application/x-ndjson")


def _chosen_view(server: Server, number: str) -> ViewHub:
    """Returns the view of the engine with this number. Raises if there is no such engine, or if it cannot be watched now."""
    engines = server.llm.replicas
    if number not in map(str, range(len(engines))):
        known = f"they are numbered from 0 to {len(engines) - 1}" if len(engines) > 1 else "this server has one engine, number 0"
        raise ApiError(400, f"there is no engine {number!r:.40}; {known}", param="engine")
    engine = engines[int(number)]
    if engine.state in ("loading", "dead"):
        ready = sum(other.state == "ready" for other in engines)
        raise UnavailableError(f"engine {number} is {engine.state}, {ready} of {len(engines)} engines are ready", retry_after=1)
    return server.views[int(number)]


def _model(server: Server, system_prompt: str | None) -> dict[str, object]:
    defaults = SamplingParams().with_defaults(server.llm.sampling_defaults).for_chat()
    return {
        "id": server.model_name,
        "object": "model",
        "created": server.created,
        "owned_by": "octavo",
        "max_model_len": server.llm.facts.limits.max_model_len,
        "demo": server.llm.is_default_model,
        "defaults": {**{name: getattr(defaults, name) for name in DEFAULTS}, "system_prompt": system_prompt},
    }


class _Metrics(Collector):
    """Makes the families of all metrics when /metrics is read."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterable[Metric]:
        server, prefix = self._server, self._server.config.metrics_prefix
        model, engines = {"model_name": server.model_name}, server.llm.replicas
        labels = {**model, "engine": "0" if len(engines) < 2 else "all"}
        yield from server.observer.numbers.families(prefix, labels)
        yield from engine_families(prefix, model, engines)
        version = GaugeMetricFamily(f"{prefix}build_info", "Which Octavo this is.", labels=[*labels, "version"])
        version.add_metric([*labels.values(), __version__], 1)
        yield version
