"""A call of `LLM`: its arguments, one value for all prompts or one per prompt, and its outputs. Errors name the prompt."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TypeVar

from octavo.errors import RequestError
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
        self.news: deque[TextDelta] = deque()  # of a stream: not read yet
        self.finished: dict[str, RequestOutput] = {}
        self._progress = progress

    def push(self, delta: TextDelta) -> None:
        if self._progress is None:
            self.news.append(delta)
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
