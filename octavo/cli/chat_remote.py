"""Answers of a running server: the same conversation over /v1/chat/completions."""

import asyncio
from collections.abc import Generator, Mapping
from typing import Any

from octavo.cli.chat_session import AnswerStats
from octavo.client.api import RemoteModel, RemoteServer
from octavo.text.prompt import Message
from octavo.text.reasoning import Piece


class RemoteAnswers:
    """Waits in the runner's loop, piece by piece, so that Ctrl-C ends the wait and with it the connection."""

    def __init__(self, runner: asyncio.Runner, server: RemoteServer, model: RemoteModel, sampling: Mapping[str, object]) -> None:
        """`sampling`: what the user set, under the names it has in a request; the rest is the server's choice."""
        self.model_name = model.name
        self.max_model_len = model.max_model_len
        self._runner = runner
        self._server = server
        self._settings = {"model": model.name, "stream_options": {"include_usage": True}, "include_timings": True, **sampling}

    def answer(self, messages: list[Message], is_last_try: bool, stats: AnswerStats) -> Generator[Piece, None, None]:
        came: asyncio.Queue[Piece | None] = asyncio.Queue()

        def take(_now: float, event: dict[str, Any]) -> None:
            _note(stats, event)
            for piece in _pieces(event):
                came.put_nowait(piece)

        async def ask() -> None:
            try:
                await self._server.stream("/v1/chat/completions", {**self._settings, "messages": messages}, take)
            finally:
                came.put_nowait(None)

        asking, kind = self._runner.get_loop().create_task(ask()), "content"
        try:
            while (piece := self._runner.run(came.get())) is not None:
                if kind == "reasoning" and piece.kind == "content":
                    yield Piece("tag", "\n\n")  # the server has taken away what stood between
                kind = piece.kind
                yield piece
            self._runner.run(_result(asking))
        finally:
            asking.cancel()
            self._runner.run(_ended(asking))


async def _result(task: "asyncio.Task[None]") -> None:
    await task


async def _ended(task: "asyncio.Task[None]") -> None:
    await asyncio.gather(task, return_exceptions=True)


def _pieces(event: dict[str, Any]) -> list[Piece]:
    pieces = []
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if thought := delta.get("reasoning_content"):
            pieces.append(Piece("reasoning", thought))
        if text := delta.get("content"):
            pieces.append(Piece("content", text))
    return pieces


def _note(stats: AnswerStats, event: dict[str, Any]) -> None:
    """A piece counts as a token until the server says how many there were."""
    if pieces := _pieces(event):
        stats.note(len(pieces))
    if usage := event.get("usage"):
        stats.prompt_tokens, stats.tokens = usage.get("prompt_tokens"), usage.get("completion_tokens", stats.tokens)
        stats.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if timings := event.get("timings"):
        stats.hit_reason = timings.get("hit_reason")
        spans = ", ".join(f"{name} {timings[f'{name}_ms']:.0f} ms" for name in ("queue", "prefill", "decode") if f"{name}_ms" in timings)
        stats.work = f"server  {spans}"
