"""The shapes that determine which GPU kernels are compiled, as numbers. It imports no torch and no Triton, so any process can use it."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from octavo.kernels.gates import Gate

FP8_BLOCK = 128  # rows and columns of 8-bit floats that share a scale, if scales are per block


class PackedShape(NamedTuple):
    """A quantised matrix of a model."""

    out_features: int
    in_features: int
    bits: int
    group: int
    bias: bool = False
    gated: bool = False  # it is gate over up
    table: bool = False  # codes are looked up in a table
    floats: bool = False  # the table is that of MXFP4


class Fp8Shape(NamedTuple):
    """A matrix of a model that is stored as 8-bit floats."""

    out_features: int
    in_features: int
    span: int  # columns that share a scale
    bias: bool = False


class AttentionShape(NamedTuple):
    """The properties in which the layers of one model may differ."""

    window: int | None
    rotated: int  # dimensions of a head that are rotated
    soft_cap: float | None = None
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class ExpertShape:
    count: int
    chosen: int
    scores: str
    normed: bool
    bias: bool
    bits: int = 0  # of quantised weights; 0: floats
    group: int = 0
    table: bool = False
    floats: bool = False  # the table is that of MXFP4


@dataclass(frozen=True, slots=True)
class KernelShapes:
    """A model whose layers are attention over keys and values and a gated MLP or MoE, with norms before or after them."""

    vocab: int
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    norm_eps: float
    qkv_bias: bool
    qk_norm: Literal["heads", "whole"] | None
    attentions: tuple[AttentionShape, ...]  # one of each kind
    packed: tuple[PackedShape, ...] = ()
    fp8: tuple[Fp8Shape, ...] = ()
    gate: Gate = "swiglu"
    norms: Literal["before", "after", "both"] = "before"
    wide_norms: bool = False  # norm weights are float32
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    experts: ExpertShape | None = None
