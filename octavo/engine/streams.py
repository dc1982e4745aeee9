"""`Stream`: what the engine has to say to one reader. News wait here until they are read; a slow reader gets them merged."""

import asyncio
from collections.abc import Iterable

from octavo.errors import EngineError, OctavoError, RequestError, UnavailableError
from octavo.outputs import RequestOutput, TextDelta


class Stream:
    __slots__ = ("_error", "_finished", "_loop", "_news", "_waiter", "label", "request_id", "timer")

    def __init__(self, request_id: str, label: str = "") -> None:
        self.request_id = request_id
        self.label = label
        self.timer: asyncio.TimerHandle | None = None  # of its deadline
        self._loop = asyncio.get_running_loop()
        self._news: list[TextDelta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._finished = False
        self._error: OctavoError | None = None

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return self._finished or self._error is not None

    def push(self, delta: TextDelta) -> None:
        if delta.finish_reason == "error":
            self.fail(error_of(delta))
            return
        self._news.append(delta)
        self._wake()

    def finish(self, output: RequestOutput) -> None:
        self._finished = True
        self._wake()

    def fail(self, error: OctavoError) -> None:
        """What came before is read first."""
        self._error = self._error or error
        self._wake()

    async def take(self) -> list[TextDelta]:
        """News, as soon as there are any; none at the end."""
        while not (self._news or self.over):
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        news, self._news = self._news, []
        if not news and self._error is not None:
            raise self._error
        return news if len(news) < 2 else merged(news)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def error_of(delta: TextDelta) -> OctavoError:
    message = delta.error or "the engine failed"
    if delta.code in ("queue_timeout", "grammar_busy"):
        return UnavailableError(message, retry_after=1, code=delta.code)
    if delta.code == "grammar_error":
        return RequestError(message, "structured_outputs", delta.code)
    return EngineError(message, delta.code)


def merged(news: Iterable[TextDelta]) -> list[TextDelta]:
    """One delta for each sample, in the order in which they began."""
    by_sample: dict[int, list[TextDelta]] = {}
    for delta in news:
        by_sample.setdefault(delta.index, []).append(delta)
    return [parts[0] if len(parts) == 1 else _joined(parts) for parts in by_sample.values()]


def _joined(parts: list[TextDelta]) -> TextDelta:
    last = parts[-1]
    lives = [part.life for part in parts if part.life is not None]
    prompts = [part.prompt_logprobs for part in parts if part.prompt_logprobs is not None]
    return TextDelta(
        request_id=last.request_id,
        index=last.index,
        text="".join([part.text for part in parts]),
        token_ids=[token for part in parts for token in part.token_ids],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        life=lives[-1] if lives else None,
        logprobs=None if last.logprobs is None else [choices for part in parts for choices in part.logprobs or ()],
        prompt_logprobs=prompts[0] if prompts else None,
        error=last.error,
        code=last.code,
    )
