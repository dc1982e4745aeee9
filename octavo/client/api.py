"""`RemoteServer` asks a server with OpenAI's API: for its models, for JSON, for streams of events, and for Octavo's own view."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.client.http import Address, EventLines, HttpClient, Lines, Reply
from octavo.errors import RemoteError

NAMED = 5  # models that an error names
PATIENCE = 30.0  # seconds to wait for an answer that needs no model
MOST_CHARS = 300  # that an error quotes of a server


@dataclass(frozen=True, slots=True)
class RemoteModel:
    name: str
    max_model_len: int | None  # None if the server does not say, as OpenAI's own


class RemoteServer:
    """A server at an address. What goes wrong is raised as RemoteError."""

    def __init__(self, address: Address, key: str | None) -> None:
        self.address = address
        self._http = HttpClient(address, key)

    async def model(self, wanted: str | None) -> RemoteModel:
        """Returns the model with this name. Without a name, it returns the only model of the server."""
        try:
            found = await self._json("GET", "/v1/models")
            models = {str(model["id"]): model.get("max_model_len") for model in found["data"]}
        except (TypeError, KeyError, AttributeError) as error:
            raise self._no_api("/v1/models") from error
        except RemoteError as error:
            raise self._no_api("/v1/models") if error.status == 404 else error from error.__cause__
        names = ", ".join(list(models)[:NAMED]) + (", ..." if len(models) > NAMED else "")
        if wanted is None and len(models) != 1:
            raise RemoteError(f"{self.address} serves {len(models)} models; choose one with --model: {names}")
        name = next(iter(models)) if wanted is None else wanted
        if name not in models:
            raise RemoteError(f"there is no model {name!r:.100} at {self.address}, only {names}", 404, "model_not_found")
        longest = models[name]
        return RemoteModel(name, longest if type(longest) is int else None)

    async def post(self, path: str, body: dict[str, object]) -> Any:
        return await self._json("POST", path, body)

    async def stream(self, path: str, body: bytes, take: Callable[[float, dict[str, Any]], None]) -> None:
        """Calls `take` with each event and the time it came, until [DONE]. An error is raised, whether it is a status or an event.

        `body`: see `stream_body`
        """
        lines, refusal, ended = EventLines(), bytearray(), False

        def sink(now: float, reply: Reply, new: bytes) -> None:
            nonlocal ended
            if reply.status != 200:
                refusal.extend(new)
                return
            for data in lines.feed(new):
                if data == b"[DONE]":
                    ended = True
                    continue
                event = self._parsed(data, path)
                if not isinstance(event, dict):
                    raise self._no_api(path)
                if "error" in event:
                    raise self._failure(reply.status, event)
                try:
                    take(now, event)
                except (TypeError, KeyError, AttributeError, ValueError) as error:  # the event does not have the fields it should have
                    raise self._no_api(path) from error

        reply = await self._http.send("POST", path, body, sink)
        if reply.status != 200:
            raise self._failure(reply.status, _read(bytes(refusal)))
        if not ended:
            raise self._no_api(path)

    async def follow(self, path: str, take: Callable[[dict[str, Any]], None]) -> None:
        """Calls `take` with each object of a stream of JSON lines, until the stream ends.

        If it is not such a stream, the error has status 200, so that it is told from a server that is gone.
        """
        lines, refusal = Lines(), bytearray()

        def sink(_now: float, reply: Reply, new: bytes) -> None:
            if reply.status != 200:
                refusal.extend(new)
                return
            try:
                for data in lines.feed(new):
                    take(json.loads(data))
            except (TypeError, LookupError, AttributeError, ValueError, RecursionError) as error:
                raise RemoteError(f"the server at {self.address} does not answer {path} as Octavo does", 200) from error

        reply = await self._http.send("GET", path, b"", sink)
        if reply.status != 200:
            raise self._failure(reply.status, _read(bytes(refusal)))

    async def ready_engines(self) -> tuple[int, int] | None:
        """Returns how many engines of the server are ready and how many it has. Returns None if it does not say."""
        try:
            engines = (await self._json("GET", "/health", fails=(503,)))["engines"]
            return int(engines["ready"]), int(engines["all"])
        except (RemoteError, TypeError, LookupError, ValueError):
            return None

    def close(self) -> None:
        self._http.close()

    async def _json(self, method: str, path: str, body: dict[str, object] | None = None, fails: tuple[int, ...] = ()) -> Any:
        """`fails`: statuses of a failure whose answer is wanted, too"""
        found = bytearray()
        data = b"" if body is None else _dumped(body)
        try:
            async with asyncio.timeout(PATIENCE):
                reply = await self._http.send(method, path, data, lambda _now, _reply, new: found.extend(new))
        except TimeoutError as error:
            raise RemoteError(f"{self.address} does not answer {path} within {PATIENCE:.0f} seconds") from error
        if reply.status != 200 and reply.status not in fails:
            raise self._failure(reply.status, _read(bytes(found)))
        return self._parsed(bytes(found), path)

    def _parsed(self, data: bytes, path: str) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self._no_api(path) from error

    def _no_api(self, path: str) -> RemoteError:
        return RemoteError(f"the server at {self.address} does not answer {path} as OpenAI's API does")

    def _failure(self, status: int, body: Any) -> RemoteError:
        error = body.get("error") if isinstance(body, dict) else None
        known = error if isinstance(error, dict) else {}
        message = str(known.get("message") or error or "no reason given")[:MOST_CHARS]
        help_ = "; give its key with --api-key or OCTAVO_API_KEY" if status == 401 else ""
        code = known.get("code")
        return RemoteError(f"{self.address} answers {status}: {message}{help_}", status, code if isinstance(code, str) else None)


def stream_body(body: Mapping[str, object]) -> bytes:
    """Returns the body as JSON. It asks the server for events."""
    return _dumped({**body, "stream": True})


def _dumped(body: dict[str, object]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _read(data: bytes) -> Any:
    """Returns the JSON in a refusal, or None if it is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
