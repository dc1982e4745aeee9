"""Routes about the server itself: /health, /v1/models, /version; and for the admin, /reset_prefix_cache."""

from fastapi import APIRouter
from starlette.responses import JSONResponse

from octavo import __version__
from octavo.sampling_params import SamplingParams
from octavo.server.errors import ApiError
from octavo.server.state import Server

# What a chat request gets where it does not say otherwise; `max_tokens` null: the rest of the context.
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")


def router(server: Server) -> APIRouter:
    routes = APIRouter()
    system_prompt = server.llm.encoder.default_system_prompt()  # before anybody waits: a template may take its time

    @routes.get("/health")
    async def health() -> JSONResponse:
        """200 while requests are served, else 503 (loading, draining, dead)."""
        return JSONResponse({"status": server.state}, 200 if server.state == "ready" else 503)

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

    return routes


def check_model(server: Server, name: str | None) -> None:
    """A request may leave out the model, or give its name."""
    if name is not None and name != server.model_name:
        message = f"the model {name[:100]!r} does not exist; this server has {server.model_name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _model(server: Server, system_prompt: str | None) -> dict[str, object]:
    defaults = SamplingParams().with_defaults(server.llm.sampling_defaults).for_chat()
    return {
        "id": server.model_name,
        "object": "model",
        "created": server.created,
        "owned_by": "octavo",
        "max_model_len": server.llm.facts.limits.max_model_len,
        "defaults": {**{name: getattr(defaults, name) for name in DEFAULTS}, "system_prompt": system_prompt},
    }
