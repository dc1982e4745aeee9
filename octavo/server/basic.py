"""Routes about the server itself: /health, /v1/models, /version; and for the admin, /reset_prefix_cache."""

from fastapi import APIRouter
from starlette.responses import JSONResponse

from octavo import __version__
from octavo.server.errors import ApiError
from octavo.server.state import Server


def router(server: Server) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> JSONResponse:
        """200 while requests are served, else 503 (loading, draining, dead)."""
        return JSONResponse({"status": server.state}, 200 if server.state == "ready" else 503)

    @routes.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @routes.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [_model(server)]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, object]:
        check_model(server, name)
        return _model(server)

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


def _model(server: Server) -> dict[str, object]:
    return {
        "id": server.model_name,
        "object": "model",
        "created": server.created,
        "owned_by": "octavo",
        "max_model_len": server.llm.facts.limits.max_model_len,
    }
