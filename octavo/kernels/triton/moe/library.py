"""An MoE layer for very many tokens, in floats: rows are copied in the order of experts, and torch's grouped product multiplies them.

    pick_rows    x of each choice, sorted by expert
    torch        gate and up of all experts; after the gate, down
    sum_choices  each token adds the results of its choices from where they are

Copies cost little beside products of hundreds of rows for each expert, in which torch's kernel for Hopper reaches 540 to 650 TFLOP/s.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gates import Gate
from octavo.kernels.triton.moe.grouped import SUM_TILE, sum_choices
from octavo.kernels.triton.moe.route import Choices, Sorted, sort_by_expert
from octavo.kernels.triton.pdl import begin, use_pdl, wait
from octavo.kernels.triton.step.elementwise import gate_and_mul
from octavo.kernels.triton.target import HOPPER, capability

LEAST_ROWS = 256  # of an expert, on average
ALIGNED = 8  # numbers: a row of each operand begins at a multiple of 16 bytes
PADDED = 16  # rows: an expert has a multiple of it
COPIED = 1024  # numbers of a program


def by_library(dtype: torch.dtype, hidden: int, inner: int, choices: int, experts: int) -> bool:
    """Whether torch has a fast kernel for products of floats in these sizes, and there are enough rows for it."""
    fits = dtype == torch.bfloat16 and hidden % ALIGNED == inner % ALIGNED == 0
    return fits and capability() == HOPPER and choices >= LEAST_ROWS * experts


@triton.jit(do_not_specialize=["choices"])
def pick_rows(
    x, order, count, out, choices, CHOSEN: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out [tiles * ROWS, SIZE]: the row of x of each choice in order. Padding, and what is after the last tile, is not written."""
    begin(PDL)
    place, column = tl.program_id(0), tl.program_id(1) * TILE + tl.arange(0, TILE)
    wait(PDL)
    if place >= tl.load(count) * ROWS:
        return
    choice = tl.load(order + place)
    if choice < choices:
        inside = column < SIZE
        row = tl.load(x + (choice // CHOSEN).to(tl.int64) * SIZE + column, mask=inside, other=0.0)
        tl.store(out + place.to(tl.int64) * SIZE + column, row, mask=inside)


def library_mixture(x: Tensor, choices: Choices, gate_up: Tensor, down: Tensor, activation: Gate) -> Tensor:
    """[T, hidden], like `mixture` without biases"""
    lined_up = sort_by_expert(choices.ids, choices.count, choices.first, PADDED)
    both = grouped(picked(x, choices, lined_up), gate_up, lined_up)
    gated = gate_and_mul(both, activation)
    del both
    return added(grouped(gated, down, lined_up), choices, lined_up)


def added(parts: Tensor, choices: Choices, lined_up: Sorted) -> Tensor:
    """[T, hidden]: the weighted sum of each token's parts, which are in order"""
    out = torch.empty(len(choices.ids), parts.shape[1], dtype=parts.dtype, device=parts.device)
    sum_choices[(len(out), triton.cdiv(parts.shape[1], SUM_TILE))](
        parts, choices.ids, choices.weights, lined_up.places, out, choices.first, COUNT=choices.count, CHOSEN=choices.chosen,
        HIDDEN=parts.shape[1], TILE=SUM_TILE, PLACED=True, PDL=use_pdl(), num_warps=4, launch_pdl=use_pdl(),
    )  # fmt: skip
    return out


def picked(x: Tensor, choices: Choices, lined_up: Sorted) -> Tensor:
    height, size = len(lined_up.order), x.shape[1]
    out = torch.empty(height, size, dtype=x.dtype, device=x.device)
    pick_rows[(height, triton.cdiv(size, COPIED))](
        x, lined_up.order, lined_up.count, out, choices.ids.numel(), CHOSEN=choices.chosen, SIZE=size, ROWS=lined_up.rows, TILE=COPIED,
        PDL=use_pdl(), num_warps=4, launch_pdl=use_pdl(),
    )  # fmt: skip
    return out


def library_kernels(x: Tensor, choices: Choices, inner: int, activation: Gate) -> None:
    """Calls all kernels but torch's, to compile them."""
    lined_up = sort_by_expert(choices.ids, choices.count, choices.first, PADDED)
    rows = picked(x, choices, lined_up)
    gate_and_mul(torch.empty(len(rows), 2 * inner, dtype=x.dtype, device=x.device), activation)
    added(rows, choices, lined_up)


def grouped(x: Tensor, stack: Tensor, lined_up: Sorted) -> Tensor:
    """Rows in order times the matrix of their expert."""
    count = len(lined_up.ends)
    return F.grouped_mm(x, stack.view(count, -1, stack.shape[1]).transpose(1, 2), offs=lined_up.ends)
