"""Calls that precompile the kernels of packed products: one for each variant that the rules select, for any number of rows."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from octavo.kernels.device_codes import DeviceCodes, zero_codes
from octavo.kernels.gates import Gate
from octavo.kernels.kernel_shapes import PackedShape
from octavo.kernels.triton.packed.products import packed_gate_up, packed_linear, unpack, variant
from octavo.kernels.triton.packed.rules import GEMM_ROWS


def packed_calls(
    shapes: Iterable[PackedShape], dtype: torch.dtype, device: torch.device, gate: Gate = "swiglu"
) -> list[Callable[[], object]]:
    found: dict[tuple[object, ...], Callable[[], object]] = {}
    for shape in set(shapes):
        weight = _zeros(shape, "meta")
        for rows in range(1, GEMM_ROWS + 2):
            found.setdefault(variant(rows, weight, shape.bias, shape.gated), _call(shape, rows, dtype, device, gate))
    return list(found.values())


def _zeros(shape: PackedShape, device: torch.device | str) -> DeviceCodes:
    table = torch.zeros(16, dtype=torch.uint8, device=device) if shape.table else None
    return replace(zero_codes(shape.out_features, shape.in_features, shape.bits, shape.group, device), table=table, floats=shape.floats)


def _call(shape: PackedShape, rows: int, dtype: torch.dtype, device: torch.device, gate: Gate) -> Callable[[], object]:
    def call() -> None:
        weight = _zeros(shape, device)
        x = torch.zeros(rows, shape.in_features, dtype=dtype, device=device)
        bias = torch.zeros(shape.out_features, dtype=dtype, device=device) if shape.bias else None
        if shape.gated and bias is None:
            packed_gate_up(x, weight, gate)
        else:
            packed_linear(x, weight, bias)
        if rows > GEMM_ROWS:
            unpack(weight, dtype, torch.zeros(1, dtype=torch.int32, device=device))

    return call
