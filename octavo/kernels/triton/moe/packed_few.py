"""An MoE layer with packed codes for a small batch: `few.py` does this for floats; codes are multiplied as in `packed/gemv.py`.

    gate_up_codes   a token's x and one of its experts: a program has COLUMNS // 2 rows of gate and as many of up
    down_codes      a token and all its experts: a program has COLUMNS rows of each

A row of W is read in STEPS; AHEAD of them are in flight before the first is used, of several experts if necessary.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.packed.codes import FLOATS, MAX_SPAN, WORD_BITS
from octavo.kernels.triton.packed.gemv import asked_for, float_products, in_spans, products, x_of_a_step
from octavo.kernels.triton.pdl import begin, wait
from octavo.kernels.triton.step.activation import gated


@triton.jit
def stack_of(words, scales, expert, height, blocks, BITS: tl.constexpr, GROUP: tl.constexpr):
    """The start of the words and scales of one expert's matrix, which has `height` rows."""
    SPAN: tl.constexpr = min(GROUP, MAX_SPAN)
    BLOCK: tl.constexpr = WORD_BITS // BITS * SPAN
    return words + expert * height * (blocks * (SPAN // 2)), scales + expert * height * tl.cdiv(blocks * BLOCK, GROUP)


@triton.jit
def ask_for_step(
    ids,
    words,
    scales,
    choice,
    first,
    one: tl.constexpr,
    blocks,
    COUNT: tl.constexpr,
    WIDE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    GATED: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Loads words and scales of step one % STEPS of a program's rows, for the expert of choice + one // STEPS; zeros if it is absent."""
    expert = (tl.load(ids + choice + one // STEPS) - first).to(tl.int64)
    wide = tl.where((expert >= 0) & (expert < COUNT), WIDE, 0)
    words, scales = stack_of(words, scales, expert, 2 * WIDE if GATED else WIDE, blocks, BITS, GROUP)
    return asked_for(words, scales, tl.program_id(0), one % STEPS, blocks, wide, BITS, GROUP, COLUMNS, GATED, WARPS, False)


@triton.jit
def times_step(
    asked, x, order, table, one: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, TABLE: tl.constexpr,
    STEPS: tl.constexpr, ORDERED: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The threads' partial products of that step with a row x [SIZE], [threads, COLUMNS]."""
    SPAN: tl.constexpr = min(GROUP, MAX_SPAN)
    RUN: tl.constexpr = min(GROUP // SPAN, WORD_BITS // BITS)
    STEP: tl.constexpr = 8 * WARPS * (WORD_BITS // BITS) * SPAN
    columns = one % STEPS * STEP + tl.arange(0, STEP)
    spans = in_spans(x_of_a_step(x, order, columns, SIZE, ORDERED, False), BITS, SPAN)
    if TABLE == FLOATS:
        return float_products(asked[0], asked[1], spans, RUN)
    else:
        return products(asked[0], asked[1], spans, table, BITS, RUN, TABLE, x.dtype.element_ty)


@triton.jit(do_not_specialize=["first"])
def gate_up_codes(
    x,
    ids,
    order,
    words,
    scales,
    table,
    bias,
    out,
    factor,
    first,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TABLE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    AHEAD: tl.constexpr,
    ORDERED: tl.constexpr,
    GATE: tl.constexpr,
    BIASED: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [choices, INNER]; rows of experts that are not in the stack are not written"""
    wait(PDL)
    begin(PDL)
    program, choice = tl.program_id(0), tl.program_id(1)
    kind = out.dtype.element_ty
    HALF: tl.constexpr = COLUMNS // 2
    BLOCK: tl.constexpr = WORD_BITS // BITS * min(GROUP, MAX_SPAN)
    blocks = (SIZE + BLOCK - 1) // BLOCK
    expert = (tl.load(ids + choice) - first).to(tl.int64)
    if (expert >= 0) & (expert < COUNT):
        source = ids, words, scales, choice, first
        row = x + choice // CHOSEN * SIZE
        total = tl.zeros([32 * WARPS, COLUMNS], tl.float32)
        asked = ()
        for one in tl.static_range(AHEAD):
            asked = asked + (ask_for_step(*source, one, blocks, COUNT, INNER, BITS, GROUP, COLUMNS, STEPS, True, WARPS),)  # type: ignore[assignment]
        for one in tl.static_range(STEPS):
            if one + AHEAD < STEPS:
                following = ask_for_step(*source, one + AHEAD, blocks, COUNT, INNER, BITS, GROUP, COLUMNS, STEPS, True, WARPS)
                asked = asked + (following,)  # type: ignore[assignment]
            total += times_step(asked[one], row, order, table, one, SIZE, BITS, GROUP, TABLE, STEPS, ORDERED, WARPS)
        gate, up = tl.split(tl.permute(tl.reshape(tl.sum(total, 0) * factor, [2, HALF]), (1, 0)))
        column = program * HALF + tl.arange(0, HALF)
        inside = column < INNER
        if BIASED:
            gate += tl.load(bias + expert * (2 * INNER) + column, mask=inside, other=0.0).to(tl.float32)
            up += tl.load(bias + expert * (2 * INNER) + INNER + column, mask=inside, other=0.0).to(tl.float32)
        result = gated(gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32), kind, GATE)
        tl.store(out + choice.to(tl.int64) * INNER + column, result, mask=inside)


@triton.jit(do_not_specialize=["first"])
def down_codes(
    x,
    ids,
    weights,
    order,
    words,
    scales,
    table,
    bias,
    out,
    factor,
    first,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TABLE: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    AHEAD: tl.constexpr,
    ORDERED: tl.constexpr,
    BIASED: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [choices, SIZE] -> out [T, HIDDEN]"""
    begin(PDL)
    program, token = tl.program_id(0), tl.program_id(1)
    BLOCK: tl.constexpr = WORD_BITS // BITS * min(GROUP, MAX_SPAN)
    blocks = (SIZE + BLOCK - 1) // BLOCK
    column = program * COLUMNS + tl.arange(0, COLUMNS)
    source = ids, words, scales, token * CHOSEN, first
    total, biases = tl.zeros([32 * WARPS, COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
    asked = ()
    for one in tl.static_range(AHEAD):
        asked = asked + (ask_for_step(*source, one, blocks, COUNT, HIDDEN, BITS, GROUP, COLUMNS, STEPS, False, WARPS),)  # type: ignore[assignment]
    wait(PDL)
    for one in tl.static_range(CHOSEN * STEPS):
        if one + AHEAD < CHOSEN * STEPS:
            following = ask_for_step(*source, one + AHEAD, blocks, COUNT, HIDDEN, BITS, GROUP, COLUMNS, STEPS, False, WARPS)
            asked = asked + (following,)  # type: ignore[assignment]
        choice = token * CHOSEN + one // STEPS
        expert = (tl.load(ids + choice) - first).to(tl.int64)
        there = (expert >= 0) & (expert < COUNT)
        share = tl.load(weights + choice)
        row = x + choice.to(tl.int64) * SIZE
        given = times_step(asked[one], row, order, table, one, SIZE, BITS, GROUP, TABLE, STEPS, ORDERED, WARPS)
        total += tl.where(there, given * (factor * share), 0.0)  # values that were never written may be NaN
        if BIASED and one % STEPS == 0:
            inside = there & (column < HIDDEN)
            biases += tl.load(bias + expert * HIDDEN + column, mask=inside, other=0.0).to(tl.float32) * share
    result = tl.sum(total, 0) + biases
    tl.store(out + token.to(tl.int64) * HIDDEN + column, result.to(out.dtype.element_ty), mask=column < HIDDEN)
