"""y = x W^T of packed codes for one row: multiplied and added in registers, without the tensor cores, which one row would not use well.

    words of AHEAD steps | wait | x prepared | products of step 0, words of step AHEAD loaded | products of step 1, ... | sums

A thread has sixteen bytes of each of COLUMNS rows of W, which are words of two neighbouring columns in every span, and x of the
same columns; threads exchange only the sums. A code is converted to a number in place, behind the exponent
that makes its lowest bit one; scale and offset are applied later, once per group:

    sum_k x_k (scale * code_k + offset)  =  scale * (sum_k x_k (code_k + base) - base * sum_k x_k)  +  offset * sum_k x_k

A step is 8 blocks for each warp. Either a row of W has STEPS, or x is held and there are TURNS of COLUMNS. ORDERED: columns of x are
loaded in the order of the codes. WHOLE: steps and turns divide the matrix. GATED: W is gate over up, and the result is gated.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.packed.codes import FLOATS, MAX_SPAN, PAIRWISE, WORD_BITS, floats_of, looked_up, scale_and_offset
from octavo.kernels.triton.packed.gemm import column_of, store_result
from octavo.kernels.triton.pdl import begin, wait

TWO_TO_63, TWO_TO_64 = tl.constexpr(2.0**63), tl.constexpr(2.0**64)


@triton.jit
def placed(words, SHIFT: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr):
    """The code at bit 12 (HIGH: 16; of 8 bits: 8) of words moved to the left by SHIFT, or to the right by -SHIFT, plus `base_of`."""
    PLACE: tl.constexpr = 8 if BITS == 8 else 16 if HIGH else 12
    EXPONENT: tl.constexpr = (127 + 23 - PLACE) << 23
    MASK: tl.constexpr = ((1 << BITS) - 1) << PLACE
    if SHIFT > 0:
        moved = words << SHIFT
    elif SHIFT < 0:
        moved = words >> -SHIFT
    else:
        moved = words
    if PAIRWISE:
        text: tl.constexpr = f"lop3.b32 $0, $1, {MASK}, {EXPONENT}, 0xEA;"
        return tl.inline_asm_elementwise(text, "=f,r", [moved], dtype=tl.float32, is_pure=True, pack=1)
    return ((moved & MASK) | EXPONENT).to(tl.float32, bitcast=True)


@triton.jit
def codes_of(words, INDEX: tl.constexpr, BITS: tl.constexpr, kind: tl.constexpr):
    """Span INDEX of words uint32 [..., k], each of two columns -> [..., k, 2] float32, with `base_of` added to each."""
    if kind == tl.float32:
        MASK: tl.constexpr = (1 << BITS) - 1
        return tl.join((words >> (BITS * INDEX)) & MASK, (words >> (BITS * INDEX + 16)) & MASK).to(tl.float32)
    elif BITS == 8:
        if INDEX == 0:
            return tl.join(placed(words, 8, 8, False), placed(words, -8, 8, False))
        else:
            return tl.join(placed(words, 0, 8, False), placed(words, -16, 8, False))
    elif INDEX == 0:
        return tl.join(placed((words << 16) | (words >> 16), 0, 4, True), placed(words, 0, 4, True))
    elif INDEX == 1:
        return tl.join(placed(words, 8, 4, False), placed(words, -8, 4, False))
    elif INDEX == 2:
        return tl.join(placed(words, 8, 4, True), placed(words, -8, 4, True))
    else:
        return tl.join(placed(words, 0, 4, False), placed((words << 16) | (words >> 16), 0, 4, False))


@triton.jit
def bytes_of(found, INDEX: tl.constexpr, kind: tl.constexpr):
    """Byte INDEX of looked-up values, plus `base_of` 8 bits; unchanged in float32."""
    if kind == tl.float32:
        return ((found >> (8 * INDEX)) & 255).to(tl.float32)
    elif PAIRWISE:
        text: tl.constexpr = f"prmt.b32 $0, $1, 0x47000000, {0x7404 + 16 * INDEX};"
        return tl.inline_asm_elementwise(text, "=f,r", [found], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return ((((found >> (8 * INDEX)) & 255) << 8) | 0x47000000).to(tl.float32, bitcast=True)


@triton.jit
def numbers_of(words, table, INDEX: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr, kind: tl.constexpr):
    """Like `codes_of`; TABLE: the kind of values of the codes."""
    if TABLE:
        return tl.join(bytes_of(looked_up(words, table, 0), INDEX, kind), bytes_of(looked_up(words, table, 16), INDEX, kind))
    else:
        return codes_of(words, INDEX, BITS, kind)


@triton.constexpr_function
def base_of(index: int, bits: int, exact: bool) -> float:
    """The constant that `codes_of` adds: far below 2^24, so that x loses little precision. float32 uses conversions and adds nothing."""
    return 0.0 if exact else 32768.0 if bits == 8 else 128.0 if index % 2 == 0 else 2048.0


@triton.jit
def in_spans(x, BITS: tl.constexpr, SPAN: tl.constexpr):
    """x [columns] of whole blocks -> for each span [threads, columns of a thread] float32, in the words' order (`device_codes.py`)."""
    SPANS: tl.constexpr = WORD_BITS // BITS
    THREADS: tl.constexpr = x.shape[0] // (SPANS * SPAN) * 4
    apart = tl.reshape(x, [THREADS // 4, SPANS, SPAN // 16, 2, 4, 2])
    ours = tl.reshape(tl.permute(apart, (0, 4, 3, 2, 5, 1)), [THREADS, SPAN // 4, SPANS // 2, 2]).to(tl.float32)
    even, odd = tl.split(ours)
    if SPANS == 2:
        return (tl.reshape(even, [THREADS, SPAN // 4]), tl.reshape(odd, [THREADS, SPAN // 4]))
    else:
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return (first, second, third, fourth)


@triton.jit
def one_by_one(pairs):
    """[threads, columns, runs] -> for each run [threads, columns]"""
    THREADS: tl.constexpr = pairs.shape[0]
    N: tl.constexpr = pairs.shape[1]
    if pairs.shape[2] == 1:
        return (tl.reshape(pairs, [THREADS, N]),)
    elif pairs.shape[2] == 2:
        return tl.split(pairs)
    else:
        even, odd = tl.split(tl.reshape(pairs, [THREADS, N, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return (first, second, third, fourth)


@triton.jit
def float_products(words, pairs, spans, RUN: tl.constexpr):
    """Like `products`, for 4-bit floats: these need no base and no offset.

    A float is scaled by 2^-126. x is multiplied by 2^64 and a scale by 2^63, so that no product underflows in float32; a scale
    is that of the doubled float.
    """
    SHAPE: tl.constexpr = [words.shape[0], words.shape[1], 2 * words.shape[2]]
    scales = one_by_one(pairs)
    total = tl.zeros([words.shape[0], words.shape[1]], tl.float32)
    for run in tl.static_range(pairs.shape[2]):
        for index in tl.static_range(run * RUN, run * RUN + RUN):
            span = tl.broadcast_to((spans[index] * TWO_TO_64)[:, None, :], SHAPE)
            both = floats_of(words, index)
            codes = tl.reshape(tl.join(both << 16, both & 0xFFFF0000).to(tl.float32, bitcast=True), SHAPE)
            if index == run * RUN:
                product = tl.sum(codes * span, 2)
            else:
                product += tl.sum(codes * span, 2)
        scale, _ = scale_and_offset(scales[run])
        total += (scale * TWO_TO_63) * product
    return total


@triton.jit
def products(words, pairs, spans, table, BITS: tl.constexpr, RUN: tl.constexpr, TABLE: tl.constexpr, kind: tl.constexpr):
    """words [threads, columns, words of a thread] and pairs [threads, columns, runs] times x in spans -> sums [threads, columns]"""
    SHAPE: tl.constexpr = [words.shape[0], words.shape[1], 2 * words.shape[2]]
    scales = one_by_one(pairs)
    total = tl.zeros([words.shape[0], words.shape[1]], tl.float32)
    for run in tl.static_range(pairs.shape[2]):
        for index in tl.static_range(run * RUN, run * RUN + RUN):
            span = tl.broadcast_to(spans[index][:, None, :], SHAPE)
            codes = tl.reshape(numbers_of(words, table, index, BITS, TABLE, kind), SHAPE)
            own, of_codes = tl.split(tl.sum(tl.join(span, codes * span), 2))  # joined, so that both are in the same threads
            base = own * base_of(index, 8 if TABLE else BITS, kind == tl.float32)
            if index == run * RUN:
                product, sums, bases = of_codes, own, base
            else:
                product, sums, bases = product + of_codes, sums + own, bases + base
        scale, offset = scale_and_offset(scales[run])
        total += scale * (product - bases)
        total += offset * sums
    return total


@triton.jit
def x_of_a_step(x, order, columns, size, ORDERED: tl.constexpr, WHOLE: tl.constexpr):
    places = tl.load(order + columns, mask=columns < size, other=0).to(tl.int32) if ORDERED else columns
    return tl.load(x + places) if WHOLE else tl.load(x + places, mask=columns < size, other=0.0)


@triton.jit
def asked_for(
    words,
    scales,
    program,
    step: tl.constexpr,
    blocks,
    wide,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    WARPS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Words [threads, COLUMNS, words of a thread] and pairs [threads, COLUMNS, runs] of a step; four threads have a block."""
    SPAN: tl.constexpr = min(GROUP, MAX_SPAN)
    PER_THREAD: tl.constexpr = SPAN // 8
    PER_BLOCK: tl.constexpr = max(WORD_BITS // BITS * SPAN // GROUP, 1)  # scales
    BLOCKS: tl.constexpr = max(GROUP // (WORD_BITS // BITS * SPAN), 1)  # with one scale
    column, present = column_of(tl.arange(0, COLUMNS), program, wide, COLUMNS, GATED)
    column, present = column.to(tl.int64)[None, :, None], present[None, :, None]
    thread = step * (32 * WARPS) + tl.arange(0, 32 * WARPS)[:, None, None]
    at = column * (blocks * (4 * PER_THREAD)) + thread * PER_THREAD + tl.arange(0, PER_THREAD)[None, None, :]
    place = column * (tl.cdiv(blocks, BLOCKS) * PER_BLOCK) + thread // (4 * BLOCKS) * PER_BLOCK + tl.arange(0, PER_BLOCK)[None, None, :]
    if WHOLE:
        return tl.load(words + at), tl.load(scales + place)
    else:
        there = present & (thread < 4 * blocks)
        return tl.load(words + at, mask=there, other=0), tl.load(scales + place, mask=there, other=0)


@triton.jit
def packed_gemv(
    x,
    order,
    words,
    scales,
    table,
    bias,
    out,
    factor,
    size,
    wide,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TABLE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURNS: tl.constexpr,
    STEPS: tl.constexpr,
    AHEAD: tl.constexpr,
    WHOLE: tl.constexpr,
    ORDERED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    SPAN: tl.constexpr = min(GROUP, MAX_SPAN)
    BLOCK: tl.constexpr = WORD_BITS // BITS * SPAN
    RUN: tl.constexpr = min(GROUP // SPAN, WORD_BITS // BITS)  # spans of a block with one scale
    STEP: tl.constexpr = 8 * WARPS * BLOCK
    tl.static_assert(STEPS == 1 or TURNS == 1)

    begin(PDL)
    kind = x.dtype.element_ty
    first, blocks = tl.program_id(0) * TURNS, tl.cdiv(size, BLOCK)
    columns = tl.arange(0, STEP)
    asked = ()
    for one in tl.static_range(min(AHEAD, TURNS * STEPS)):
        ours = words, scales, first + one // STEPS, one % STEPS, blocks, wide
        asked = asked + (asked_for(*ours, BITS, GROUP, COLUMNS, GATED, WARPS, WHOLE),)  # type: ignore[assignment]
    wait(PDL)

    now = x_of_a_step(x, order, columns, size, ORDERED, WHOLE)
    spans = in_spans(now, BITS, SPAN)
    total = tl.zeros([32 * WARPS, COLUMNS], tl.float32)
    for one in tl.static_range(TURNS * STEPS):
        if one + AHEAD < TURNS * STEPS:
            ours = words, scales, first + (one + AHEAD) // STEPS, (one + AHEAD) % STEPS, blocks, wide
            asked = asked + (asked_for(*ours, BITS, GROUP, COLUMNS, GATED, WARPS, WHOLE),)  # type: ignore[assignment]
        if STEPS > 1 and one + 1 < STEPS:
            now = x_of_a_step(x, order, columns + (one + 1) * STEP, size, ORDERED, WHOLE)
        if TABLE == FLOATS:
            total += float_products(asked[one][0], asked[one][1], spans, RUN)
        else:
            total += products(asked[one][0], asked[one][1], spans, table, BITS, RUN, TABLE, kind)
        if one % STEPS == STEPS - 1:
            store_result(tl.sum(total, 0)[:, None], bias, out, first + one // STEPS, factor, 1, wide, COLUMNS, 1, BIAS, GATED, GATE)
            total = tl.zeros([32 * WARPS, COLUMNS], tl.float32)
        else:
            spans = in_spans(now, BITS, SPAN)
