"""Compares bits. In a verified pipeline stage each step is computed twice: both results for the next stage must have the same bits."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.comm.comm import Channel
from octavo.errors import VerifyError
from octavo.worker.program import Place


@dataclass(slots=True)
class Compared:
    """How much has been verified."""

    steps: int = 0
    rows: int = 0
    cache_values: int = 0
    output_values: int = 0
    copies: int = 0
    forks: int = 0
    rejected: int = 0  # slots of drafts that were rejected
    together: int = 0  # rows of decode steps that shared keys with others
    state_values: int = 0  # of recurrent layers
    restored: int = 0  # rows that began with a checkpoint of a state

    @property
    def values(self) -> int:
        return self.cache_values + self.output_values + self.state_values


class Twice:
    """A channel that returns each received tensor twice, and requires each sent tensor twice with the same bits."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._kept: Tensor | None = None

    def receive(self, x: Tensor) -> Tensor:
        if self._kept is None:
            self._kept = self._channel.receive(x).clone()
            return x
        x.copy_(self._kept)
        self._kept = None
        return x

    def send(self, x: Tensor) -> None:
        if self._kept is None:
            self._kept = x.clone()
            return
        if not same_bits(x, self._kept):
            raise VerifyError("the stream of a stage in one call differs from its layers one by one")
        self._channel.send(x)
        self._kept = None


def computed_twice(place: Place) -> Place:
    """Returns the rank context for verified steps."""
    before, after = (None if channel is None else Twice(channel) for channel in (place.before, place.after))
    return replace(place, before=before, after=after)


def as_bits(values: Tensor) -> Tensor:
    """Returns the bits as integers, so that NaN equals itself and -0 is not 0."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return values.contiguous().view(integers[values.itemsize])


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(as_bits(one), as_bits(other))
