"""Calls that precompile the kernels for 8-bit floats: one for each variant that the rules select, for any number of rows."""

from collections.abc import Callable, Iterable
from itertools import chain

import torch

from octavo.kernels.fp8_matrix import zero_fp8
from octavo.kernels.kernel_shapes import Fp8Shape
from octavo.kernels.triton.fp8.products import fp8_linear, round_rows, rule, variant

EVERY, MOST, APART = 512, 8192, 128  # numbers of rows: all up to EVERY, beyond that only multiples of APART up to MOST


def fp8_calls(shapes: Iterable[Fp8Shape], dtype: torch.dtype, device: torch.device) -> list[Callable[[], object]]:
    found: dict[tuple[object, ...], Callable[[], object]] = {}
    for shape in set(shapes):
        weight = zero_fp8(shape.out_features, shape.in_features, shape.span, "meta")
        for rows in chain(range(1, EVERY), range(EVERY, MOST + 1, APART)):
            found.setdefault(variant(rows, weight, dtype, shape.bias), _call(shape, rows, dtype, device))
    return list(found.values())


def _call(shape: Fp8Shape, rows: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    def call() -> None:
        weight = zero_fp8(shape.out_features, shape.in_features, shape.span, device)
        x = torch.zeros(rows, shape.in_features, dtype=dtype, device=device)
        bias = torch.zeros(shape.out_features, dtype=dtype, device=device) if shape.bias else None
        if rule(rows, weight, dtype) == "torch":
            round_rows(x, weight.span)
        else:
            fp8_linear(x, weight, bias)

    return call
