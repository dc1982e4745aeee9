"""Turns token deltas into text: detokenising, stop strings, usage. Stop strings are found here and nowhere else.

    held back:  "...the end\nUs"     stop "\nUser": the tail "\nUs" may become a match, so it is not output yet
    matched:    the text is cut before the match, usage counts up to the token that completed it, and the engine aborts the sample
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from octavo.config import EngineConfig
from octavo.errors import RequestError
from octavo.messages import AddRequest, Delta, LifeRecord, PromptPiece, TokenLogprobs
from octavo.outputs import CompletionOutput, Logprob, RequestOutput, TextDelta, TokenChoices
from octavo.sampling_params import SamplingParams
from octavo.text.detokenizer import IncrementalDetokenizer, StopSearch, StopStrings, shown_tail
from octavo.text.tokenizer import Tokenizer


class Reader(Protocol):
    """The reader of one request, or of several."""

    def push(self, delta: TextDelta) -> None: ...

    def finish(self, output: RequestOutput) -> None:
        """Takes the whole output. No further output of this request follows."""


class OutputProcessor:
    """Passes the engine's deltas to the readers of its requests, as text, and aborts samples that ended in a stop string."""

    def __init__(self, tokenizer: Tokenizer | None, abort: Callable[[str, int], object], keep_logprobs: bool = True) -> None:
        """Without `keep_logprobs`, only deltas have logprobs, and the reader decodes their ids."""
        self._tokenizer = tokenizer
        self._abort = abort
        self._keep_logprobs = keep_logprobs
        self._requests: dict[str, _RequestState] = {}

    def add(self, request: AddRequest, prompt: str | None, reader: Reader) -> None:
        self._requests[request.request_id] = _RequestState(request, prompt, reader, self._tokenizer, self._keep_logprobs)

    def drop(self, request_id: str) -> None:
        """Forgets a request whose output is no longer wanted, and its reader."""
        self._requests.pop(request_id, None)

    def open_outputs(self, request_id: str) -> dict[int, list[int]]:
        """Returns the tokens so far of each sample that has not ended."""
        outputs = [sample.output for sample in self._requests[request_id].samples]
        return {output.index: output.token_ids.copy() for output in outputs if output.finish_reason is None}

    def process(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            state = self._requests.get(delta.request_id)
            if state is None:
                continue
            if delta.prompt_logprobs is not None:
                state.add_prompt_logprobs(delta.prompt_logprobs)
                continue
            state.life = delta.life or state.life
            sample = state.samples[delta.index]
            if sample.output.finish_reason is not None:
                continue  # it matched a stop string before the engine was informed
            update = sample.take(delta)
            if delta.life or update.finish_reason is not None:
                update.life = state.life
            if state.prompt_logprobs_due and delta.token_ids:  # a token follows the whole prompt
                update.prompt_logprobs, state.prompt_logprobs_due = state.prompt_logprobs, False
            if update.finish_reason is not None and delta.finish_reason is None:
                self._abort(delta.request_id, delta.index)
            state.reader.push(update)
            if update.finish_reason is not None and state.finished:
                del self._requests[delta.request_id]
                if state.life.finished is None:  # a stop string was found here; all processes share this clock
                    state.life.finished = time.monotonic()
                state.reader.finish(state.output())


class _RequestState:
    def __init__(self, request: AddRequest, prompt: str | None, reader: Reader, tokenizer: Tokenizer | None, keep_logprobs: bool) -> None:
        self.request = request
        self.prompt = prompt
        self.reader = reader
        self.tokenizer = tokenizer
        self.life = LifeRecord(0.0)
        self.prompt_logprobs: list[TokenChoices | None] | None = None
        if request.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(request.prompt_token_ids)
        self.prompt_logprobs_due = self.prompt_logprobs is not None
        stops = StopStrings(request.params.stop)
        tail = [] if tokenizer is None else shown_tail(tokenizer, request.prompt_token_ids)
        self.samples = [_Sample(index, request, tokenizer, stops, tail, keep_logprobs) for index in range(request.params.n)]

    @property
    def finished(self) -> bool:
        return all(sample.output.finish_reason is not None for sample in self.samples)

    def add_prompt_logprobs(self, piece: PromptPiece) -> None:
        """Adds a piece of prompt logprobs. A piece may come twice, because a preempted prompt is computed again."""
        start, found = piece
        assert self.prompt_logprobs is not None
        for position, logprobs in enumerate(found, start):
            self.prompt_logprobs[position] = _choices(self.request.prompt_token_ids[position], logprobs, self.tokenizer)

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=[sample.output for sample in self.samples],
            finished=self.finished,
            num_cached_tokens=self.life.cached_tokens,
            metrics=self.life,
        )


class _Sample:
    """The text of one sample so far."""

    def __init__(
        self, index: int, request: AddRequest, tokenizer: Tokenizer | None, stops: StopStrings, tail: list[int], keep_logprobs: bool
    ) -> None:
        """`tail`: the end of the prompt (`shown_tail`), computed once for all samples."""
        self.request_id = request.request_id
        self.search = StopSearch(stops) if stops.texts else None
        self.tokenizer = tokenizer
        self.params = request.params
        self.detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and request.params.detokenize:
            self.detokenizer = IncrementalDetokenizer(tokenizer, tail, request.params.skip_special_tokens)
        self.output = CompletionOutput(index)
        if request.params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
        self.keep_logprobs = keep_logprobs
        self.shown = 0  # characters already output
        self.error: str | None = None
        self.code: str | None = None

    def take(self, delta: Delta) -> TextDelta:
        """Appends a delta's tokens, up to the one that completes a stop string. Returns what is new."""
        self.error, self.code = delta.error, delta.code
        before = len(self.output.token_ids)
        for position, token in enumerate(delta.token_ids):
            last = position == len(delta.token_ids) - 1
            # an end id counts as usage, but it becomes text only on request
            ends_here = last and delta.finish_reason == "stop" and not self.params.include_stop_str_in_output
            self.output.token_ids.append(token)
            if delta.logprobs is not None and self.keep_logprobs:
                self._add_logprobs(token, delta.logprobs[position])
            if self.detokenizer is not None and not ends_here and self._add_text(self.detokenizer.push([token])):
                return self._update(before, delta.logprobs)
        if delta.finish_reason is not None:
            self.output.finish_reason = delta.finish_reason
            self.output.stop_reason = delta.stop_reason if delta.error is None else delta.error
            if self.detokenizer is not None:
                self._add_text(self.detokenizer.flush())
        return self._update(before, delta.logprobs)

    def _update(self, before: int, found: list[TokenLogprobs] | None) -> TextDelta:
        output = self.output
        end = len(output.text)
        if self.search is not None and output.finish_reason is None:
            end -= self.search.held_back
        text, self.shown = output.text[self.shown : end], max(self.shown, end)
        kind = TextDelta if self.keep_logprobs or output.logprobs is None else UnspelledDelta
        update = kind(self.request_id, output.index, text, output.token_ids[before:], output.finish_reason, output.stop_reason)
        if isinstance(update, UnspelledDelta):
            update.found = (found or [])[: len(update.token_ids)]
        elif output.logprobs is not None:
            update.logprobs = output.logprobs[before:]
        if output.finish_reason == "error":
            update.error, update.code = self.error, self.code
        return update

    def _add_text(self, text: str) -> bool:
        """Returns whether the text now contains a stop string; if so, cuts the text there and finishes the sample."""
        output = self.output
        output.text += text
        if self.search is None:
            return False
        if len(output.token_ids) <= self.params.min_tokens:  # no match may begin within these tokens
            self.search.skip(text)
            return False
        found = self.search.push(text)
        if found is None:
            return False
        place, stop = found
        output.text = output.text[: place + len(stop) if self.params.include_stop_str_in_output else place]
        output.finish_reason, output.stop_reason = "stop", stop
        return True

    def _add_logprobs(self, token: int, found: TokenLogprobs) -> None:
        assert self.output.logprobs is not None and self.output.cumulative_logprob is not None
        self.output.logprobs.append(_choices(token, found, self.tokenizer))
        self.output.cumulative_logprob += found.logprob


def _choices(token: int, found: TokenLogprobs, tokenizer: Tokenizer | None) -> TokenChoices:
    """Returns the sampled token, then the best alternatives."""
    choices = {token: _logprob(token, found.logprob, found.rank, tokenizer)}
    for rank, (other, logprob) in enumerate(zip(found.top_ids, found.top_logprobs, strict=True), start=1):
        choices.setdefault(other, _logprob(other, logprob, rank, tokenizer))
    return choices


def _logprob(token: int, logprob: float, rank: int, tokenizer: Tokenizer | None) -> Logprob:
    text = None if tokenizer is None else tokenizer.token_bytes(token).decode("utf-8", "replace")
    return Logprob(logprob, rank, text)


@dataclass(slots=True)
class UnspelledDelta(TextDelta):
    """A delta whose logprobs are still ids."""

    found: list[TokenLogprobs] = field(default_factory=list)

    def spell(self, tokenizer: Tokenizer | None) -> None:
        self.logprobs = [_choices(token, logprobs, tokenizer) for token, logprobs in zip(self.token_ids, self.found, strict=True)]


def check_params(params: SamplingParams, config: EngineConfig) -> None:
    """Refuses parameters that the text side cannot answer. The engine checks the others (`check_request`)."""
    for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if value is not None and value > config.max_logprobs:
            raise RequestError(f"{name} is {value}, max_logprobs is {config.max_logprobs}", name)
    if params.stop and config.skip_tokenizer_init:
        raise RequestError("stop strings need a tokenizer, and skip_tokenizer_init is set; use stop_token_ids", "stop")
