"""Residual add and norm, and the products of `products.py` for few rows with them in the same kernel: with the same bits in both.

    add_norm       norm(x + residual)                          the new stream is stored, too
    norm_linear    norm(x + residual) W^T                      norm_router   the same, and the normed rows
    norm_gate_up   silu(gate) * up of that, or other gates

A reduction adds in an order that depends on how numbers are laid out over threads. Here the squares of neighbours are added pair by
pair, in a tree: a sum of two numbers has one order, and a square and its sum are fused explicitly.

Every program of a product reads all rows twice, from the L2 cache: once for the scale of each row, and then step by step, as the
product needs them. The second time, numbers are added and normed again one by one, which gives the same bits in every kernel.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.gates import GATES, Gate
from octavo.kernels.triton.invariant.products import AHEAD, ALIGNED, load_lines
from octavo.kernels.triton.invariant.tiles import Tiles, fused_tiles
from octavo.kernels.triton.packed.codes import ask_for
from octavo.kernels.triton.pdl import begin, use_pdl, wait
from octavo.kernels.triton.step.elementwise import gated
from octavo.kernels.triton.step.norm import weighted
from octavo.kernels.triton.target import capability, has_copy_engine, is_roomy

# -- norms


@triton.jit
def sum_of_squares(wide, LEVELS: tl.constexpr):
    """Of a row of 2 ** LEVELS float32 numbers."""
    even, odd = tl.split(tl.reshape(wide, [wide.shape[0] // 2, 2]))
    total = tl.fma(even, even, odd * odd)
    for _level in tl.static_range(LEVELS - 1):
        total = tl.sum(tl.reshape(total, [total.shape[0] // 2, 2]), 1)
    return tl.sum(total, 0)  # of one number


@triton.jit
def inverse_rms(wide, eps, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    return tl.rsqrt(tl.fma(sum_of_squares(wide, LEVELS), 1.0 / SIZE, eps))


@triton.jit
def added_rows(x, residual):
    """The new stream, rounded as in the reference."""
    return (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)


@triton.jit
def add_norm_in_order(
    x, residual, weight, out, stream, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, LEVELS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    begin(PDL)
    column = tl.arange(0, PADDED)
    inside = column < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + column
    scales = tl.load(weight + column, mask=inside, other=0.0)
    wait(PDL)
    sums = added_rows(tl.load(x + at, mask=inside, other=0.0), tl.load(residual + at, mask=inside, other=0.0))
    tl.store(stream + at, sums, mask=inside)
    wide = sums.to(tl.float32)
    tl.store(out + at, weighted(wide * inverse_rms(wide, eps, SIZE, LEVELS), scales, sums.dtype), mask=inside)


def invariant_add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the normed sum and the sum, each [T, size]."""
    assert x.is_contiguous() and residual.is_contiguous() and x.shape == residual.shape
    size, out, stream = x.shape[-1], torch.empty_like(x), torch.empty_like(x)
    if x.numel():
        padded = triton.next_power_of_2(size)
        add_norm_in_order[(x.numel() // size,)](
            x, residual, weight, out, stream, eps, SIZE=size, PADDED=padded, LEVELS=padded.bit_length() - 1, PDL=use_pdl(),
            num_warps=min(max(padded // 512, 1), 16), launch_pdl=use_pdl(),
        )  # fmt: skip
    return out, stream


# -- products


@triton.jit
def row_scales(
    x,
    residual,
    norm_weight,
    stream,
    normed_rows,
    eps,
    rows,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    LEVELS: tl.constexpr,
    HELD: tl.constexpr,
    ROWS: tl.constexpr,
    KEEP_NORMED: tl.constexpr,
):
    """The inverse RMS of each row [ROWS], of which at most HELD exist. The first program stores the new stream."""
    column = tl.arange(0, PADDED)
    scales = tl.zeros([ROWS], tl.float32)
    for row in tl.static_range(HELD):
        present = (column < SIZE) & (row < rows)
        at = row * SIZE + column
        sums = added_rows(tl.load(x + at, mask=present, other=0.0), tl.load(residual + at, mask=present, other=0.0))
        wide = sums.to(tl.float32)
        scale = inverse_rms(wide, eps, SIZE, LEVELS)
        scales = tl.where(tl.arange(0, ROWS) == row, scale, scales)
        if tl.program_id(0) == 0:
            tl.store(stream + at, sums, mask=present)
            if KEEP_NORMED:
                weights = tl.load(norm_weight + column, mask=column < SIZE, other=0.0)
                tl.store(normed_rows + at, weighted(wide * scale, weights, sums.dtype), mask=present)
    return scales


@triton.jit(do_not_specialize=["rows"])
def norm_and_multiply(
    x,
    residual,
    norm_weight,
    stream,
    normed_rows,
    weight,
    weight_tiles,
    bias,
    out,
    eps,
    rows,
    wide,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    LEVELS: tl.constexpr,
    HELD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    BIASED: tl.constexpr,
    KEEP_NORMED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    PREFETCHED: tl.constexpr,
    PDL: tl.constexpr,
):
    """wide: numbers of a result. GATED: W has rows of gate over as many of up"""
    begin(PDL)
    kind = x.dtype.element_ty
    left = tl.program_id(0) * COLUMNS
    row, column, k = tl.arange(0, ROWS), left + tl.arange(0, COLUMNS), tl.arange(0, STEP)
    inside, line = column < wide, tl.minimum(column, wide - 1).to(tl.int64)[:, None] * SIZE
    line_of_w, line_of_up = weight + line + k[None, :], weight + wide.to(tl.int64) * SIZE + line + k[None, :]
    if PREFETCHED:
        ask_for(weight + tl.reshape(line, [COLUMNS]), tl.minimum(SIZE * 2, AHEAD))
        if GATED:
            ask_for(weight + wide.to(tl.int64) * SIZE + tl.reshape(line, [COLUMNS]), tl.minimum(SIZE * 2, AHEAD))
    wait(PDL)
    scales = row_scales(x, residual, norm_weight, stream, normed_rows, eps, rows, SIZE, PADDED, LEVELS, HELD, ROWS, KEEP_NORMED)
    total, second = tl.zeros([COLUMNS, ROWS], tl.float32), tl.zeros([COLUMNS, ROWS], tl.float32)
    at = row[:, None] * SIZE + k[None, :]
    for start in tl.range(0, SIZE, STEP, num_stages=STAGES):
        present = (row < rows)[:, None] & (start + k < SIZE)[None, :]
        sums = added_rows(tl.load(x + start + at, mask=present, other=0.0), tl.load(residual + start + at, mask=present, other=0.0))
        weights = tl.load(norm_weight + start + k, mask=start + k < SIZE, other=0.0)
        given = tl.trans(weighted(sums.to(tl.float32) * scales[:, None], weights[None, :], kind))
        if DESCRIBED:
            matrix = weight_tiles.load([left, start])
        else:
            matrix = load_lines(line_of_w, start, k[None, :], SIZE, SIZE % STEP == 0)
        total = tl.dot(matrix, given, total, input_precision="ieee")
        if GATED:
            if DESCRIBED:
                matrix = weight_tiles.load([wide + left, start])
            else:
                matrix = load_lines(line_of_up, start, k[None, :], SIZE, SIZE % STEP == 0)
            second = tl.dot(matrix, given, second, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    result = total.to(kind)
    if GATED:
        result = gated(result.to(tl.float32), second.to(kind).to(tl.float32), kind, GATE)
    target = row.to(tl.int64)[:, None] * wide + column[None, :]
    tl.store(out + target, tl.trans(result), mask=(row < rows)[:, None] & inside[None, :])


def invariant_norm_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None, how: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual) W^T, the new residual), for at most `FUSED_ROWS` rows"""
    out, stream, _ = _launch(x, residual, norm_weight, eps, weight, bias, None, False, how)
    return out, stream


def invariant_norm_router(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None, how: Tiles | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits of all experts, the normed rows, the new residual)"""
    out, stream, normed = _launch(x, residual, norm_weight, eps, weight, bias, None, True, how)
    return out, normed, stream


def invariant_norm_gate_up(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, gate: Gate, how: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """(the gated values of rms_norm(x + residual), the new residual)"""
    out, stream, _ = _launch(x, residual, norm_weight, eps, weight, None, gate, False, how)
    return out, stream


def _launch(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None, gate: Gate | None,
    keep_normed: bool, how: Tiles | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(the product, the new residual, the normed rows if they are kept)"""
    (rows, size), wide = x.shape, len(weight) // (1 if gate is None else 2)
    how = how or fused_tiles(x.dtype, gate is not None)
    assert x.is_contiguous() and residual.is_contiguous() and weight.is_contiguous() and rows <= how.rows and weight.shape[1] == size
    out, stream = torch.empty(rows, wide, dtype=x.dtype, device=x.device), torch.empty_like(x)
    normed, padded = torch.empty_like(x) if keep_normed else stream, triton.next_power_of_2(size)
    described = is_roomy(capability()) and x.dtype.itemsize == 2 and size % ALIGNED == 0 and has_copy_engine(capability())
    tiles: Any = TensorDescriptor(weight, [len(weight), size], [size, 1], [how.columns, how.step]) if described else weight
    norm_and_multiply[(triton.cdiv(wide, how.columns),)](
        x, residual, norm_weight, stream, normed, weight, tiles, x if bias is None else bias, out, eps, rows, wide, SIZE=size,
        PADDED=padded, LEVELS=padded.bit_length() - 1, HELD=triton.next_power_of_2(rows), ROWS=how.rows, COLUMNS=how.columns,
        STEP=how.step, STAGES=how.stages, GATED=gate is not None, GATE=GATES.index(gate or "swiglu"), BIASED=bias is not None,
        KEEP_NORMED=keep_normed, DESCRIBED=described, PREFETCHED=described and use_pdl(), PDL=use_pdl(), num_warps=how.warps,
        launch_pdl=use_pdl(),
    )  # fmt: skip
    return out, stream, normed
