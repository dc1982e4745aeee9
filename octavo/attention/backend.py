"""The interface of attention backends.

What a backend supports is in `attention/capabilities.py`. It is built once per layer from an `AttentionSpec` that it supports.
`prepare` runs once per step and cache group (work shared by all its layers), `write` and `attend` once per layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Protocol

from torch import Tensor

from octavo.attention.capabilities import BACKENDS, Capabilities, Device
from octavo.attention.forward_batch import Cache, ForwardBatch
from octavo.attention.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMS norms over each head of q and k, or over all heads together, before rotation."""

    q_weight: Tensor  # [head_dim], or [all heads * head_dim]
    k_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation tables; half-split layout, position p is row p. Those of a layer without rotation have no columns."""

    cos: Tensor  # [max_position, rotated / 2] float32
    sin: Tensor


class AttentionBackend(Protocol):
    capabilities: ClassVar[Capabilities]
    spec: AttentionSpec
    few_rows: int  # maximum number of rows with one query for `attend_few`: a backend with any is a `FewBackend`

    def __init__(self, spec: AttentionSpec) -> None: ...

    @staticmethod
    def prepare(batch: ForwardBatch) -> Any:
        """Returns the index work that all layers share. The program stores it in `batch.attention`."""

    def write(self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: Cache, batch: ForwardBatch) -> Tensor:
        """Norms and rotates q and k, and stores k and v in the cache. Returns q [T, heads, head_dim].

        qkv [T, (heads + 2 * kv_heads) * head_dim] may be overwritten. On a CPU, with a latent, it ends behind k, and both are already
        rotated.
        """

    def attend(
        self, q: Tensor, cache: Cache, batch: ForwardBatch, out: Tensor, sinks: Tensor | None = None, slopes: Tensor | None = None
    ) -> Tensor:
        """Computes attention of q over the cache. Fills and returns out [T, heads, value_dim]. `sinks`, `slopes` (of ALiBi): [heads]"""


class LatentBackend(AttentionBackend, Protocol):
    def write_latent(
        self, q: Tensor, kv: Tensor, k_up: Tensor, norm: tuple[Tensor, float], rope: Rope, cache: Cache, batch: ForwardBatch
    ) -> Tensor:
        """In place of `write`, for layers with a latent: stores the normed latent and the rotated key. Returns q [T, heads, head_dim].

        q: [T, heads * (plain_dim + rotary_dim)], of which the plain part is multiplied by `k_up`; kv: [T, head_dim]
        """


NewBackend = Callable[[AttentionSpec], AttentionBackend]  # makes the backend of a layer


class FewBackend(AttentionBackend, Protocol):
    def attend_few(
        self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: Cache, batch: ForwardBatch, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Combines `write` and `attend` for a small batch of rows with one query, with their context in splits.

        Returns (parts [R, splits, heads, head_dim], their log-sum-exp [R, splits, heads] in units of log2), both float32
        """


def split_heads(qkv: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v of each token as views, [T, heads, head_dim] each. With a latent, there are no v."""
    parts = qkv.view(len(qkv), -1, spec.head_dim)
    q, k, v = parts.split([spec.num_heads, spec.num_kv_heads, 0 if spec.latent else spec.num_kv_heads], dim=1)
    return q, k, v


def load_backend(name: str, device: Device = "cpu", deterministic: bool = False) -> type[AttentionBackend]:
    """`deterministic`: on a GPU, the one whose bits do not depend on the schedule"""
    here = (each for each in BACKENDS if each.name == name and device in each.devices)
    return import_backend(next(each for each in here if each.deterministic == deterministic))


def import_backend(capabilities: Capabilities) -> type[AttentionBackend]:
    module, _, name = capabilities.implementation.partition(":")
    backend: type[AttentionBackend] = getattr(import_module(module), name)
    return backend
