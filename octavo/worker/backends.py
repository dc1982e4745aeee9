"""Chooses an attention backend for each kind of layer, by what backends support (`attention/capabilities.py`). It needs no torch.

    kinds         layers that differ for a backend: with a window and heads of 64, without a window and heads of 64
    candidates    the backends of the device in order of preference, or the one that `attention_backend` names
    chosen        for each kind, the first candidate that supports the settings and the kind

All chosen backends support the same cache layout, because it is a setting. Steps are captured as CUDA graphs as far as all of them allow.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from octavo.attention.capabilities import BACKENDS, GRAPH_LEVELS, PREFERRED, Capabilities, Device, Graphs
from octavo.attention.mixer import MixerSpec
from octavo.attention.spec import AttentionSpec
from octavo.config import ResolvedConfig
from octavo.errors import ConfigError
from octavo.log import logger
from octavo.models.description import ModelDescription

if TYPE_CHECKING:
    from octavo.attention.backend import AttentionBackend

BY_RANKS = "context_parallel"  # a feature that depends on the ranks, not on the layer
ON = {"cpu": "a CPU", "cuda": "a GPU"}


@dataclass(frozen=True, slots=True)
class Run:
    """What backends must support, whatever the layers are."""

    config: ResolvedConfig
    dtype: str
    device: Device  # whose kernels compute
    references: bool = False  # on a CPU, their references compute instead, which take heads of any size


@dataclass(frozen=True, slots=True)
class Kind:
    """What a backend can distinguish about a layer."""

    mixer: str
    features: frozenset[str]
    head_dim: int
    latent: tuple[int, int] | None = None  # numbers of the latent and of the rotary key, if keys have both

    @staticmethod
    def of(mixer: MixerSpec) -> "Kind":
        latent = (mixer.value_dim, mixer.rotated) if isinstance(mixer, AttentionSpec) and mixer.latent is not None else None
        return Kind(mixer.kind, frozenset(mixer.features) - {BY_RANKS}, mixer.head_dim, latent)

    def __str__(self) -> str:
        mixer = [] if self.mixer == "attention" else [f"mixer {self.mixer}"]
        return ", ".join([*mixer, f"heads of {self.head_dim}", *sorted(self.features)])


@dataclass(frozen=True, slots=True)
class Misfit:
    problem: str
    change: str = ""  # the setting that would help; none: only another backend does


@dataclass(frozen=True, slots=True)
class Choice:
    kind: Kind
    layers: tuple[int, ...]
    backend: Capabilities
    passed: tuple[Misfit, ...] = ()  # why each of the preferred ones did not fit


def choose_backends(run: Run, model: ModelDescription) -> tuple[Choice, ...]:
    """Returns the backend of each kind of layer, or raises an error with the reason and the setting to change."""
    layers: dict[Kind, list[int]] = {}
    for number, layer in enumerate(model.layers):
        layers.setdefault(Kind.of(layer.mixer), []).append(number)
    candidates = _candidates(run.config.attention_backend, run.device)
    if run.device == "cuda":
        candidates = _suited(candidates, run.config)
    return tuple(_choose(kind, tuple(numbers), candidates, run) for kind, numbers in layers.items())


def _candidates(name: str, device: Device) -> Sequence[Capabilities]:
    if name == "auto":
        return PREFERRED[device]
    named = [backend for backend in BACKENDS if backend.name == name]
    here = [backend for backend in named if device in backend.devices]
    if not here:
        other = named[0].devices[0]
        raise ConfigError(
            f"attention_backend is {name}, which runs on {ON[other]}, and this runs on {ON[device]}: set it to auto, or device to {other}"
        )
    return here


def _suited(candidates: Sequence[Capabilities], config: ResolvedConfig) -> Sequence[Capabilities]:
    """Returns the deterministic backends, or the other ones if `deterministic` is off."""
    suited = [backend for backend in candidates if backend.deterministic == config.deterministic]
    if not suited:
        raise ConfigError(
            f"deterministic is True, and attention backend {config.attention_backend} computes a row differently beside others: "
            "leave attention_backend at auto"
        )
    return suited


def _choose(kind: Kind, layers: tuple[int, ...], candidates: Sequence[Capabilities], run: Run) -> Choice:
    passed: list[Misfit] = []
    for backend in candidates:
        misfit = _misfit_of_run(backend, run.config, run.dtype) or _misfit_of_layers(backend, kind, layers[0], run)
        if misfit is None:
            return Choice(kind, layers, backend, tuple(passed))
        passed.append(misfit)
    preferred, changes = passed[0], [passed[0].change]
    if run.config.attention_backend != "auto":
        changes.append("leave attention_backend at auto")
    elif run.device == "cuda" and run.config.decode_context_parallel_size == 1:
        changes.append("set device to cpu")
    raise ConfigError(": ".join(filter(None, [preferred.problem, ", or ".join(filter(None, changes))])))


def _misfit_of_run(backend: Capabilities, config: ResolvedConfig, dtype: str) -> Misfit | None:
    """Returns which setting the backend does not support, or None."""
    ranks, cache_dtype, who = config.decode_context_parallel_size, config.kv_cache_dtype, f"attention backend {backend.name}"
    if dtype not in backend.dtypes:
        return Misfit(f"dtype is {dtype}, and {who} has only {', '.join(backend.dtypes)}", "set dtype to one of these")
    if cache_dtype not in ("auto", dtype, *backend.cache_dtypes):
        problem = f"kv_cache_dtype is {cache_dtype}, dtype is {dtype}, and {who} keeps the KV cache in the dtype of the run"
        return Misfit(problem, "leave kv_cache_dtype at auto")
    if config.kv_cache_layout not in backend.layouts:
        problem = f"kv_cache_layout is {config.kv_cache_layout}, and {who} has only {', '.join(backend.layouts)}"
        return Misfit(problem, "leave kv_cache_layout at auto")
    if config.enable_prefix_caching and not backend.paged:
        problem = f"enable_prefix_caching is True, and {who} shares no blocks"
        return Misfit(problem, "set enable_prefix_caching=False (--no-enable-prefix-caching)")
    if ranks > 1 and not backend.splits_context:
        return Misfit(f"decode_context_parallel_size is {ranks}, and {who} cannot attend to a part of a context", "set it to 1")
    return None


def _misfit_of_layers(backend: Capabilities, kind: Kind, layer: int, run: Run) -> Misfit | None:
    """Returns what the backend does not support in layers of this kind, of which `layer` is the first, or None."""
    who = f"attention backend {backend.name}"
    if kind.mixer not in backend.mixers:
        return Misfit(f"layer {layer} has a mixer of kind {kind.mixer}, which {who} does not compute")
    if lacking := sorted(kind.features - backend.features):
        return Misfit(f"layer {layer} needs {', '.join(lacking)}, which {who} does not support")
    if "latent" in kind.features and run.config.kv_cache_dtype == "int8":
        problem = f"kv_cache_dtype is int8, and layer {layer} caches a latent and a rotary key, which would have to share a scale"
        return Misfit(problem, "leave kv_cache_dtype at auto")
    if run.config.decode_context_parallel_size > 1 and (lacking := sorted(kind.features - backend.over_context().features)):
        problem = f"layer {layer} needs {', '.join(lacking)}, and decode_context_parallel_size is {run.config.decode_context_parallel_size}"
        return Misfit(problem, "set it to 1")
    if run.references:
        return None
    if kind.latent is not None:
        most = backend.latent_sizes or kind.latent
        if kind.latent[0] > most[0] or kind.latent[1] > most[1]:
            own = "latents of {} and rotary keys of {} numbers".format(*kind.latent)
            return Misfit(f"layer {layer} has {own}, and {who} has only those up to {most[0]} and {most[1]}")
        return None
    if backend.head_sizes is not None and kind.head_dim not in backend.head_sizes:
        return Misfit(f"layer {layer} has heads of {kind.head_dim}, and {who} has only {_shown(backend.head_sizes)}")
    return None


def _shown(sizes: Sequence[int]) -> str:
    if isinstance(sizes, range):
        return f"multiples of {sizes.step} up to {sizes[-1]}"
    return ", ".join(map(str, sizes))


def log_choices(choices: Sequence[Choice]) -> None:
    """Logs which backend computes each kind of layer, and why none of the preferred ones does."""
    total = sum(len(choice.layers) for choice in choices)
    for choice in choices:
        because = "".join(f"; {misfit.problem}" for misfit in choice.passed)
        logger.info("Attention backend of %d of %d layers (%s): %s%s", len(choice.layers), total, choice.kind, choice.backend.name, because)


class Backends:
    """The backends of a model's layers. A model calls it with the spec of a layer to build the backend of that layer."""

    def __init__(self, of_kind: "Mapping[Kind, type[AttentionBackend]]") -> None:
        self._of_kind = of_kind

    def __call__(self, spec: AttentionSpec) -> "AttentionBackend":
        return self.of(spec)(spec)

    def of(self, mixer: MixerSpec) -> "type[AttentionBackend]":
        return self._of_kind[Kind.of(mixer)]

    def each(self, change: "Callable[[type[AttentionBackend]], type[AttentionBackend]]") -> "Backends":
        """Returns changed backends. Kinds of layers with the same backend keep sharing one."""
        changed = {backend: change(backend) for backend in dict.fromkeys(self._of_kind.values())}
        return Backends({kind: changed[backend] for kind, backend in self._of_kind.items()})

    @cached_property
    def paged(self) -> bool:
        return all(backend.capabilities.paged for backend in self._of_kind.values())

    @cached_property
    def unverified(self) -> str | None:
        """The name of a backend whose results cannot be verified, if there is one."""
        return next((one.capabilities.name for one in self._of_kind.values() if not one.capabilities.verified), None)

    @cached_property
    def graphs(self) -> Graphs:
        """The steps that can be captured: as far as all backends allow."""
        return min((backend.capabilities.graphs for backend in self._of_kind.values()), key=GRAPH_LEVELS.index)


def load_backends(choices: Sequence[Choice]) -> Backends:
    """Imports the chosen backends, and torch with them."""
    from octavo.attention.backend import import_backend

    return Backends({choice.kind: import_backend(choice.backend) for choice in choices})
