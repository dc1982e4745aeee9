"""The attention seam: what a backend is, the registry of them, and how one is chosen.

A backend is built once per layer from an `AttentionSpec`; what it lacks it refuses by name, at start, not in a step.
`prepare` runs once a step (work shared by all layers), `write` and `attend` once a layer.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor

from octavo.attention.forward_batch import ForwardBatch
from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Everything about a layer's attention that is known when the model is built."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a query sees this many keys, itself included
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    kind: Literal["decoder", "encoder", "cross"] = "decoder"


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMS norms over each head of q and k, before rotation (Qwen3)."""

    q_weight: Tensor  # [head_dim]
    k_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation tables; half-split layout, position p is row p."""

    cos: Tensor  # [max_position, head_dim / 2] float32
    sin: Tensor


class AttentionBackend(Protocol):
    name: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]]
    layout: ClassVar[Literal["paged", "contiguous"]]
    spec: AttentionSpec
    few_rows: int  # up to how many rows of one query it has `attend_few` for: a backend with any is a `FewBackend`

    def __init__(self, spec: AttentionSpec) -> None: ...

    @staticmethod
    def prepare(batch: ForwardBatch) -> Any:
        """Index work all layers share; the runner puts it into `batch.attention`."""

    def write(self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: dict[str, Tensor], batch: ForwardBatch) -> Tensor:
        """Normalise and rotate q and k, store k and v in the cache; returns q [T, heads, head_dim].

        qkv [T, (heads + 2 * kv_heads) * head_dim] may be overwritten.
        """

    def attend(self, q: Tensor, cache: dict[str, Tensor], batch: ForwardBatch, out: Tensor) -> Tensor:
        """Attention of q over what the cache holds; fills and returns out [T, heads, head_dim]."""


class FewBackend(AttentionBackend, Protocol):
    def attend_few(self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: dict[str, Tensor], batch: ForwardBatch) -> Tensor:
        """`write` and `attend` at once for a few rows of one query; returns [R, heads * head_dim]."""


# name -> "module:Class", imported when chosen
REGISTRY = {
    "cpu": "octavo.attention.cpu:CpuBackend",
    "contiguous": "octavo.attention.contiguous:ContiguousBackend",
    "triton": "octavo.attention.triton:TritonBackend",
}


def split_heads(qkv: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of each token: views, [T, heads, head_dim] each."""
    parts = qkv.view(len(qkv), -1, spec.head_dim)
    q, k, v = parts.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
    return q, k, v


def load_backend(name: str) -> type[AttentionBackend]:
    if name not in REGISTRY:
        raise ConfigError(f"attention_backend {name!r} is not known; there are auto, {', '.join(REGISTRY)}")
    module, _, attribute = REGISTRY[name].partition(":")
    backend: type[AttentionBackend] = getattr(import_module(module), attribute)
    return backend


def choose_backend(name: str, dtype: str, on_device: bool = False) -> type[AttentionBackend]:
    """The backend for this run, or a refusal that says what it lacks."""
    backend = load_backend(("triton" if on_device else "cpu") if name == "auto" else name)
    if dtype not in backend.dtypes:
        raise ConfigError(f"attention backend {backend.name} has no {dtype}; it has {', '.join(backend.dtypes)}")
    return backend


def refuse_unsupported(backend: str, spec: AttentionSpec, supported: tuple[str, ...]) -> None:
    """Raise for each field of `spec` that is set and not in `supported`."""
    asked = {
        "window": spec.window is not None,
        "soft_cap": spec.soft_cap is not None,
        "sinks": spec.sinks,
        "alibi": spec.alibi,
        f"kind={spec.kind}": spec.kind != "decoder",
    }
    missing = [name for name, wanted in asked.items() if wanted and name not in supported]
    if missing:
        raise ConfigError(f"attention backend {backend} does not support {', '.join(missing)}")
