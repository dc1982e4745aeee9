"""An MoE layer of few tokens with `deterministic`: the products of `grouped.py`, with the same bits, and without sorting.

    choice of a token -> a tile with one row       gate_up -> gate -> down -> the weighted sum of a token's choices

Tiles have one row each, so experts are read from the choices. Products of codes have a program for each segment of the columns, and the
kernels behind them, which are there in any case, add up the segments in their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.device_codes import DeviceCodes
from octavo.kernels.gates import GATES, Gate
from octavo.kernels.triton.invariant.tiles import direct_code_tiles, direct_tiles
from octavo.kernels.triton.moe.grouped import multiply_tiles, multiply_tiles_of_codes, segments_of, weighted_sum
from octavo.kernels.triton.moe.route import Choices, Stack
from octavo.kernels.triton.packed.products import form_of, in_order, table_of
from octavo.kernels.triton.pdl import begin, use_pdl, wait
from octavo.kernels.triton.step.elementwise import gated

ROWS = 16  # of a tile, of which one is used
SUM_TILE, GATE_TILE = 256, 512


@triton.jit
def sum_segments(parts, at, inside, choices, wide, SEGMENTS: tl.constexpr):
    total = tl.load(parts + at, mask=inside, other=0.0)
    for segment in tl.static_range(1, SEGMENTS):
        total += tl.load(parts + segment * choices * wide + at, mask=inside, other=0.0)
    return total


@triton.jit(do_not_specialize=["choices", "first"])
def gate_segments(
    parts,
    ids,
    bias,
    out,
    choices,
    first,
    COUNT: tl.constexpr,
    INNER: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TILE: tl.constexpr,
    GATE: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """parts [SEGMENTS, choices, 2 * INNER] -> out [choices, INNER]"""
    begin(PDL)
    choice, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    wait(PDL)
    expert = tl.load(ids + choice).to(tl.int64) - first
    inside = (column < INNER) & (expert >= 0) & (expert < COUNT)
    kind = out.dtype.element_ty
    at = choice * 2 * INNER + column
    gate = sum_segments(parts, at, inside, choices, 2 * INNER, SEGMENTS)
    up = sum_segments(parts, at + INNER, inside, choices, 2 * INNER, SEGMENTS)
    if BIASED:
        gate += tl.load(bias + expert * (2 * INNER) + column, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + expert * (2 * INNER) + INNER + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + choice * INNER + column, gated(gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32), kind, GATE), mask=inside)


@triton.jit(do_not_specialize=["choices", "first"])
def weigh_segments(
    parts,
    ids,
    weights,
    bias,
    out,
    choices,
    first,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    SEGMENTS: tl.constexpr,
    TILE: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """parts [SEGMENTS, choices, HIDDEN] -> out [T, HIDDEN], as by `sum_choices`"""
    begin(PDL)
    token, column = tl.program_id(0), tl.program_id(1) * TILE + tl.arange(0, TILE)
    kind = out.dtype.element_ty
    total = tl.zeros([TILE], tl.float32)
    wait(PDL)
    for index in tl.static_range(CHOSEN):
        choice = token * CHOSEN + index
        expert = tl.load(ids + choice).to(tl.int64) - first
        wanted = (column < HIDDEN) & (expert >= 0) & (expert < COUNT)
        part = sum_segments(parts, choice * HIDDEN + column, wanted, choices, HIDDEN, SEGMENTS)
        if BIASED:
            part += tl.load(bias + expert * HIDDEN + column, mask=wanted, other=0.0).to(tl.float32)
        total = tl.fma(part.to(kind).to(tl.float32), tl.load(weights + choice), total)
    tl.store(out + token.to(tl.int64) * HIDDEN + column, total.to(kind), mask=column < HIDDEN)


def direct_gate_up(x: Tensor, choices: Choices, stack: Stack, bias: Tensor | None, gate: Gate) -> Tensor:
    """[choices, inner]; rows of experts that are not in the stack are not written"""
    number, inner = choices.ids.numel(), len(stack) // choices.count // 2
    out = torch.empty(number, inner, dtype=x.dtype, device=x.device)
    if isinstance(stack, Tensor):
        _multiply(x, choices, stack, bias, out, gate)
        return out
    parts = _multiply_codes(in_order(x, stack), choices, stack, 2 * inner, picked=True)
    gate_segments[(number, triton.cdiv(inner, GATE_TILE))](
        parts, choices.ids, parts if bias is None else bias, out, number, choices.first, COUNT=choices.count, INNER=inner,
        SEGMENTS=len(parts), TILE=GATE_TILE, GATE=GATES.index(gate), BIASED=bias is not None, PDL=use_pdl(), num_warps=4,
        launch_pdl=use_pdl(),
    )  # fmt: skip
    return out


def direct_down(x: Tensor, choices: Choices, stack: Stack, bias: Tensor | None, hidden: int) -> Tensor:
    """x [choices, inner] -> [T, hidden]"""
    number = choices.ids.numel()
    if isinstance(stack, Tensor):
        of_choices = torch.empty(number, hidden, dtype=x.dtype, device=x.device)
        _multiply(x, choices, stack, bias, of_choices, None)
        return weighted_sum(of_choices, choices, x.dtype)
    parts, out = _multiply_codes(in_order(x, stack), choices, stack, hidden, picked=False), x.new_empty(len(choices.ids), hidden)
    weigh_segments[(len(out), triton.cdiv(hidden, SUM_TILE))](
        parts, choices.ids, choices.weights, parts if bias is None else bias, out, number, choices.first, COUNT=choices.count,
        CHOSEN=choices.chosen, HIDDEN=hidden, SEGMENTS=len(parts), TILE=SUM_TILE, BIASED=bias is not None, PDL=use_pdl(), num_warps=4,
        launch_pdl=use_pdl(),
    )  # fmt: skip
    return out


def _multiply(x: Tensor, choices: Choices, stack: Tensor, bias: Tensor | None, out: Tensor, gate: Gate | None) -> None:
    how, number = direct_tiles(x.dtype, gate is not None), choices.ids.numel()
    multiply_tiles[(triton.cdiv(out.shape[1], how.columns), number)](
        x, choices.ids, choices.ids, choices.ids, stack, stack if bias is None else bias, out, number, choices.first, COUNT=choices.count,
        CHOSEN=choices.chosen, SIZE=stack.shape[1], WIDE=out.shape[1], ROWS=ROWS, COLUMNS=how.columns, STEP=how.step, STAGES=how.stages,
        GATED=gate is not None, GATE=GATES.index(gate or "swiglu"), BIASED=bias is not None, DIRECT=True, PDL=use_pdl(),
        num_warps=how.warps, launch_pdl=use_pdl(),
    )  # fmt: skip


def _multiply_codes(x: Tensor, choices: Choices, stack: DeviceCodes, wide: int, picked: bool) -> Tensor:
    """[segments, choices, wide] float32, without the bias"""
    how, number, segments = direct_code_tiles(x.dtype), choices.ids.numel(), segments_of(stack)
    parts = torch.empty(segments, number, wide, dtype=torch.float32, device=x.device)
    multiply_tiles_of_codes[(triton.cdiv(wide, how.columns), number, segments)](
        x, choices.ids, choices.ids, choices.ids, stack.words, stack.scales, table_of(stack), x, parts, stack.factor, number, choices.first,
        COUNT=choices.count, CHOSEN=choices.chosen, SIZE=stack.size, WIDE=wide, **form_of(stack), ROWS=ROWS, COLUMNS=how.columns,
        STAGES=how.stages, PICKED=picked, BIASED=False, SEGMENTS=segments, DIRECT=True, WARPS=how.warps, PDL=use_pdl(),
        num_warps=how.warps, launch_pdl=use_pdl(),
    )  # fmt: skip
    return parts
