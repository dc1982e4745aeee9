"""y = x W^T of packed codes for up to 8 rows, as `packed_few` has it, where one stream waits for nothing but the codes.

A program asks for all words of its lines before it waits for the kernel in front of it, and holds them in registers:

    words of HELD steps | wait | x made ready | step 0, words of step HELD | step 1, words of step HELD + 1 | ...

With NORM, residual add and RMS norm stand in front: every program makes x ready for itself (a few KB, out of the L2), and the
first one stores the new residual. ORDERED, columns of x are picked as those of the codes stand. Sizes are constants, and whole.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.dependent import begin, wait
from octavo.kernels.triton.packed_few import added_up, column_of, multiplied, stored
from octavo.kernels.triton.packed_order import by_fours, gathered, spread
from octavo.kernels.triton.packed_parts import MAX_SPAN, WORD_BITS

X_AHEAD = tl.constexpr(4)  # steps for which x is asked ahead, where it is not held whole


@triton.jit
def inverses(squares, eps, SIZE: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr):
    """Sums of squares of stretches [lanes] -> what each lane's row is multiplied by."""
    lane = tl.arange(0, squares.shape[0])
    same = (lane[:, None] % ROWS == lane[None, :] % ROWS) & (lane < ROWS * SPLITS)[None, :]
    return tl.rsqrt(tl.sum(tl.where(same, squares[None, :], 0.0), 1) / SIZE + eps)


@triton.jit(do_not_specialize=["rows"])
def packed_held(
    x,
    residual,
    norm_weight,
    stream,
    order,
    words,
    scales,
    bias,
    out,
    eps,
    factor,
    rows,
    wide,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    HELD: tl.constexpr,
    NORM: tl.constexpr,
    ORDERED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    WARPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    PER_WORD: tl.constexpr = WORD_BITS // BITS
    SPAN: tl.constexpr = min(GROUP, MAX_SPAN)
    BLOCK: tl.constexpr = PER_WORD * SPAN
    RUN: tl.constexpr = min(GROUP // SPAN, PER_WORD)  # spans of a block with one scale
    RUNS: tl.constexpr = PER_WORD // RUN
    BLOCKS: tl.constexpr = SIZE // BLOCK
    STEPS: tl.constexpr = BLOCKS // SPLITS
    GROUPS: tl.constexpr = SIZE // GROUP
    LINES: tl.constexpr = SPLITS * COLUMNS

    begin(DEPENDENT)
    kind = x.dtype.element_ty
    program = tl.program_id(0)
    line, lane = tl.arange(0, LINES), tl.arange(0, LANES)[:, None]
    column, present = column_of(line, program, wide, COLUMNS, GATED)
    loaded = spread(LINES, WARPS)[:, :, None]
    loaded_column, loaded_present = column_of(loaded, program, wide, COLUMNS, GATED)
    line_of_words = words + (loaded_column.to(tl.int64) * BLOCKS + loaded // COLUMNS) * SPAN + tl.arange(0, SPAN)[None, None, :]
    line_of_scales = scales + column.to(tl.int64) * GROUPS
    first = line // COLUMNS * BLOCK
    held = ()
    pairs = ()
    for step in tl.static_range(min(HELD, STEPS)):
        held = held + (tl.load(line_of_words + step * (SPLITS * SPAN), mask=loaded_present, other=0),)  # type: ignore[assignment]
        for run in tl.static_range(RUNS):
            place = (first + (step * SPLITS * BLOCK + run * RUN * SPAN)) // GROUP
            pairs = pairs + (tl.load(line_of_scales + place, mask=present, other=0),)  # type: ignore[assignment]
    own = lane < ROWS * SPLITS
    row = tl.minimum(lane % ROWS, rows - 1) * SIZE
    k = tl.minimum(lane // ROWS, SPLITS - 1) * BLOCK + tl.arange(0, RUN * SPAN)[None, :]
    places = ()
    norm_weights = ()
    for step in tl.static_range(STEPS):
        for run in tl.static_range(RUNS):
            place = k + (step * SPLITS * BLOCK + run * RUN * SPAN)
            if ORDERED:
                place = tl.load(order + place).to(tl.int32)
            places = places + (place,)  # type: ignore[assignment]
            if NORM:
                norm_weights = norm_weights + (tl.load(norm_weight + place),)  # type: ignore[assignment]
    wait(DEPENDENT)

    asked = ()
    for index in tl.static_range(min(STEPS, STEPS if NORM else X_AHEAD) * RUNS):
        asked = asked + (tl.load(x + row + places[index]),)  # type: ignore[assignment]
    ready = asked
    if NORM:
        added = ()
        for index in tl.static_range(STEPS * RUNS):
            added = added + (tl.load(residual + row + places[index]),)  # type: ignore[assignment]
        squares = tl.zeros([LANES], tl.float32)
        sums = ()
        for index in tl.static_range(STEPS * RUNS):
            rounded = (asked[index].to(tl.float32) + added[index].to(tl.float32)).to(kind)  # type: ignore[var-annotated]
            squares += tl.sum(rounded.to(tl.float32) * rounded.to(tl.float32), 1)
            sums = sums + (rounded,)
        inverse = inverses(squares, eps, SIZE, ROWS, SPLITS)[:, None]
        ready = ()
        for index in tl.static_range(STEPS * RUNS):
            scaled = (sums[index].to(tl.float32) * inverse).to(kind).to(tl.float32)
            ready = ready + ((scaled * norm_weights[index].to(tl.float32)).to(kind),)
        if program == 0:
            for index in tl.static_range(STEPS * RUNS):
                tl.store(stream + row + places[index], sums[index], mask=own & (lane % ROWS < rows))

    total = tl.zeros([LINES, LANES], tl.float32)
    for step in tl.static_range(STEPS):
        if step + HELD < STEPS:
            held = held + (tl.load(line_of_words + (step + HELD) * (SPLITS * SPAN), mask=loaded_present, other=0),)  # type: ignore[assignment]
            for run in tl.static_range(RUNS):
                place = (first + ((step + HELD) * SPLITS * BLOCK + run * RUN * SPAN)) // GROUP
                pairs = pairs + (tl.load(line_of_scales + place, mask=present, other=0),)  # type: ignore[assignment]
        if not NORM and step + X_AHEAD < STEPS:
            for run in tl.static_range(RUNS):
                ready = ready + (tl.load(x + row + places[(step + X_AHEAD) * RUNS + run]),)  # type: ignore[assignment]
        codes = gathered(held[step], LINES, WARPS, RUN > 1)
        for run in tl.static_range(RUNS):
            span = ready[step * RUNS + run]  # type: ignore[var-annotated]
            if RUN > 1:
                span = by_fours(span)
            total += multiplied(codes, tl.trans(span), pairs[step * RUNS + run], run, BITS, RUN, kind)
    stored(added_up(total, COLUMNS, SPLITS, ROWS), bias, out, program, factor, rows, wide, COLUMNS, ROWS, BIAS, GATED)
