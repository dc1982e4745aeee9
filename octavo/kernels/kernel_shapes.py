"""The shapes that decide which kernels of a GPU are compiled, as numbers. No torch and no Triton here, so any process can use them."""

from dataclasses import dataclass
from typing import NamedTuple


class PackedShape(NamedTuple):
    """A matrix of a model that is kept as codes."""

    out_features: int
    in_features: int
    bits: int
    group: int
    bias: bool = False
    gated: bool = False  # it is gate over up


@dataclass(frozen=True, slots=True)
class KernelShapes:
    """A model whose layers are a norm, attention over keys and values, a norm and a gated MLP."""

    vocab: int
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # one of each kind: with and without
    packed: tuple[PackedShape, ...] = ()
