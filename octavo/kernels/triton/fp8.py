"""Products with weights of 8-bit floats (e4m3), for GPUs whose matrix units multiply these (from 8.9 on).

    few rows    x stays as it is: a program holds some rows of W, whole, as `gemv/gemv.py` does
    more        rows of x are rounded to 8 bits, each with a scale of its own, and 8-bit floats are multiplied with sums in float32

Where blocks of W have scales, sums of a block are multiplied by its scale before they are added to those of the others; a scale of
a whole row comes at the end.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.fp8_matrix import FP8_FEW_ROWS, FP8_LARGEST, Fp8Matrix
from octavo.kernels.triton.gemv.tiles import MAX_HELD, product_tiles
from octavo.kernels.triton.pdl import begin, use_pdl, wait

LARGEST = tl.constexpr(FP8_LARGEST)
STEP = 128  # columns multiplied at once: those of a block, where there are blocks


class Fp8Tiles(NamedTuple):
    rows: int
    columns: int
    warps: int
    stages: int


@triton.jit
def fp8_row(
    x,
    values,
    scale,
    bias,
    out,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row of x and COLUMNS rows of W a program"""
    begin(PDL)
    BLOCKS: tl.constexpr = (SIZE + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    column, k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[:, None], tl.arange(0, PADDED)[None, :]
    row, inside = tl.program_id(1), (column < OUT) & (k < SIZE)
    matrix = tl.load(values + column.to(tl.int64) * SIZE + k, mask=inside, other=0.0).to(tl.float32)
    scales = tl.load(scale + column // BLOCK_ROWS * BLOCKS + k // BLOCK_COLUMNS, mask=inside, other=0.0)
    wait(PDL)
    given = tl.load(x + row * SIZE + k, mask=k < SIZE, other=0.0).to(tl.float32)
    sums = tl.sum(matrix * scales * given, 1)[:, None]
    if BIASED:
        sums += tl.load(bias + column, mask=column < OUT, other=0.0).to(tl.float32)
    tl.store(out + row * OUT + column, sums.to(out.dtype.element_ty), mask=column < OUT)


@triton.jit
def round_rows(x, values, scale, SIZE: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr):
    """A row a program"""
    begin(PDL)
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    wait(PDL)
    wide = tl.load(x + row * SIZE + k, mask=k < SIZE, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(wide), 0)
    step = tl.where(largest > 0, largest / LARGEST, 1.0)
    tl.store(values + row * SIZE + k, (wide / step).to(values.dtype.element_ty), mask=k < SIZE)
    tl.store(scale + row, step)


@triton.jit(do_not_specialize=["rows"])
def fp8_tiles(
    x,
    x_scale,
    values,
    scale,
    bias,
    out,
    rows,
    SIZE: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [rows, SIZE] of 8 bits times a tile of W, which is the left side: few rows fill the matrix units, too."""
    begin(PDL)
    BLOCKS: tl.constexpr = (SIZE + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column, k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, STEP)[None, :]
    line_of_w = values + tl.minimum(column, OUT - 1).to(tl.int64)[:, None] * SIZE + k
    line_of_scale = scale + tl.minimum(column, OUT - 1) // BLOCK_ROWS * BLOCKS
    wait(PDL)
    line_of_x = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * SIZE + k
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in tl.range(0, SIZE, STEP, num_stages=STAGES):
        if SIZE % STEP == 0:
            matrix, given = tl.load(line_of_w + start), tl.load(line_of_x + start)
        else:
            matrix = tl.load(line_of_w + start, mask=start + k < SIZE, other=0.0)
            given = tl.load(line_of_x + start, mask=start + k < SIZE, other=0.0)
        if BLOCKS > 1:
            total += tl.dot(matrix, tl.trans(given)) * tl.load(line_of_scale + start // BLOCK_COLUMNS)[:, None]
        else:
            total = tl.dot(matrix, tl.trans(given), total)
    if BLOCKS == 1:
        total *= tl.load(line_of_scale)[:, None]
    total *= tl.load(x_scale + tl.minimum(row, rows - 1))[None, :]
    inside = column < OUT
    if BIASED:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    target = out + row.to(tl.int64)[:, None] * OUT + column[None, :]
    tl.store(target, tl.trans(total.to(out.dtype.element_ty)), mask=(row < rows)[:, None] & inside[None, :])


def fp8_linear(x: Tensor, weight: Fp8Matrix, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] -> [rows, out]"""
    size, pdl = x.shape[1], use_pdl()
    assert x.is_contiguous() and size == weight.values.shape[1] and size <= MAX_HELD
    assert weight.block[1] >= size or weight.block[1] == STEP, f"blocks of {weight.block[1]} columns"
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    padded = triton.next_power_of_2(size)
    of_block = {"BLOCK_ROWS": weight.block[0], "BLOCK_COLUMNS": weight.block[1]}
    shared = {"SIZE": size, "OUT": len(weight), **of_block, "BIASED": bias is not None, "PDL": pdl}
    given = weight.values, weight.scale, x if bias is None else bias, out
    if len(x) <= FP8_FEW_ROWS:
        held = product_tiles(padded, len(weight), gated=False)
        fp8_row[(triton.cdiv(len(weight), held.columns), len(x))](
            x, *given, **shared, PADDED=padded, COLUMNS=held.columns, num_warps=held.warps, launch_pdl=pdl
        )
        return out
    values, scale = quantize_rows(x)
    tiles = fp8_tile_rule(len(x))
    fp8_tiles[(triton.cdiv(len(weight), tiles.columns), triton.cdiv(len(x), tiles.rows))](
        values, scale, *given, len(x), **shared, ROWS=tiles.rows, COLUMNS=tiles.columns, STEP=STEP, STAGES=tiles.stages,
        num_warps=tiles.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(rows as 8-bit floats [rows, in], their scales [rows] float32)"""
    values, scale = torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty(len(x), dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(x.shape[1])
    round_rows[(len(x),)](
        x, values, scale, SIZE=x.shape[1], PADDED=padded, PDL=use_pdl(), num_warps=min(max(padded // 512, 1), 16), launch_pdl=use_pdl()
    )
    return values, scale


def fp8_tile_rule(rows: int) -> Fp8Tiles:
    """As tall as the rows are many, up to 128."""
    tall = min(max(triton.next_power_of_2(rows), 16), 128)
    return Fp8Tiles(tall, 128, 8, 3) if tall > 64 else Fp8Tiles(tall, 64, 4, 4)
