"""Attention backends: their interface, the available ones, and the selection.

A backend is built once per layer from an `AttentionSpec`. It refuses unsupported features by name, at start, not during a step.
`prepare` runs once per step (work shared by all layers), `write` and `attend` once per layer.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Protocol

from torch import Tensor

from octavo.attention.forward_batch import Cache, ForwardBatch
from octavo.attention.spec import AttentionSpec
from octavo.config import ResolvedConfig
from octavo.errors import ConfigError


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
    name: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]]
    paged: ClassVar[bool]  # if not, every row has its own region
    layouts: ClassVar[tuple[str, ...]]  # the block layouts that it supports
    captured: ClassVar[bool]  # on a device: whether a step with it can be captured as a CUDA graph
    in_teams: ClassVar[bool]  # on a device: whether it reads shared keys in cascade (shared-prefix) groups (`ForwardBatch.teams`)
    features: ClassVar[tuple[str, ...]]  # the features of `AttentionSpec` that it supports
    spec: AttentionSpec
    few_rows: int  # maximum number of rows with one query for `attend_few`: a backend with any is a `FewBackend`

    def __init__(self, spec: AttentionSpec) -> None: ...

    @staticmethod
    def prepare(batch: ForwardBatch) -> Any:
        """Returns the index work that all layers share. The program stores it in `batch.attention`."""

    def write(self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: Cache, batch: ForwardBatch) -> Tensor:
        """Norms and rotates q and k, and stores k and v in the cache. Returns q [T, heads, head_dim].

        qkv [T, (heads + 2 * kv_heads) * head_dim] may be overwritten.
        """

    def attend(
        self, q: Tensor, cache: Cache, batch: ForwardBatch, out: Tensor, sinks: Tensor | None = None, slopes: Tensor | None = None
    ) -> Tensor:
        """Computes attention of q over the cache. Fills and returns out [T, heads, head_dim]. `sinks`, `slopes` (of ALiBi): [heads]"""


class FewBackend(AttentionBackend, Protocol):
    def attend_few(
        self, qkv: Tensor, norms: QKNorm | None, rope: Rope, cache: Cache, batch: ForwardBatch, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Combines `write` and `attend` for a small batch of rows with one query, with their context in splits.

        Returns (parts [R, splits, heads, head_dim], their log-sum-exp [R, splits, heads] in units of log2), both float32
        """


BEFORE_THE_CACHE = ("no_rotation", "partial_rotation", "whole_norm")  # supported by `write_kv` of `kernels/ops.py` on every device
TORCH_FEATURES = ("window", "soft_cap", "sinks", "alibi", *BEFORE_THE_CACHE)

# name -> "module:Class", imported when selected
ON_CPU = {
    "cpu": "octavo.attention.cpu:CpuBackend",
    "contiguous": "octavo.attention.contiguous:ContiguousBackend",
    "triton": "octavo.attention.triton:TritonBackend",
}
ON_DEVICE = {
    "triton": "octavo.attention.triton:TritonBackend",
    "contiguous": "octavo.attention.triton:TritonRegions",
    "flashinfer": "octavo.attention.flashinfer:FlashInferBackend",
}


def split_heads(qkv: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v of each token as views, [T, heads, head_dim] each."""
    parts = qkv.view(len(qkv), -1, spec.head_dim)
    q, k, v = parts.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
    return q, k, v


def load_backend(name: str, on_device: bool = False) -> type[AttentionBackend]:
    known, place = (ON_DEVICE, "on a GPU") if on_device else (ON_CPU, "on the CPU")
    if name not in known:
        raise ConfigError(f"attention_backend {name!r} is not known {place}; there are auto, {', '.join(known)}")
    module, _, attribute = known[name].partition(":")
    backend: type[AttentionBackend] = getattr(import_module(module), attribute)
    return backend


def choose_backend(config: ResolvedConfig, dtype: str, on_device: bool, asked: frozenset[str] = frozenset()) -> type[AttentionBackend]:
    """Returns the backend for this run, or raises an error with the missing feature and the setting to change.

    `asked`: the features of all layers of the model
    """
    default = "triton" if on_device else "cpu"
    backend = load_backend(default if config.attention_backend == "auto" else config.attention_backend, on_device)
    name, layout = backend.name, config.kv_cache_layout
    if missing := sorted(asked - {*backend.features, "context_parallel"}):  # `layers/context_parallel.py` provides it for all backends
        raise ConfigError(f"{_lacks(name, missing)}: leave attention_backend at auto{', and set device to cpu' if on_device else ''}")
    if dtype not in backend.dtypes:
        raise ConfigError(f"attention backend {name} has no {dtype}; it has {', '.join(backend.dtypes)}")
    if layout not in backend.layouts:
        raise ConfigError(
            f"kv_cache_layout is {layout}, attention backend {name} has {', '.join(backend.layouts)} alone: leave kv_cache_layout at auto"
        )
    if not backend.paged and config.enable_prefix_caching:
        raise ConfigError(f"attention backend {name} shares no blocks: set enable_prefix_caching=False (--no-enable-prefix-caching)")
    if on_device and not backend.captured and not config.enforce_eager:
        raise ConfigError(f"attention backend {name} cannot be captured in CUDA graphs: set enforce_eager=True (--enforce-eager)")
    return backend


def refuse_unsupported(backend: str, spec: AttentionSpec, supported: tuple[str, ...]) -> None:
    """Raises if `spec` needs a feature that is not in `supported`."""
    missing = [name for name in spec.features if name not in supported]
    if missing:
        raise ConfigError(_lacks(backend, missing))


def _lacks(backend: str, missing: list[str]) -> str:
    return f"attention backend {backend} does not support {', '.join(missing)}"
