"""Arguments of a call of `LLM`: one value for all prompts, or one per prompt. Errors name the prompt."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams

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
