"""Conversion of packed codes to numbers: spans of codes, their scales and offsets, `unpack_tile`; and `sum_shares`, the sum of parts."""

import triton
import triton.language as tl

WORD_BITS = tl.constexpr(16)
MAX_SPAN = tl.constexpr(32)
LOOKED_UP, FLOATS = tl.constexpr(1), tl.constexpr(2)  # values of TABLE, if codes are looked up
PAIRWISE = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter does not support inline assembly


@triton.jit
def scale_and_offset(pairs):
    """Unpacks int32 words to scales and offsets, in float32."""
    scale = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    offset = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return scale.to(tl.float32), offset.to(tl.float32)


@triton.jit
def four_bits(words, SHIFT: tl.constexpr, TIMES: tl.constexpr, kind: tl.constexpr):
    """TIMES (1 or 16) times 128 + the four bits at SHIFT, exactly, in `kind`; in float32 without the 128.

    The four bits are placed in the lowest fraction bits of a number with the exponent of 128: a shift, a mask and a constant, without a
    conversion. Inline assembly handles two of them in a 32-bit register, because the compiler would separate them for the shift.
    """
    PLACE: tl.constexpr = 0 if kind == tl.bfloat16 else 3
    EXPONENT: tl.constexpr = (0x4300 if kind == tl.bfloat16 else 0x5800) + (4 << (PLACE + 7) if TIMES == 16 else 0)
        # One chain of branches: after a return in one of them the compiler would continue with the code that follows.
    if kind == tl.float32:
        result = ((words >> SHIFT) & 15).to(tl.float32) * TIMES
    elif PAIRWISE:
        text: tl.constexpr = pairwise(SHIFT - PLACE, 15 << PLACE, EXPONENT)
        result = tl.inline_asm_elementwise(text, "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2).to(kind, bitcast=True)
    elif SHIFT >= PLACE:
        result = ((words >> (SHIFT - PLACE) & (15 << PLACE)) | EXPONENT).to(kind, bitcast=True)
    else:
        result = ((words << (PLACE - SHIFT) & (15 << PLACE)) | EXPONENT).to(kind, bitcast=True)
    return result


@triton.constexpr_function
def pairwise(right: int, mask: int, ones: int) -> str:
    """(words >> right) & mask | ones, of two words at once; 0xEA is the lookup table of that formula."""
    move = f"shr.b32 moved, $1, {right};" if right > 0 else f"shl.b32 moved, $1, {-right};" if right else "mov.b32 moved, $1;"
    return f"{{ .reg .b32 moved; {move} lop3.b32 $0, moved, {mask * 0x10001}, {ones * 0x10001}, 0xEA; }}"


@triton.jit
def looked_up(words, table, SHIFT: tl.constexpr):
    """Looks up the four codes from bit SHIFT of each word on in a table of 16 bytes: int32 of four bytes, the first code's lowest.

    One instruction selects four of eight bytes by the lower three bits of the codes, as they are in a word. It is applied to both
    halves of the table, and a mask of the codes' highest bits selects the half for each byte.
    """
    if PAIRWISE:
        text: tl.constexpr = lookup(SHIFT)
        quarter = table.to(tl.pointer_type(tl.int32))
        one, two, three, four = tl.load(quarter), tl.load(quarter + 1), tl.load(quarter + 2), tl.load(quarter + 3)
        given = [words, one, two, three, four]
        return tl.inline_asm_elementwise(text, "=r,r,r,r,r,r", given, dtype=tl.int32, is_pure=True, pack=1)
    else:
        found = tl.zeros_like(words).to(tl.int32)
        for index in tl.static_range(4):
            code = (words >> (SHIFT + 4 * index)) & 15
            found |= tl.load(table + code).to(tl.int32) << (8 * index)
        return found


@triton.constexpr_function
def lookup(shift: int) -> str:
    """0xD8 is the lookup table of: hi where the mask is set, else lo."""
    return f"""{{ .reg .b32 codes, low, lo, hi, mask;
        shr.b32 codes, $1, {shift};
        and.b32 low, codes, 0x7777;
        prmt.b32 lo, $2, $3, low;
        prmt.b32 hi, $4, $5, low;
        shr.b32 mask, codes, 3;
        and.b32 mask, mask, 0x1111;
        or.b32 mask, mask, 0x8888;
        prmt.b32 mask, 0x8000, 0, mask;
        lop3.b32 $0, lo, hi, mask, 0xD8; }}"""


@triton.jit
def floats_of(words, INDEX: tl.constexpr):
    """Codes INDEX of words uint32 of two columns, 4-bit floats: two bfloat16 in a word, each 2^-126 times the value.

    Such a float has a sign, two bits of exponent and one of fraction. They are moved to the sign, the lowest exponent bits and the
    highest fraction bit of a bfloat16. An exponent of zero means a subnormal in both formats.
    """
    LEFT: tl.constexpr = 6 - 4 * INDEX
    if PAIRWISE:
        text: tl.constexpr = float_pair(12 - 4 * INDEX, LEFT, 0x01C0)
        return tl.inline_asm_elementwise(text, "=r,r", [words], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        moved = words << LEFT if LEFT > 0 else words >> -LEFT
        return ((words << (12 - 4 * INDEX)) & 0x80008000) | (moved & 0x01C001C0)


@triton.jit
def doubled_floats(words, scale, INDEX: tl.constexpr, kind: tl.constexpr):
    """Codes INDEX of int16 words [n, span], 4-bit floats, as `kind`: twice their value times scale [n], exactly.

    This uses the method of `floats_of`; for float16 the factor is 2^-14. The missing factor is applied in two steps that cannot overflow.
    """
    if PAIRWISE and kind != tl.float32:
        HALF: tl.constexpr = kind == tl.float16
        text: tl.constexpr = float_pair(12 - 4 * INDEX, (9 if HALF else 6) - 4 * INDEX, 0x0E00 if HALF else 0x01C0)
        numbers = tl.inline_asm_elementwise(text, "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2).to(kind, bitcast=True)
        if HALF:
            result = (numbers * 2.0**15) * scale.to(kind)[:, None]
        else:
            result = (numbers * 2.0**63) * (scale * 2.0**64).to(kind)[:, None]
    else:
        wide = words.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        LEFT: tl.constexpr = 6 - 4 * INDEX
        moved = wide << LEFT if LEFT > 0 else wide >> -LEFT
        both = ((wide << (12 - 4 * INDEX)) & 0x80000000) | (moved & 0x01C00000)
        result = (both.to(tl.float32, bitcast=True) * 2.0**63 * (scale * 2.0**64)[:, None]).to(kind)
    return result


@triton.constexpr_function
def float_pair(sign: int, left: int, kept: int) -> str:
    """Moves signs by `sign` to the left, and the bits of `kept` by `left`; 0xEA is the lookup table of: signs & mask | rest."""
    move = f"shl.b32 rest, $1, {left};" if left > 0 else f"shr.b32 rest, $1, {-left};"
    masks = f"and.b32 rest, rest, {kept * 0x10001}; lop3.b32 $0, signs, 0x80008000, rest, 0xEA;"
    return f"{{ .reg .b32 signs, rest; shl.b32 signs, $1, {sign}; {move} {masks} }}"


@triton.jit
def weights(words, table, scale, offset, INDEX: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr, kind: tl.constexpr):
    """Span INDEX of the words [n, span] as weights: rounded once, from float32. scale, offset [n]: including the factor.

    The code is not shifted in its word, which multiplies it by a power of two; the scale is divided by that. TABLE: its kind of values.
    """
    wide = words.to(tl.uint16, bitcast=True).to(tl.int32)
    if TABLE == FLOATS:
        result = doubled_floats(words, scale, INDEX, kind)
    elif TABLE:
        numbers = ((looked_up(wide, table, 0) >> (8 * INDEX)) & 255).to(tl.float32) * scale[:, None]
        result = (numbers + offset[:, None]).to(kind)
    else:
        HIGHER: tl.constexpr = 1 << (BITS * INDEX)
        numbers = (wide & (((1 << BITS) - 1) << (BITS * INDEX))).to(tl.float32) * (scale * (1.0 / HIGHER))[:, None]
        result = (numbers + offset[:, None]).to(kind)
    return result


@triton.jit
def ask_for(pointers, size):
    """Prefetches `size` bytes behind each pointer into the L2 cache, without waiting."""
    text: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(text, "=r,l,r", [pointers.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["size", "shares"])
def sum_shares(parts, bias, out, factor, size, wide, shares, BIAS: tl.constexpr, TILE: tl.constexpr):
    """parts [shares, size] float32 -> out [size], added in a fixed order; `wide`: numbers of a row"""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < size
    total = tl.zeros([TILE], tl.float32)
    for share in range(shares):
        total += tl.load(parts + share * size + at, mask=inside, other=0.0)
    total *= factor
    if BIAS:
        total += tl.load(bias + at % wide, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "count"])
def unpack_tile(
    words,
    scales,
    table,
    index,
    out,
    factor,
    first,
    count,
    size,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TABLE: tl.constexpr,
    ROWS: tl.constexpr,
    BY_INDEX: tl.constexpr,
):
    """Rows first, first + 1, ... (BY_INDEX: index[0], index[1], ...) -> out [count, size]"""
    PER_WORD: tl.constexpr = WORD_BITS // BITS
    SPAN: tl.constexpr = min(GROUP, MAX_SPAN)
    BLOCK: tl.constexpr = PER_WORD * SPAN
    blocks = tl.cdiv(size, BLOCK)
    groups = tl.cdiv(blocks * BLOCK, GROUP)

    kind = out.dtype.element_ty
    row, block = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    inside = row < count
    source = tl.load(index + row, mask=inside, other=0).to(tl.int64) if BY_INDEX else (first + row).to(tl.int64)
    within = tl.arange(0, SPAN)[None, :]
    place = within % 8 // 2 * (SPAN // 4) + within // 8 % 2 * (SPAN // 8) + within // 16 * 2 + within % 2
    codes = tl.load(words + source[:, None] * (blocks * SPAN) + block * SPAN + place, mask=inside[:, None], other=0)
    for span in tl.static_range(PER_WORD):
        k = block * BLOCK + span * SPAN + within
        pairs = tl.load(scales + source * groups + (block * BLOCK + span * SPAN) // GROUP, mask=inside, other=0)
        scale, offset = scale_and_offset(pairs)
        matrix = weights(codes, table, scale * factor, offset * factor, span, BITS, TABLE, kind)
        tl.store(out + row.to(tl.int64)[:, None] * size + k, matrix, mask=inside[:, None] & (k < size))
