"""Matrices as the GPU kernels see them: which kernels are compiled depends on them. It imports no torch and no Triton."""

from dataclasses import dataclass
from typing import NamedTuple

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
    shared: int = 0  # width of one more expert, through which every token passes
    shared_gated: bool = False


class Fp8Shape(NamedTuple):
    """A matrix of a model that is stored as 8-bit floats."""

    out_features: int
    in_features: int
    span: int  # columns that share a scale
    bias: bool = False


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
    in_groups: tuple[int, int] | None = None  # groups, and how many of them are chosen; None: the best experts of all are
    biased: bool = False
    shared: int = 0  # width of one more expert, through which every token passes
    shared_gated: bool = False
