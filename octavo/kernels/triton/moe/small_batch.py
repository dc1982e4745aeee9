"""An MoE layer for a small batch: products of one row each, limited by reading the matrices of the chosen experts once.

    gate_up_row    a token's x and one of its experts: a program holds some whole rows of gate and up in registers
    down_row       a token and all its experts: a program holds some rows of each down, and adds their weighted results in registers
                   A shared expert is one more in both, which needs no choice
    gate_up_codes, down_codes    the same for packed codes, which are multiplied as in `packed/gemv.py`

The second kernel loads its matrices while the first one still runs. It may read the choices before its wait, because the
first launches it only after its own wait, when the kernel that made the choices has ended (`pdl.py`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.device_codes import DeviceCodes
from octavo.kernels.gates import GATES, Gate
from octavo.kernels.triton.gemv.gemv import tile_of
from octavo.kernels.triton.moe.route import Choices, Stack
from octavo.kernels.triton.packed.codes import FLOATS, MAX_SPAN, WORD_BITS
from octavo.kernels.triton.packed.gemv import asked_for, float_products, in_spans, products, x_of_a_step
from octavo.kernels.triton.packed.products import form_of, table_of
from octavo.kernels.triton.pdl import begin, use_pdl, wait
from octavo.kernels.triton.step.elementwise import gated

HELD = 16384  # matrix elements that a program holds
MAX_HELD = 2 * HELD
PER_THREAD = 64  # elements in one thread's registers
MAX_COLUMNS = 8
THREADS = 32  # in a warp
BLOCKS = 8  # of a row of codes that a warp has at once

# -- how the work is divided


class Row(NamedTuple):
    columns: int  # rows of W in a tile
    warps: int


# On an H200: (elements of a row of W, padded to a power of two; rows held for each column)
MEASURED = {(2048, 2): Row(columns=1, warps=2), (1024, 8): Row(columns=2, warps=4)}


class PackedRow(NamedTuple):
    columns: int
    warps: int
    steps: int  # per row of W
    ahead: int  # steps whose codes are in flight


def row_tiles(size: int, matrices: int) -> Row | None:
    """For floats: `matrices` rows of `size` elements are held for each column. None if these are too many."""
    padded = triton.next_power_of_2(size)
    if padded * matrices > MAX_HELD:
        return None
    if (padded, matrices) in MEASURED:
        return MEASURED[padded, matrices]
    columns = max(min(HELD // (padded * matrices), MAX_COLUMNS), 1)
    return Row(columns, min(max(columns * padded * matrices // (THREADS * PER_THREAD), 1), 16))


def packed_row_tiles(weight: DeviceCodes, matrices: int) -> PackedRow:
    """For codes: `matrices` rows form a column, one after the other.

    Uses the number of warps that leaves the fewest threads idle at the end of a row, with few steps: steps need registers.
    """
    steps = {warps: -(-weight.blocks // (BLOCKS * warps)) for warps in (4, 2, 1)}
    warps = min(steps, key=lambda warps: steps[warps] * warps)  # the largest in a tie
    if matrices == 1:
        return PackedRow(8 if steps[warps] == 1 else 4, warps, steps[warps], ahead=min(steps[warps], 2))
    return PackedRow(2, warps, steps[warps], ahead=min(steps[warps] * matrices, 8 if steps[warps] == 1 else 2))


# -- floats


@triton.jit(do_not_specialize=["first"])
def gate_up_row(
    x, ids, weight, bias, shared, out, shared_out, first,
    COUNT: tl.constexpr, CHOSEN: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr,
    COLUMNS: tl.constexpr, GATE: tl.constexpr, BIASED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [choices, INNER]; rows of experts that are not in the stack are not written. SHARED: the width of the shared expert, or 0

    Behind the choices are the tokens, for the shared expert: shared_out [T, SHARED].
    """
    wait(PDL)
    begin(PDL)
    program, choice = tl.program_id(0), tl.program_id(1)
    choices = tl.num_programs(1) // (CHOSEN + 1) * CHOSEN if SHARED else tl.num_programs(1)
    if choice < choices:
        expert = (tl.load(ids + choice) - first).to(tl.int64)
        if (expert >= 0) & (expert < COUNT):
            gated_row(
                x + choice // CHOSEN * SIZE, weight + expert * (2 * INNER * SIZE), bias + expert * (2 * INNER),
                out + choice.to(tl.int64) * INNER, program, SIZE, PADDED, INNER, COLUMNS, GATE, BIASED,
            )  # fmt: skip
    elif SHARED:
        token = choice - choices
        gated_row(
            x + token * SIZE, shared, bias, shared_out + token.to(tl.int64) * SHARED, program, SIZE, PADDED, SHARED, COLUMNS, GATE, False
        )


@triton.jit
def gated_row(
    x, weight, bias, out, program,
    SIZE: tl.constexpr, PADDED: tl.constexpr, INNER: tl.constexpr, COLUMNS: tl.constexpr, GATE: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Some columns of the gated values of one row x, of one expert."""
    kind = out.dtype.element_ty
    gate = tile_of(weight, program, SIZE, PADDED, INNER, COLUMNS)
    up = tile_of(weight + INNER * SIZE, program, SIZE, PADDED, INNER, COLUMNS)
    k, column = tl.arange(0, PADDED), program * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(x + k, mask=k < SIZE, other=0.0).to(tl.float32)[None, :]
    gates, ups = tl.sum(gate.to(tl.float32) * row, 1), tl.sum(up.to(tl.float32) * row, 1)
    inside = column < INNER
    if BIASED:
        gates += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        ups += tl.load(bias + INNER + column, mask=inside, other=0.0).to(tl.float32)
    result = gated(gates.to(kind).to(tl.float32), ups.to(kind).to(tl.float32), kind, GATE)
    tl.store(out + column, result, mask=inside)


@triton.jit(do_not_specialize=["first"])
def down_row(
    x, ids, weights, weight, bias, shared_x, shared, hidden_x, shared_gate, out, first,
    COUNT: tl.constexpr, CHOSEN: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, HIDDEN: tl.constexpr,
    HIDDEN_PADDED: tl.constexpr, SHARED: tl.constexpr, SHARED_PADDED: tl.constexpr, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr,
    BIASED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [choices, SIZE] -> out [T, HIDDEN]. WEIGHTED: the weight of the shared expert is sigmoid(hidden_x shared_gate), otherwise 1"""
    begin(PDL)
    program, token = tl.program_id(0), tl.program_id(1)
    k, column = tl.arange(0, PADDED)[None, :], program * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    matrices = ()
    for index in tl.static_range(CHOSEN):  # all are loaded before any is used
        expert = (tl.load(ids + token * CHOSEN + index) - first).to(tl.int64)
        there = (expert >= 0) & (expert < COUNT)
        place = (expert * HIDDEN + column) * SIZE + k
        matrices = matrices + (tl.load(weight + place, mask=there & (column < HIDDEN) & (k < SIZE), other=0.0),)  # type: ignore[assignment]
    if SHARED:
        of_all = tile_of(shared, program, SHARED, SHARED_PADDED, HIDDEN, COLUMNS)
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
    if SHARED:
        k_shared = tl.arange(0, SHARED_PADDED)[None, :]
        row = tl.load(shared_x + token.to(tl.int64) * SHARED + k_shared, mask=k_shared < SHARED, other=0.0).to(tl.float32)
        added = tl.sum(of_all.to(tl.float32) * row, 1)[:, None]
        if WEIGHTED:
            at = tl.arange(0, HIDDEN_PADDED)
            stream = tl.load(hidden_x + token.to(tl.int64) * HIDDEN + at, mask=at < HIDDEN, other=0.0).to(tl.float32)
            logit = tl.sum(stream * tl.load(shared_gate + at, mask=at < HIDDEN, other=0.0).to(tl.float32), 0)
            added = added / (1 + tl.exp(-logit))
        result += added
    tl.store(out + token.to(tl.int64) * HIDDEN + column, result.to(out.dtype.element_ty), mask=column < HIDDEN)


# -- packed codes: a program has COLUMNS // 2 rows of gate and as many of up, or COLUMNS rows of each down
#
# A row of W is read in STEPS; AHEAD of them are in flight before the first is used, of several experts if necessary.


@triton.jit
def stack_of(words, scales, expert, height, blocks, BITS: tl.constexpr, GROUP: tl.constexpr):
    """The start of the words and scales of one expert's matrix, which has `height` rows."""
    SPAN: tl.constexpr = min(GROUP, MAX_SPAN)
    BLOCK: tl.constexpr = WORD_BITS // BITS * SPAN
    return words + expert * height * (blocks * (SPAN // 2)), scales + expert * height * tl.cdiv(blocks * BLOCK, GROUP)


@triton.jit
def ask_for_step(
    ids, words, scales, choice, first, one: tl.constexpr, blocks,
    COUNT: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
    STEPS: tl.constexpr, GATED: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
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
    x, ids, order, words, scales, table, bias, out, factor, first,
    COUNT: tl.constexpr, CHOSEN: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    TABLE: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr, ORDERED: tl.constexpr, GATE: tl.constexpr,
    BIASED: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
    x, ids, weights, order, words, scales, table, bias, out, factor, first,
    COUNT: tl.constexpr, CHOSEN: tl.constexpr, SIZE: tl.constexpr, HIDDEN: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    TABLE: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr, ORDERED: tl.constexpr,
    BIASED: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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


# -- launches


class Shared(NamedTuple):
    """An expert through which every token passes, in floats."""

    gate_up: Tensor  # [2 * width, hidden]
    down: Tensor  # [hidden, width]
    gate: Tensor | None  # [1, hidden]; None: its weight is 1


def few_gate_up(
    x: Tensor, choices: Choices, stack: Stack, bias: Tensor | None, gate: Gate, shared: Shared | None = None
) -> tuple[Tensor, Tensor]:
    """Returns [choices, inner], and [T, width] of the shared expert."""
    inner, size, pdl = len(stack) // choices.count // 2, x.shape[1], use_pdl()
    width = 0 if shared is None else shared.down.shape[1]
    sizes = (choices.ids.numel(), inner), (len(x), width)
    out, of_shared = (torch.empty(size, dtype=x.dtype, device=x.device) for size in sizes)
    common = {"COUNT": choices.count, "CHOSEN": choices.chosen, "SIZE": size, "INNER": inner, "GATE": GATES.index(gate), "PDL": pdl}
    if isinstance(stack, Tensor):
        tiles = row_tiles(size, 2)
        assert tiles is not None, f"rows of {size}"
        rows = len(out) + (len(x) if shared else 0)
        gate_up_row[(triton.cdiv(max(inner, width), tiles.columns), rows)](
            x, choices.ids, stack, stack if bias is None else bias, stack if shared is None else shared.gate_up, out, of_shared,
            choices.first, **common, PADDED=triton.next_power_of_2(size), SHARED=width, COLUMNS=tiles.columns, BIASED=bias is not None,
            num_warps=tiles.warps, launch_pdl=pdl,
        )  # fmt: skip
        return out, of_shared
    how = packed_row_tiles(stack, 1)
    gate_up_codes[(triton.cdiv(inner, how.columns // 2), len(out))](
        x, choices.ids, stack.scales if stack.order is None else stack.order, stack.words.view(torch.uint32), stack.scales,
        table_of(stack), x if bias is None else bias, out, stack.factor, choices.first, **common, **form_of(stack),
        COLUMNS=how.columns, STEPS=how.steps, AHEAD=how.ahead, ORDERED=stack.order is not None, BIASED=bias is not None,
        WARPS=how.warps, num_warps=how.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out, of_shared


def few_down(
    gated_rows: tuple[Tensor, Tensor], choices: Choices, stack: Stack, bias: Tensor | None, x: Tensor, shared: Shared | None = None
) -> Tensor:
    """The results of `few_gate_up` -> [T, hidden]. x [T, hidden]: from which they were computed"""
    (rows, of_shared), (tokens, hidden), pdl = gated_rows, x.shape, use_pdl()
    size, width = rows.shape[1], of_shared.shape[1] if shared else 0
    out = torch.empty_like(x)
    common = {"COUNT": choices.count, "CHOSEN": choices.chosen, "SIZE": size, "HIDDEN": hidden, "PDL": pdl}
    if isinstance(stack, Tensor):
        tiles = row_tiles(size, choices.chosen)
        assert tiles is not None, f"{choices.chosen} rows of {size}"
        down_row[(triton.cdiv(hidden, tiles.columns), tokens)](
            rows, choices.ids, choices.weights, stack, stack if bias is None else bias, of_shared, stack if shared is None else shared.down,
            x, x if shared is None or shared.gate is None else shared.gate, out, choices.first, **common,
            PADDED=triton.next_power_of_2(size), HIDDEN_PADDED=triton.next_power_of_2(hidden), SHARED=width,
            SHARED_PADDED=triton.next_power_of_2(max(width, 1)), WEIGHTED=shared is not None and shared.gate is not None,
            COLUMNS=tiles.columns, BIASED=bias is not None, num_warps=tiles.warps, launch_pdl=pdl,
        )  # fmt: skip
        return out
    how = packed_row_tiles(stack, choices.chosen)
    down_codes[(triton.cdiv(hidden, how.columns), tokens)](
        rows, choices.ids, choices.weights, stack.scales if stack.order is None else stack.order, stack.words.view(torch.uint32),
        stack.scales, table_of(stack), x if bias is None else bias, out, stack.factor, choices.first, **common, **form_of(stack),
        COLUMNS=how.columns, STEPS=how.steps, AHEAD=how.ahead, ORDERED=stack.order is not None, BIASED=bias is not None,
        WARPS=how.warps, num_warps=how.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
