"""The interface of a mixer for plans and programs: what it caches, and what a step of it needs. It uses no torch."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

from octavo.policy.cache_spec import Buffer


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The largest step that a configuration allows."""

    tokens: int  # computed in the step
    rows: int  # sampled
    context: int  # of the longest row
    gathered: int  # keys read, over all rows


class MixerSpec(Protocol):
    """The interface of a mixer, the part of a layer in which tokens read each other, as plans and programs use it."""

    @property
    def kind(self) -> str:
        """For programs that support only some mixers: "attention" or "delta_net"."""

    @property
    def window(self) -> int | None:
        """How many tokens a token sees, including itself; None: all before it."""

    @property
    def head_dim(self) -> int:
        """The numbers of a head: kernels may support only some sizes."""

    @property
    def features(self) -> tuple[str, ...]:
        """Features that it needs beyond the plain mixer of its kind, such as "window". A program may lack them."""

    @property
    def position_table(self) -> tuple[Hashable, int] | None:
        """The key of the table in which it looks up positions, and the table's numbers per position. Equal keys share a table."""

    def positions(self, max_len: int) -> Hashable:
        """What determines the numbers of that table for a position, if sequences have at most this length."""

    @property
    def gpu_token_numbers(self) -> int:
        """Numbers per token at the peak on a GPU."""

    def buffers(self, dtype: str) -> dict[str, Buffer]:
        """The buffers that a layer stores per token, in a cache of this dtype."""

    def state(self) -> dict[str, Buffer]:
        """The buffers that a layer stores per sequence: none, unless the mixer is recurrent."""

    def step_bytes(self, load: StepLoad, dtype: str, cache_dtype: str) -> int:
        """The peak bytes of the plain torch kernels in a layer."""

    def gpu_step_bytes(self, rows: int) -> int:
        """The bytes of the GPU kernels in a layer, in addition to the numbers of each token."""
