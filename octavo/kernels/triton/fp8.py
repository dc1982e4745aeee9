"""Products with 8-bit float weights, by the number of rows of x: `fp8_linear`, and `round_rows`.

    rows    one           x is not rounded; a program holds some rows of W (`gemv/`)
            up to 8       x is not rounded, on the tensor cores (`fp8_tiles`)
            more          x is rounded to 8 bits, too: a scale for each row, or for each row and 128 columns if W has blocks
            many          the same with torch, whose product is then faster than ours

Before compute capability 8.9 no instruction multiplies 8-bit floats, and x is not rounded. x in float32 is never rounded.
The division of work depends on shape and GPU only, and is never tuned at run time.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.fp8_matrix import FP8_LARGEST, Fp8Matrix, rounds_x, zero_fp8
from octavo.kernels.kernel_shapes import Fp8Shape
from octavo.kernels.triton.gemv.gemv import widened
from octavo.kernels.triton.gemv.products import linear
from octavo.kernels.triton.gemv.tiles import FP8_GEMV_ROWS, MAX_HELD
from octavo.kernels.triton.packed.codes import sum_shares
from octavo.kernels.triton.pdl import begin, use_pdl, wait
from octavo.kernels.triton.target import HOPPER, capability, converts_fp8, is_roomy

FEW_ROWS = 64
MANY_ROWS = 128  # above this, on Hopper, torch's products are the fastest for every shape
PROGRAMS, FEW_PROGRAMS = 264, 384  # two for each multiprocessor of an H200, and three
LEAST_BLOCKS = 4  # of 128 columns per program, if several share them
ALIGNED = 16  # columns and rows of W: required by torch's products
TALL = 4  # rows of x, and blocks of columns must be multiples of this, for the same reason
SUM_TILE = 512
EVERY, MOST, APART = 512, 8192, 128  # numbers of rows that are precompiled: all up to EVERY, then multiples of APART up to MOST
LARGEST = tl.constexpr(FP8_LARGEST)
STEP = tl.constexpr(128)  # columns multiplied at once, and those of a block

# -- how the work is divided


class Tiles(NamedTuple):
    """How `fp8_tiles` divides its work."""

    rows: int
    columns: int = 64
    shares: int = 1
    warps: int = 4
    stages: int = 4


def exact_tiles(rows: int, wide: int, size: int) -> Tiles:
    """For x that is not rounded. W is converted in registers, so a tile of it has more warps."""
    tall = min(max(triton.next_power_of_2(rows), 16), 64 if is_roomy(capability()) else 32)
    return Tiles(tall, 128, _shares(triton.cdiv(rows, tall) * triton.cdiv(wide, 128), size, FEW_PROGRAMS), 8, 3)


def rounded_tiles(rows: int, wide: int, size: int) -> Tiles:
    """For rounded x. A tile has as many rows as x, up to a limit."""
    tall = min(max(triton.next_power_of_2(rows), 16), MANY_ROWS)
    shares = _shares(triton.cdiv(rows, tall) * triton.cdiv(wide, 64), size, PROGRAMS)
    roomy = is_roomy(capability())
    stages = 3 if not roomy or (tall >= FEW_ROWS and shares == 1) else 4 if tall > FEW_ROWS else 5
    return Tiles(tall, 64, shares, 4, stages)


def _shares(programs: int, size: int, most: int) -> int:
    """Returns how many programs share the inner dimension if there are few tiles."""
    shares = 1
    while shares * 2 * programs <= most and triton.cdiv(size, 128) >= 2 * shares * LEAST_BLOCKS:
        shares *= 2
    return shares


def is_for_torch(rows: int, wide: int, size: int, blocks: bool) -> bool:
    """Whether torch multiplies rounded rows faster than `fp8_tiles`. It does not split the inner dimension, so narrow matrices need
    more rows.

    It supports blocks only on Hopper.
    """
    known = capability() == HOPPER or (capability() > HOPPER and not blocks)
    return known and rows > (FEW_ROWS if wide > size else MANY_ROWS)


# -- rounding x: one row per program, with one scale for the row or one for each SPAN columns
#
#     values  [rows, SIZE]            scale  [SIZE / SPAN, rows]: the rows of a span are contiguous, as the matrix products read them


@triton.jit
def in_eight_bits(wide, kind: tl.constexpr, AXIS: tl.constexpr):
    """(float32 numbers as `kind`, their scale): the largest along an axis becomes the largest 8-bit float."""
    largest = tl.max(tl.abs(wide), AXIS, keep_dims=True)
    largest = tl.where(largest > 0, largest, LARGEST)
    fitted = wide * tl.div_rn(tl.full(largest.shape, LARGEST, tl.float32), largest)
    values = tl.minimum(tl.maximum(fitted, -LARGEST), LARGEST).to(kind)
    return values, tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))


@triton.jit(do_not_specialize=["rows", "tall"])
def round_row(x, values, scale, rows, tall, SIZE: tl.constexpr, PADDED: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr):
    """`rows`: of x; `tall`: including padding, which is zero"""
    begin(PDL)
    row = tl.program_id(0)
    SPANS: tl.constexpr = 1 if SPAN == SIZE else PADDED // SPAN
    WIDE: tl.constexpr = PADDED // SPANS
    span, column = tl.arange(0, SPANS)[:, None], tl.arange(0, WIDE)[None, :]
    inside = (span * SPAN + column < SIZE) & (column < SPAN)
    at = row.to(tl.int64) * SIZE + span * SPAN + column
    wait(PDL)
    wide = tl.load(x + at, mask=inside & (row < rows), other=0.0).to(tl.float32)
    rounded, step = in_eight_bits(wide, values.dtype.element_ty, 1)
    tl.store(values + at, rounded, mask=inside)
    tl.store(scale + span.to(tl.int64) * tall + row, step, mask=span * SPAN < SIZE)


# -- products on the tensor cores: a tile of W per program, for any number of rows
#
#     W   [COLUMNS, 128]   the left side of tl.dot, so that small batches use the tensor cores fully, too
#     x   [ROWS, 128]      the right side: 8-bit floats with their own scales; or wider floats, to which W is then converted
#
# The tensor cores accumulate 8-bit products with less precision than float32, so the results for 128 columns are added up outside.
# The scales of blocks are applied there; a scale of a whole row is applied at the end. SHARED: if there are few tiles, the inner
# dimension is split over programs, `each` blocks for one, and `sum_shares` adds.


@triton.jit(do_not_specialize=["rows", "tall", "each"])
def fp8_tiles(
    x,
    x_scale,
    values,
    scale,
    bias,
    out,
    parts,
    rows,
    tall,
    size,
    wide,
    each,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROUNDED: tl.constexpr,
    WHOLE: tl.constexpr,
    SHARED: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """x_scale [1 or blocks, tall], if x is ROUNDED. WHOLE: steps and columns fill their tiles, so that no masks are needed."""
    begin(PDL)
    share = tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there, k = tl.minimum(row, rows - 1), tl.arange(0, STEP)[None, :]
    inside, blocks = column < wide, tl.cdiv(size, STEP)
    line_of_w = values + tl.minimum(column, wide - 1).to(tl.int64)[:, None] * size + k
    line_of_x = x + there.to(tl.int64)[:, None] * size + k
    line_of_scale = scale + tl.program_id(0) * COLUMNS // STEP * blocks
    wait(PDL)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for block in tl.range(share * each, tl.minimum((share + 1) * each, blocks), num_stages=STAGES):
        if WHOLE:
            matrix, given = tl.load(line_of_w + block * STEP), tl.load(line_of_x + block * STEP)
        else:
            present = block * STEP + k < size
            matrix = tl.load(line_of_w + block * STEP, mask=present, other=0.0)
            given = tl.load(line_of_x + block * STEP, mask=present, other=0.0)
        if not ROUNDED:
            matrix = widened(matrix).to(given.dtype)
        if BLOCKS:
            step = tl.load(line_of_scale + block)
            if ROUNDED:
                total += tl.dot(matrix, tl.trans(given)) * (tl.load(x_scale + block * tall + there) * step)[None, :]
            else:
                total += tl.dot(matrix, tl.trans(given), input_precision="ieee") * step
        elif ROUNDED:
            total = tl.dot(matrix, tl.trans(given), total, max_num_imprecise_acc=STEP)
        else:
            total = tl.dot(matrix, tl.trans(given), total, input_precision="ieee")
    if not BLOCKS:
        total *= tl.load(scale + column, mask=inside, other=0.0)[:, None]
        if ROUNDED:
            total *= tl.load(x_scale + there)[None, :]

    stored = (row < rows)[None, :] & inside[:, None]
    at = row.to(tl.int64)[None, :] * wide + column[:, None]
    if SHARED:
        tl.store(parts + share.to(tl.int64) * rows * wide + at, total, mask=stored)
    else:
        if BIAS:
            total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[:, None]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=stored)


# -- the products


def fp8_linear(x: Tensor, weight: Fp8Matrix, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x [rows, in] -> [rows, out], in `out` if given"""
    if out is not None:
        return out.copy_(fp8_linear(x, weight, bias))
    how = rule(len(x), weight, x.dtype)
    if how == "gemv":
        return linear(x, weight, bias)
    if not _is_rounded(len(x), x.dtype):
        assert how != "torch"
        return by_tiles(x, None, weight, bias, x.dtype, how)
    values, scale = round_rows(x, weight.span)
    if how == "torch":
        return by_torch(values, scale, weight, bias, len(x))
    return by_tiles(values[: len(x)], scale, weight, bias, x.dtype, how)


def invariant_fp8_linear(x: Tensor, weight: Fp8Matrix, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Like `fp8_linear`, with bits of a row that do not depend on the other rows: x is rounded in small batches, too."""
    if out is not None:
        return out.copy_(invariant_fp8_linear(x, weight, bias))
    if x.dtype == torch.float32 or not converts_fp8(capability()):
        return by_tiles(x, None, weight, bias, x.dtype, exact_tiles(len(x), *weight.shape)._replace(shares=1))
    values, scale = round_rows(x, weight.span)
    return by_tiles(values[: len(x)], scale, weight, bias, x.dtype, rounded_tiles(len(x), *weight.shape)._replace(shares=1))


def rule(rows: int, weight: Fp8Matrix, dtype: torch.dtype) -> Literal["gemv", "torch"] | Tiles:
    """Returns the kernel for a product."""
    if rows <= FP8_GEMV_ROWS and weight.shape[1] <= MAX_HELD:
        return "gemv"
    if not _is_rounded(rows, dtype):
        return exact_tiles(rows, *weight.shape)
    wide, size = weight.shape
    fits = dtype == torch.bfloat16 and not wide % ALIGNED and not size % (TALL * weight.span if weight.blocks else ALIGNED)
    return "torch" if fits and is_for_torch(rows, *weight.shape, weight.blocks) else rounded_tiles(rows, *weight.shape)


def _is_rounded(rows: int, dtype: torch.dtype) -> bool:
    return rounds_x(rows, dtype) and converts_fp8(capability())


def variant(rows: int, weight: Fp8Matrix, dtype: torch.dtype, bias: bool) -> tuple[object, ...]:
    """Returns the parameters that the compiled kernels of this product depend on."""
    how, rounded = rule(rows, weight, dtype), (weight.shape[1], weight.span) if _is_rounded(rows, dtype) else ()
    if how == "gemv":
        return how, *weight.shape, weight.span, bias
    if how == "torch":
        return how, *rounded
    once = how._replace(shares=min(how.shares, 2))
    return *once, *rounded, weight.blocks, bias, _is_whole(weight, how), weight.shape[1] % ALIGNED, weight.shape[0] % ALIGNED


def round_rows(x: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """(8-bit floats [tall, in], their scales [in / span, tall] float32): rows are padded to multiples of TALL"""
    (rows, size), tall = x.shape, triton.cdiv(len(x), TALL) * TALL
    assert x.is_contiguous()
    values = torch.empty(tall, size, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(size // span, tall, dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(size)
    if rows:
        round_row[(tall,)](
            x, values, scale, rows, tall, SIZE=size, PADDED=padded, SPAN=span, PDL=use_pdl(),
            num_warps=min(max(padded // 512, 1), 16), launch_pdl=use_pdl(),
        )  # fmt: skip
    return values, scale


def by_tiles(x: Tensor, x_scale: Tensor | None, weight: Fp8Matrix, bias: Tensor | None, dtype: torch.dtype, how: Tiles) -> Tensor:
    """x: in 16 bits, or rounded and with scales; `dtype`: of the result"""
    wide, size = weight.shape
    assert x.is_contiguous() and x.shape[1] == size
    out = torch.empty(len(x), wide, dtype=dtype, device=x.device)
    if not len(x):
        return out
    parts = out if how.shares == 1 else torch.empty(how.shares, *out.shape, dtype=torch.float32, device=x.device)
    values = weight.values if converts_fp8(capability()) else weight.values.view(torch.uint8)
    fp8_tiles[(triton.cdiv(wide, how.columns), triton.cdiv(len(x), how.rows), how.shares)](
        x, weight.scale if x_scale is None else x_scale, values, weight.scale, out if bias is None else bias, out, parts, len(x),
        0 if x_scale is None else x_scale.shape[1], size, wide, triton.cdiv(triton.cdiv(size, STEP.value), how.shares),
        ROWS=how.rows, COLUMNS=how.columns, BLOCKS=weight.blocks, ROUNDED=x_scale is not None,
        WHOLE=_is_whole(weight, how), SHARED=how.shares > 1, BIAS=bias is not None, STAGES=how.stages,
        PDL=use_pdl(), num_warps=how.warps, launch_pdl=use_pdl(),
    )  # fmt: skip
    if how.shares > 1:
        sum_shares[(triton.cdiv(out.numel(), SUM_TILE),)](
            parts, out if bias is None else bias, out, 1.0, out.numel(), wide, how.shares, BIAS=bias is not None, TILE=SUM_TILE,
            num_warps=4,
        )  # fmt: skip
    return out


def by_torch(values: Tensor, scale: Tensor, weight: Fp8Matrix, bias: Tensor | None, rows: int) -> Tensor:
    """Returns the first `rows` of a product in bfloat16. values [tall, in], scale [1 or blocks, tall]: from `round_rows`"""
    if not weight.blocks:
        given = values[:rows], weight.values.t(), scale[0, :rows, None], weight.scale[None, :]
        return torch._scaled_mm(*given, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=False)
    recipes = torch.nn.functional.ScalingType
    product = torch.nn.functional.scaled_mm(
        values, weight.values.t(), scale.t(), recipes.BlockWise1x128, weight.scale.t(), recipes.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )[:rows]  # fmt: skip
    return product if bias is None else product.add_(bias)


def _is_whole(weight: Fp8Matrix, how: Tiles) -> bool:
    """Whether steps and tiles divide the matrix."""
    return weight.shape[1] % STEP.value == 0 and len(weight) % how.columns == 0


# -- precompilation


def fp8_calls(shapes: Iterable[Fp8Shape], dtype: torch.dtype, device: torch.device) -> list[Callable[[], object]]:
    """Returns a call for each variant that the rules select, for any number of rows."""
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
