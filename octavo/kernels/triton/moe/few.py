"""An MoE layer for a small batch: products of one row each, limited by reading the matrices of the chosen experts once.

    gate_up_row   a token's x and one of its experts: a program holds some whole rows of gate and up in registers
    down_row      a token and all its experts: a program holds some rows of each down, and adds their weighted results in registers

The second kernel loads its matrices while the first one still runs. It may read the choices before its wait, because the
first launches it only after its own wait, when the kernel that made the choices has ended (`pdl.py`).
"""

import triton
import triton.language as tl

from octavo.kernels.triton.gemv.gemv import tile_of
from octavo.kernels.triton.pdl import begin, wait
from octavo.kernels.triton.step.activation import gated


@triton.jit(do_not_specialize=["first"])
def gate_up_row(
    x,
    ids,
    weight,
    bias,
    out,
    first,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATE: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [choices, INNER]; rows of experts that are not in the stack are not written"""
    wait(PDL)
    begin(PDL)
    program, choice = tl.program_id(0), tl.program_id(1)
    kind = out.dtype.element_ty
    expert = (tl.load(ids + choice) - first).to(tl.int64)
    if (expert >= 0) & (expert < COUNT):
        gate = tile_of(weight + expert * (2 * INNER * SIZE), program, SIZE, PADDED, INNER, COLUMNS)
        up = tile_of(weight + expert * (2 * INNER * SIZE) + INNER * SIZE, program, SIZE, PADDED, INNER, COLUMNS)
        k = tl.arange(0, PADDED)
        row = tl.load(x + choice // CHOSEN * SIZE + k, mask=k < SIZE, other=0.0).to(tl.float32)[None, :]
        gates, ups = tl.sum(gate.to(tl.float32) * row, 1), tl.sum(up.to(tl.float32) * row, 1)
        column = program * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < INNER
        if BIASED:
            gates += tl.load(bias + expert * (2 * INNER) + column, mask=inside, other=0.0).to(tl.float32)
            ups += tl.load(bias + expert * (2 * INNER) + INNER + column, mask=inside, other=0.0).to(tl.float32)
        result = gated(gates.to(kind).to(tl.float32), ups.to(kind).to(tl.float32), kind, GATE)
        tl.store(out + choice.to(tl.int64) * INNER + column, result, mask=inside)


@triton.jit(do_not_specialize=["first"])
def down_row(
    x,
    ids,
    weights,
    weight,
    bias,
    out,
    first,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [choices, SIZE] -> out [T, HIDDEN]"""
    begin(PDL)
    program, token = tl.program_id(0), tl.program_id(1)
    k, column = tl.arange(0, PADDED)[None, :], program * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    matrices = ()
    for index in tl.static_range(CHOSEN):  # all are loaded before any is used
        expert = (tl.load(ids + token * CHOSEN + index) - first).to(tl.int64)
        there = (expert >= 0) & (expert < COUNT)
        place = (expert * HIDDEN + column) * SIZE + k
        matrices = matrices + (tl.load(weight + place, mask=there & (column < HIDDEN) & (k < SIZE), other=0.0),)  # type: ignore[assignment]
    wait(PDL)
    total = tl.zeros([COLUMNS, PADDED], tl.float32)
    biases = tl.zeros([COLUMNS, 1], tl.float32)
    for index in tl.static_range(CHOSEN):
        choice = token * CHOSEN + index
        expert = (tl.load(ids + choice) - first).to(tl.int64)
        there = (expert >= 0) & (expert < COUNT)
        share = tl.load(weights + choice)
        row = tl.load(x + choice.to(tl.int64) * SIZE + k, mask=there & (k < SIZE), other=0.0).to(tl.float32) * share
        total += matrices[index].to(tl.float32) * row
        if BIASED:
            biases += tl.load(bias + expert * HIDDEN + column, mask=there & (column < HIDDEN), other=0.0).to(tl.float32) * share
    result = tl.sum(total, 1)[:, None] + biases
    tl.store(out + token.to(tl.int64) * HIDDEN + column, result.to(out.dtype.element_ty), mask=column < HIDDEN)
