"""What each attention backend supports: one frozen record for each, readable without torch.

`worker/backends.py` compares the records with the layers of a model and with the settings, and chooses a backend for each kind of layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Device = Literal["cpu", "cuda"]
Graphs = Literal["none", "decode", "every"]

GRAPH_LEVELS: tuple[Graphs, ...] = ("none", "decode", "every")  # of one model, the lowest of its backends holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    name: str  # as in `attention_backend`
    implementation: str  # "module:Class", imported when it is chosen
    devices: tuple[Device, ...]  # "cuda" includes the reference kernels, which compute the same on a CPU in tests
    features: frozenset[str]  # of `AttentionSpec`
    dtypes: tuple[str, ...]
    cache_dtypes: tuple[str, ...] = ()  # besides the dtype of the run
    layouts: tuple[str, ...] = ("nhd",)  # of a block
    head_sizes: Sequence[int] | None = None  # None: any
    latent_sizes: tuple[int, int] | None = None  # the most numbers of a latent and of a rotary key; None: any
    mixers: tuple[str, ...] = ("attention",)  # kinds of `MixerSpec`
    graphs: Graphs = "none"  # steps that can be captured as CUDA graphs
    paged: bool = True  # if not, every row has its own region
    splits_context: bool = False  # whether ranks that share a context can use its kernels
    in_teams: bool = False  # whether it reads shared keys in cascade (shared-prefix) groups (`ForwardBatch.teams`)
    deterministic: bool = False  # whether a row's bits do not depend on the other rows, nor on chunks and prefix hits
    verified: bool = True  # whether "contiguous" on the same device computes the same bits over a contiguous cache

    def over_context(self) -> "Capabilities":
        """Returns what remains if ranks share a context: they communicate in every layer (`attention/context_parallel.py`)."""
        return replace(self, features=self.features & (BEFORE_THE_CACHE | {"window"}), graphs="none", in_teams=False)


BEFORE_THE_CACHE = frozenset({"no_rotation", "partial_rotation", "whole_norm"})  # `write_kv` of `kernels/ops.py` has them on every device
ALL = BEFORE_THE_CACHE | {"window", "soft_cap", "sinks", "alibi"}
WITH_GATE = ALL | {"output_gate"}  # the gate is a separate operation behind attention
EVERY = WITH_GATE | {"latent"}
EVERY_MIXER = ("attention", "delta_net")  # a recurrent mixer has no backend: it computes beside attention with the same batch

CPU = Capabilities(
    name="cpu",
    implementation="octavo.attention.cpu:CpuBackend",
    devices=("cpu",),
    features=EVERY,
    mixers=EVERY_MIXER,
    dtypes=("float32", "bfloat16", "float16"),  # the last one only for the native program's own kernels
    cache_dtypes=("float32", "bfloat16", "float16", "int8"),
    splits_context=True,
)
TRITON = Capabilities(
    name="triton",
    implementation="octavo.attention.triton:TritonBackend",
    devices=("cuda", "cpu"),
    features=EVERY,
    mixers=EVERY_MIXER,
    dtypes=("float32", "float16", "bfloat16"),
    layouts=("nhd", "hnd"),
    head_sizes=range(16, 257, 16),
    latent_sizes=(512, 64),
    graphs="every",
    splits_context=True,
    in_teams=True,
)
CONTIGUOUS = Capabilities(
    name="contiguous",
    implementation="octavo.attention.contiguous:ContiguousBackend",
    devices=("cpu",),
    features=EVERY,
    mixers=EVERY_MIXER,
    dtypes=("float32", "bfloat16"),
    cache_dtypes=CPU.cache_dtypes,
    paged=False,
)
TRITON_REGIONS = Capabilities(
    name="contiguous",
    implementation="octavo.attention.triton:TritonRegions",
    devices=("cuda",),
    features=EVERY,
    mixers=EVERY_MIXER,
    dtypes=TRITON.dtypes,
    head_sizes=TRITON.head_sizes,
    latent_sizes=TRITON.latent_sizes,
    graphs="every",
    paged=False,
    in_teams=True,
)
INVARIANT = replace(TRITON, implementation="octavo.attention.triton:InvariantBackend", deterministic=True)
INVARIANT_REGIONS = replace(TRITON_REGIONS, implementation="octavo.attention.triton:InvariantRegions", deterministic=True)
FLASHINFER = Capabilities(
    name="flashinfer",
    implementation="octavo.attention.flashinfer:FlashInferBackend",
    devices=("cuda",),
    features=BEFORE_THE_CACHE | {"window", "soft_cap"},
    dtypes=("float16", "bfloat16"),
    layouts=("nhd", "hnd"),
    head_sizes=(64, 128, 256),
    verified=False,
)

PREFERRED: dict[Device, tuple[Capabilities, ...]] = {"cpu": (CPU,), "cuda": (TRITON, INVARIANT)}  # with `auto`, the first that fits
BACKENDS = (CPU, TRITON, INVARIANT, CONTIGUOUS, TRITON_REGIONS, INVARIANT_REGIONS, FLASHINFER)  # all, which can be named
