"""Grammars of requests: compiled while the request waits, advanced by sampled tokens, and used to mask the next token.

    add      compiles the grammar in a thread; the request is held back meanwhile, and others pass it
    collect  if compiled: the request may run, and each sample gets a matcher. If failed or too late: the request ends with an error
    advance  passes the tokens of an update to the matchers; a text that is complete ends with "stop"
    fill     fills the masks of a plan's rows while its forward runs; a row without a possible next token ends only its own request.
             A row with drafts has a mask after each of them, from a copy of its matcher that is advanced over the drafts

Matchers are state of the host. Preemption does not change them. Samples are forked before their first token, and each starts with a
copy of the compiled grammar, made when the sample's first mask is due. A grammar whose masks take too long fails at the first of
them, for all samples. The frontend (the server's child process, or `LLM`) has already checked the grammar; here it is trusted.
llguidance is loaded only when a request asks for a grammar.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import OctavoError, RequestError
from octavo.grammar.text import grammar_text, need_library
from octavo.messages import Delta, StepPlan
from octavo.policy.request import Request, Sequence, Status
from octavo.policy.scheduler import Scheduler
from octavo.structured_outputs import PARAM, StructuredOutputsParams
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.grammar.guidance import Guide, Matcher

COMPILE_SECONDS = 30.0  # at most, including the vocabulary
CACHE_BYTES = 64 * 2**20
GRAMMAR_BYTES, BYTES_PER_CHAR = 128 * 2**10, 64  # memory of a compiled grammar, estimated from its text
TURN_SECONDS = 0.2  # for the masks of one step; if they would take longer, samples take turns
THREADS = 2  # so that a slow grammar does not hold up all others
STACK_BYTES = 64 * 2**20  # of these threads: the library recurses, and the frontend checked the text with a smaller stack
NAP_SECONDS = 0.01
CODE = "grammar_error"
BUSY = "grammar_busy"  # not the grammar's fault: a retry may succeed


@dataclass(frozen=True, slots=True)
class _Job:
    compiled: "Future[Matcher]"
    due: float  # by the monotonic clock


@dataclass(frozen=True, slots=True)
class _Guided:
    """A request whose grammar is compiled."""

    compiled: "Matcher"
    samples: "dict[int, Matcher]" = field(default_factory=dict)  # index -> matcher of a sample that has begun

    def matcher(self, index: int) -> "Matcher":
        if index not in self.samples:
            self.samples[index] = self.compiled.copy()
        return self.samples[index]


class Grammars:
    def __init__(self, tokenizer: Callable[[], Tokenizer] | None, vocab_size: int, end_ids: Collection[int], late: bool = False) -> None:
        """`tokenizer` is called once, when the first grammar arrives. `late` is for tests: every compilation takes too long."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._late = late
        self._threads = ThreadPoolExecutor(THREADS, "grammar")
        self._guide: Future[Guide] | None = None
        self._cache: OrderedDict[StructuredOutputsParams, Future[Matcher]] = OrderedDict()  # least recently used first
        self._cache_bytes = 0
        self.request_ids: set[str] = set()  # of requests with a grammar; while there are any, each step calls `collect`
        self._jobs: dict[str, _Job] = {}  # request id -> the compilation it waits for
        self._guided: dict[str, _Guided] = {}  # by request id

    def check(self) -> None:
        """Refuses a request with a grammar if it can never be served."""
        if self._tokenizer is None:
            raise RequestError(f"{PARAM} needs a tokenizer, and skip_tokenizer_init is set", PARAM)
        need_library()

    def add(self, request: Request) -> None:
        """Adds a checked request. If it has a grammar, the request is held back until the grammar is compiled."""
        self._forget([request.request_id])  # of an earlier request with the same id
        if request.params.structured_outputs is None:
            return
        request.held = True
        self.request_ids.add(request.request_id)
        compiled = self._compiled(request.params.structured_outputs)
        self._jobs[request.request_id] = _Job(compiled, time.monotonic() + COMPILE_SECONDS)

    def collect(self, scheduler: Scheduler) -> list[Delta]:
        """Releases requests whose grammar is compiled, ends requests whose grammar failed, and forgets requests that have ended."""
        updates: list[Delta] = []
        self._forget([name for name in self.request_ids if name not in scheduler.requests])
        for name, job in list(self._jobs.items()):
            late = self._late or time.monotonic() > job.due
            if not late and not job.compiled.done():
                continue
            del self._jobs[name]
            error = None if late else job.compiled.exception()
            if late:
                updates += _end_request(scheduler, name, f"{PARAM} took more than {COMPILE_SECONDS:.0f} s to compile", BUSY)
            elif isinstance(error, OctavoError):
                updates += _end_request(scheduler, name, str(error))
            elif error is not None:
                updates += _end_request(scheduler, name, f"{PARAM} could not be compiled: {error!r}", BUSY)
            elif job.compiled.result().failed:  # it failed for an earlier request
                updates += _end_request(scheduler, name, f"{PARAM} cannot be followed: {job.compiled.result().failed}")
            else:
                self._guided[name] = _Guided(job.compiled.result())
                scheduler.requests[name].held = False
                updates += self._catch_up(scheduler, scheduler.requests[name])
        scheduler.mask_turns = self._turns(scheduler)
        return updates

    def _catch_up(self, scheduler: Scheduler, request: Request) -> list[Delta]:
        """Advances the matchers of a request that began in another engine over the tokens it already has."""
        updates: list[Delta] = []
        for seq in request.sequences.copy():
            if seq.num_tokens > request.num_prompt:
                output = Delta(request.request_id, seq.index, list(seq.token_ids[request.num_prompt :]))
                updates += self._advance(scheduler, output, self._guided[request.request_id].matcher(seq.index))
        return updates

    def _turns(self, scheduler: Scheduler) -> int:
        """Returns how many turns the samples with grammars must take, so that no step waits long for its masks."""
        counts = {name: scheduler.requests[name].params.n for name in self._guided if name in scheduler.requests}
        samples = sum(counts.values())
        if not samples:
            return 1
        mean = sum(self._guided[name].compiled.mask_seconds * count for name, count in counts.items()) / samples
        at_once = min(samples, scheduler.limits.max_num_seqs)
        return max(1, min(at_once, ceil(mean * at_once / TURN_SECONDS)))

    def must_wait(self, scheduler: Scheduler) -> bool:
        """Returns whether no request runs and all waiting requests are held back."""
        return bool(self._jobs) and not scheduler.running and all(seq.request.held for seq in scheduler.waiting)

    def nap(self) -> None:
        """Waits until a grammar is compiled, or for a short time."""
        wait([job.compiled for job in self._jobs.values()], NAP_SECONDS, FIRST_COMPLETED)

    def advance(self, scheduler: Scheduler, deltas: list[Delta]) -> list[Delta]:
        """Passes sampled tokens to the matchers. Returns the deltas, followed by the ends of samples whose text is complete."""
        ends: list[Delta] = []
        for delta in deltas if self._guided else ():
            guided = self._guided.get(delta.request_id)
            if guided is not None and delta.token_ids:
                ends += self._advance(scheduler, delta, guided.matcher(delta.index))
        for delta in (*deltas, *ends) if self._guided else ():
            if delta.finish_reason is not None and delta.request_id in self._guided:
                self._guided[delta.request_id].samples.pop(delta.index, None)
        return deltas + ends if ends else deltas

    def _advance(self, scheduler: Scheduler, delta: Delta, matcher: "Matcher") -> list[Delta]:
        tokens = delta.token_ids[:-1] if delta.finish_reason == "stop" else delta.token_ids  # an end id is not text
        count = 0
        while count < len(tokens) and not matcher.ended:
            matcher.advance([tokens[count]])
            count += 1
        is_cut = count < len(tokens)  # tokens sampled after a complete text are dropped
        if is_cut:
            _cut(delta, count)
        if matcher.ended and (delta.finish_reason == "length" or (is_cut and delta.finish_reason == "stop")):  # it was just long enough
            end = replace(delta, token_ids=[], logprobs=None, finish_reason="stop")
            delta.finish_reason = delta.life = None
            return [end]
        request = scheduler.requests.get(delta.request_id)
        seq = next((seq for seq in request.sequences if seq.index == delta.index), None) if request else None
        if seq is None:
            return []
        if matcher.failed:
            return _end_request(scheduler, delta.request_id, f"{PARAM} went wrong: {matcher.failed}")
        return _complete(scheduler, seq) if matcher.ended else []

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.request_ids.discard(name)
            self._jobs.pop(name, None)
            self._guided.pop(name, None)

    def fill(self, scheduler: Scheduler, plan: StepPlan) -> tuple[NDArray[np.int32], list[Delta]]:
        """Returns the masks of the plan's masked rows, [outputs, words], and the ends of rows that have no possible next token.

        The plan must have masked rows. A mask allows nothing after a draft that the grammar does not allow, or where the text cannot go
        on: the draft is not accepted.
        """
        assert self._guide is not None
        guide, running = self._guide.result(), {seq.seq_id: seq for seq in scheduler.running}
        first = [0, *accumulate(plan.outputs[entry] for entry in plan.mask_rows)]
        masks = np.full((first[-1], guide.num_words), -1, np.int32)  # finished rows are unconstrained
        live = [
            (row, masks[row : row + plan.outputs[entry]], seq, [*self._states(seq, plan.drafts.get(entry, ()))])
            for row, entry in zip(first, plan.mask_rows) if (seq := running.get(plan.seq_id[entry])) is not None
        ]  # fmt: skip
        guide.fill([place for row, _, _, matchers in live for place in enumerate(matchers, row)], masks)
        updates: list[Delta] = []
        for _, own, seq, matchers in live:
            own[len(matchers) :] = 0
            if seq.status is not Status.FINISHED:
                for drafts, (matcher, mask) in enumerate(zip(matchers, own)):
                    _bar_ends(scheduler, seq, drafts, mask.view(np.uint32))
                    if matcher.failed:
                        mask[:] = 0
                updates += _judge(scheduler, seq, matchers[0], own[0])
            if seq.status is Status.FINISHED:
                own[:] = -1
        return masks, updates

    def _states(self, seq: Sequence, drafts: Iterable[int]) -> "Iterator[Matcher]":
        """Yields the matcher of a sample, and copies of it after each draft, up to one after which nothing may come."""
        matcher = self._guided[seq.request.request_id].matcher(seq.index)
        yield matcher
        for draft in drafts:
            matcher = matcher.copy()
            matcher.advance([draft])
            if matcher.failed or matcher.ended:
                return
            yield matcher

    def _compiled(self, form: StructuredOutputsParams) -> "Future[Matcher]":
        """Returns the compiled form of a grammar. Equal grammars share one."""
        compiled = self._cache.pop(form, None)
        self._cache_bytes -= 0 if compiled is None else _size(form)
        if compiled is None or _has_failed(compiled):
            compiled = self._compile(form)
        self._cache[form] = compiled
        self._cache_bytes += _size(form)
        while self._cache_bytes > CACHE_BYTES and len(self._cache) > 1:
            self._cache_bytes -= _size(self._cache.popitem(last=False)[0])
        return compiled

    def _compile(self, form: StructuredOutputsParams) -> "Future[Matcher]":
        before = threading.stack_size(STACK_BYTES)  # for threads that start now
        try:
            if self._guide is None or _has_failed(self._guide):
                self._guide = self._threads.submit(self._make_guide)
            guide = self._guide
            return self._threads.submit(lambda: guide.result().compile(grammar_text(form)))
        finally:
            threading.stack_size(before)

    def _make_guide(self) -> "Guide":
        from octavo.grammar.guidance import guide  # the library is loaded only for requests that need it

        assert self._tokenizer is not None
        return guide(self._tokenizer(), self._vocab_size, self._end_ids)


def _cut(delta: Delta, count: int) -> None:
    """Keeps only the first tokens of a delta."""
    delta.token_ids = delta.token_ids[:count]
    delta.logprobs = None if delta.logprobs is None else delta.logprobs[:count]


def _size(form: StructuredOutputsParams) -> int:
    return GRAMMAR_BYTES + BYTES_PER_CHAR * form.num_chars


def _has_failed(future: "Future[Any]") -> bool:
    return future.done() and future.exception() is not None


def _bar_ends(scheduler: Scheduler, seq: Sequence, drafts: int, mask: NDArray[np.uint32]) -> None:
    """Removes end ids that are ignored, or that come too early after these drafts."""
    request = seq.request
    short = seq.num_tokens + drafts - request.num_prompt < request.params.min_tokens
    for token in (scheduler.end_ids - request.end_ids) | (request.end_ids if short else frozenset()):
        mask[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)


def _judge(scheduler: Scheduler, seq: Sequence, matcher: "Matcher", mask: NDArray[np.int32]) -> list[Delta]:
    """Ends a sample after which nothing may follow."""
    request = seq.request
    if matcher.failed or not (mask.any() or matcher.accepting):
        why = matcher.failed or "no token may come next"
        return _end_request(scheduler, request.request_id, f"{PARAM} leads nowhere from here: {why}")
    return [] if mask.any() else _complete(scheduler, seq)


def _end_request(scheduler: Scheduler, name: str, error: str, code: str = CODE) -> list[Delta]:
    """Ends all samples of a request, because they share the grammar. Returns their last deltas."""
    return scheduler.fail_request(scheduler.requests[name], error, code)


def _complete(scheduler: Scheduler, seq: Sequence) -> list[Delta]:
    scheduler.kv.seal(seq)
    return scheduler.finish(seq, "stop")
