"""A call of `LLM`: its arguments, its outputs, its turn among threads, and what Ctrl-C does to it.

An argument is one value for all prompts, or one for each. Errors name the prompt.
"""

import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from types import FrameType, TracebackType
from typing import TypeVar

from octavo.errors import EngineError, RequestError
from octavo.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput, TextDelta
from octavo.progress import GenerateProgress
from octavo.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer

Encoded = tuple[str | None, list[int]]  # a prompt's text, if it has one, and its ids
Item = TypeVar("Item")


@contextmanager
def prompt_named(index: int) -> Iterator[None]:
    """Returns a context that adds the prompt's `index` to an error."""
    try:
        yield
    except RequestError as error:
        error.index = index
        raise


def each_of(encode: Callable[[Item], Encoded], items: Sequence[Item]) -> list[Encoded]:
    encoded = []
    for index, item in enumerate(items):
        with prompt_named(index):
            encoded.append(encode(item))
    return encoded


def spread(params: SamplingParams | Sequence[SamplingParams], count: int) -> Sequence[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError("sampling_params must be SamplingParams, or a list of them, one for each prompt", "sampling_params")
    if len(params) != count:
        raise RequestError(f"{count} prompts, but {len(params)} sampling params", "sampling_params")
    return params


def spread_priority(priority: int | Sequence[int], count: int) -> Sequence[int]:
    each = priority if isinstance(priority, Sequence) else [priority] * count
    if len(each) != count or not all(type(one) is int and abs(one) < 2**31 for one in each):
        raise RequestError("priority must be an integer below 2^31, or a list of them, one for each prompt", "priority")
    return each


# -- outputs

class Reader:
    """Receives the updates of the requests of one call or stream, in any thread."""

    def __init__(self, progress: GenerateProgress | None = None) -> None:
        self.updates: deque[TextDelta] = deque()  # of a stream: not read yet
        self.finished: dict[str, RequestOutput] = {}
        self._progress = progress

    def push(self, delta: TextDelta) -> None:
        if self._progress is None:
            self.updates.append(delta)
        else:
            self._progress.count(0, 0, len(delta.token_ids))

    def finish(self, output: RequestOutput) -> None:
        self.finished[output.request_id] = output
        if self._progress is not None:
            self._progress.count(1, len(output.prompt_token_ids), 0)


def numbered(ids: Sequence[str], deltas: Generator[TextDelta, None, None]) -> Generator[tuple[int, TextDelta], None, None]:
    place = {request_id: index for index, request_id in enumerate(ids)}
    with closing(deltas):
        for delta in deltas:
            yield place[delta.request_id], delta


def beam_output(output: RequestOutput, tokenizer: Tokenizer | None, keep_end: bool) -> BeamSearchOutput:
    """`keep_end`: an end id is one of an answer's tokens"""
    prompt = output.prompt
    if prompt is None and tokenizer is not None:
        prompt = tokenizer.decode(output.prompt_token_ids)
    return BeamSearchOutput([BeamSearchSequence.of(output, sample, prompt, keep_end) for sample in output.outputs])


# -- turns of threads, and Ctrl-C

class FairLock:
    """A lock that a thread cannot take twice in a row while another thread waits for it. With a plain lock it could."""

    def __init__(self) -> None:
        self._next = threading.Lock()  # the thread that has it gets the next turn
        self._turn = threading.Lock()
        self._holder: int | None = None

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the lock. Then the caller is a signal handler or a finalizer, which Python may run at any point."""
        return self._holder == threading.get_ident()

    def __enter__(self) -> None:
        if self.is_mine:
            raise EngineError("this thread is in the middle of a step: a signal handler or a finalizer cannot start another one")
        with self._next:
            self._turn.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._holder = None
        self._turn.release()


class DeferredInterrupt:
    """A context in which Ctrl-C waits for `check` or the end of the context. A second Ctrl-C does not wait.

    It works in the main thread, and only if Python's own handler of Ctrl-C is installed. Elsewhere it does nothing.
    """

    def __init__(self) -> None:
        self._pending = False
        self._installed = False

    def __enter__(self) -> "DeferredInterrupt":
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._installed = False
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C was pressed."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            raise KeyboardInterrupt
        self._pending = True
