"""Observes requests, for metrics, records and spans. One object watches one request:

    watch = server.observer.watch("cmpl-", requests)     watch.id is the id of the answer
    with watch:                                          an exception that leaves the block says how the request ended
        async for deltas in ...:
            watch.take(deltas)                           updates of all prompts; the index of a delta is prompt * n + sample
"""

import time
from asyncio import CancelledError
from collections.abc import Sequence
from secrets import token_hex
from types import TracebackType

from octavo.errors import DeadlineError, OverloadError, RequestError
from octavo.messages import AddRequest, FinishReason
from octavo.outputs import TextDelta
from octavo.server.access import current_arrival
from octavo.server.metrics import FAILURES, STATUSES, Numbers
from octavo.server.records import NoSpans, Prompt, Record, Records, Sample, Spans

TICK_SECONDS = 0.1  # between two calls of `tick`


class Observer:
    def __init__(self, numbers: Numbers | None = None, spans: Spans | None = None) -> None:
        self.numbers = numbers or Numbers()
        self.records = Records()
        self.spans: Spans = spans or NoSpans()
        self._ticked = 0.0

    def watch(self, prefix: str, requests: Sequence[AddRequest]) -> "Watch":
        """Returns the watch of a new request. Its id is `prefix` and 128 random bits, so that the id of a record cannot be guessed."""
        n = requests[0].params.n
        prompts = [Prompt(len(request.prompt_token_ids), n) for request in requests]
        record = Record(prefix + token_hex(16), current_arrival(), n, prompts, [Sample(prompt) for prompt in prompts for _ in range(n)])
        return Watch(record, self)

    def answered(self, status: int) -> None:
        known = str(status or 499)  # 0: the client left before there was an answer
        self.numbers.http_responses.add(1, known if known in STATUSES else "other")

    def tick(self) -> None:
        """Notes that this process is alive, and how late the call came. Called every TICK_SECONDS, later if the event loop is busy."""
        self.numbers.beat()
        now = time.monotonic()
        if self._ticked:
            self.numbers.loop_lag.observe(max(0.0, now - self._ticked - TICK_SECONDS))
        self._ticked = now


class Watch:
    """Watches one request from its start to its end."""

    __slots__ = ("_numbers", "_observer", "_record")

    def __init__(self, record: Record, observer: Observer) -> None:
        self._record = record
        self._observer = observer
        self._numbers = observer.numbers

    @property
    def id(self) -> str:
        return self._record.id

    def __enter__(self) -> None:
        self._observer.records.add(self._record)

    def take(self, updates: Sequence[TextDelta]) -> None:
        now, samples = time.monotonic(), self._record.samples
        for delta in updates:
            sample = samples[delta.index]
            if delta.life is not None:
                sample.prompt.life = delta.life
            if count := len(delta.token_ids):
                self._numbers.generation_tokens.add(count)
                if sample.last_token:  # tokens that come together share the time since the last one
                    self._numbers.inter_token_latency.observe((now - sample.last_token) / count, count)
                elif not sample.prompt.first_token:
                    self._first_token(sample.prompt, now)
                sample.last_token = now
                sample.generated_tokens += count
            if delta.finish_reason is not None:
                self._end_sample(sample, delta.finish_reason, now)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        now, record = time.monotonic(), self._record
        left_early: FinishReason = "abort"  # the client left
        if error is not None and not isinstance(error, GeneratorExit | CancelledError):
            left_early, record.error = "error", reason_of(error)
            self._numbers.request_failures.add(1, record.error)
        for sample in record.samples:
            if sample.finish_reason is None:
                self._end_sample(sample, left_early, now)
        record.finished = now
        self._observer.spans.add(record)

    def _first_token(self, prompt: Prompt, now: float) -> None:
        prompt.first_token = now
        self._numbers.time_to_first_token.observe(now - self._record.arrival.at)
        self._numbers.prompt_tokens.add(prompt.prompt_tokens)

    def _end_sample(self, sample: Sample, reason: FinishReason, now: float) -> None:
        numbers, prompt = self._numbers, sample.prompt
        sample.finish_reason = reason
        numbers.request_success.add(1, reason)
        if reason in ("stop", "length"):
            numbers.request_generation_tokens.observe(sample.generated_tokens)
        prompt.left -= 1
        if not prompt.left:
            prompt.finished = now
            self._end_prompt(prompt, whole=reason in ("stop", "length"))

    def _end_prompt(self, prompt: Prompt, whole: bool) -> None:
        """Counts a prompt. Its times count only if it was completed: a client's patience says nothing about the server."""
        numbers, life = self._numbers, prompt.life
        if life is not None and life.hit_reason is not None:
            numbers.prefix_lookups.add(1, life.hit_reason)
        if not whole:
            return
        numbers.e2e_latency.observe(prompt.finished - self._record.arrival.at)
        numbers.request_prompt_tokens.observe(prompt.prompt_tokens)
        if life is not None and life.first_scheduled is not None and life.first_token is not None:
            numbers.queue_time.observe(life.first_scheduled - life.queued)
            numbers.prefill_time.observe(life.first_token - life.first_scheduled)
            numbers.decode_time.observe((life.finished or prompt.finished) - life.first_token)


def reason_of(error: BaseException) -> str:
    """Returns the reason of a failure, one of FAILURES."""
    if isinstance(error, RequestError):
        return "invalid_request"
    if isinstance(error, OverloadError):
        return "overloaded"
    if isinstance(error, DeadlineError):
        return error.code
    code = vars(error).get("code")
    return code if code in FAILURES else "other"
