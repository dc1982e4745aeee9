"""`mixture`: the weighted sum of each token's experts, by the number of tokens and the format of the stacks.

    few    gate_up of each choice -> down of all choices of a token
    more   choices sorted by expert -> gate_up of tiles -> down of tiles -> their sum

A stack contains the matrices of all experts, one below the other (drawn in `kernels/reference/mixture.py`), as floats or packed codes.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from octavo.kernels.device_codes import DeviceCodes
from octavo.kernels.gates import GATES, Gate
from octavo.kernels.triton.moe.few import down_row, gate_up_row
from octavo.kernels.triton.moe.grouped import multiply_tiles, sum_choices
from octavo.kernels.triton.moe.packed_few import down_codes, gate_up_codes
from octavo.kernels.triton.moe.packed_grouped import multiply_tiles_of_codes
from octavo.kernels.triton.moe.rules import few_tokens, grouped_rows, grouped_tiles, packed_grouped_tiles, packed_row_tiles, row_tiles
from octavo.kernels.triton.moe.sort import Sorted, sort_by_expert
from octavo.kernels.triton.packed.products import form_of, in_order, table_of
from octavo.kernels.triton.pdl import use_pdl
from octavo.kernels.triton.step.activation import gate_and_mul

Stack = Tensor | DeviceCodes
SUM_TILE = 1024


@dataclass(frozen=True, slots=True)
class Choices:
    ids: Tensor  # [T, chosen]
    weights: Tensor  # [T, chosen] float32
    count: int  # experts in the stack
    first: int  # the number of the first of them

    @property
    def chosen(self) -> int:
        return self.ids.shape[1]


def mixture(
    x: Tensor,  # [T, hidden]
    ids: Tensor,  # [T, chosen]
    weights: Tensor,  # [T, chosen] float32
    gate_up: Stack,  # [count * 2 * inner, hidden]
    down: Stack,  # [count * hidden, inner]
    biases: tuple[Tensor, Tensor] | None = None,  # [count * 2 * inner] and [count * hidden]
    activation: Gate = "swiglu",
    first: int = 0,  # the number of the first expert in the stacks; experts that they do not contain add nothing
    few: bool | None = None,  # whether each token reads its experts separately; by default for small batches
) -> Tensor:
    """[T, hidden]"""
    count = len(down) // x.shape[1]
    assert x.is_contiguous() and ids.is_contiguous() and weights.is_contiguous() and len(gate_up) % (2 * count) == 0
    assert all(stack.is_contiguous() and stack.dtype == x.dtype for stack in (gate_up, down) if isinstance(stack, Tensor))
    if not len(x):
        return torch.empty_like(x)
    choices = Choices(ids, weights, count, first)
    of_gate_up, of_down = biases or (None, None)
    if few if few is not None else few_tokens(len(x)) and fit_a_program(choices, gate_up, down):
        gated = few_gate_up(x, choices, gate_up, of_gate_up, activation)
        return few_down(gated, choices, down, of_down, x.shape[1])
    lined_up = sort_by_expert(ids, count, first, tile_rows(choices, x.dtype, gate_up, down))
    gated = many_gate_up(x, choices, lined_up, gate_up, of_gate_up, activation)
    return many_down(gated, choices, lined_up, down, of_down, x.shape[1])


def fit_a_program(choices: Choices, gate_up: Stack, down: Stack) -> bool:
    """Whether rows of W are short enough to be held in registers."""
    tall = isinstance(gate_up, Tensor) and row_tiles(gate_up.shape[1], 2) is None
    wide = isinstance(down, Tensor) and row_tiles(down.shape[1], choices.chosen) is None
    return not tall and not wide


def tile_rows(choices: Choices, dtype: torch.dtype, gate_up: Stack, down: Stack) -> int:
    """Both products use the same tiles of rows, those of the smaller limit."""
    given = choices.ids.numel(), choices.count, dtype
    floats = [grouped_tiles(*given, True).rows] if isinstance(gate_up, Tensor) or isinstance(down, Tensor) else []
    codes = [packed_grouped_tiles(*given).rows] if not (isinstance(gate_up, Tensor) and isinstance(down, Tensor)) else []
    return min(floats + codes, default=grouped_rows(*given[:2]))


# -- small batches


def few_gate_up(x: Tensor, choices: Choices, stack: Stack, bias: Tensor | None, gate: Gate) -> Tensor:
    """[choices, inner]"""
    inner, size, pdl = len(stack) // choices.count // 2, x.shape[1], use_pdl()
    out = torch.empty(choices.ids.numel(), inner, dtype=x.dtype, device=x.device)
    shared = {"COUNT": choices.count, "CHOSEN": choices.chosen, "SIZE": size, "INNER": inner, "GATE": GATES.index(gate), "PDL": pdl}
    if isinstance(stack, Tensor):
        tiles = row_tiles(size, 2)
        assert tiles is not None, f"rows of {size}"
        gate_up_row[(triton.cdiv(inner, tiles.columns), len(out))](
            x, choices.ids, stack, stack if bias is None else bias, out, choices.first, **shared, PADDED=triton.next_power_of_2(size),
            COLUMNS=tiles.columns, BIASED=bias is not None, num_warps=tiles.warps, launch_pdl=pdl,
        )  # fmt: skip
        return out
    how = packed_row_tiles(stack, 1)
    gate_up_codes[(triton.cdiv(inner, how.columns // 2), len(out))](
        x, choices.ids, stack.scales if stack.order is None else stack.order, stack.words.view(torch.uint32), stack.scales,
        table_of(stack), x if bias is None else bias, out, stack.factor, choices.first, **shared, **form_of(stack),
        COLUMNS=how.columns, STEPS=how.steps, AHEAD=how.ahead, ORDERED=stack.order is not None, BIASED=bias is not None,
        WARPS=how.warps, num_warps=how.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def few_down(x: Tensor, choices: Choices, stack: Stack, bias: Tensor | None, hidden: int) -> Tensor:
    """x [choices, inner] -> [T, hidden]"""
    tokens, size, pdl = len(choices.ids), x.shape[1], use_pdl()
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    shared = {"COUNT": choices.count, "CHOSEN": choices.chosen, "SIZE": size, "HIDDEN": hidden, "PDL": pdl}
    if isinstance(stack, Tensor):
        tiles = row_tiles(size, choices.chosen)
        assert tiles is not None, f"{choices.chosen} rows of {size}"
        down_row[(triton.cdiv(hidden, tiles.columns), tokens)](
            x, choices.ids, choices.weights, stack, stack if bias is None else bias, out, choices.first, **shared,
            PADDED=triton.next_power_of_2(size), COLUMNS=tiles.columns, BIASED=bias is not None, num_warps=tiles.warps, launch_pdl=pdl,
        )  # fmt: skip
        return out
    how = packed_row_tiles(stack, choices.chosen)
    down_codes[(triton.cdiv(hidden, how.columns), tokens)](
        x, choices.ids, choices.weights, stack.scales if stack.order is None else stack.order, stack.words.view(torch.uint32),
        stack.scales, table_of(stack), x if bias is None else bias, out, stack.factor, choices.first, **shared, **form_of(stack),
        COLUMNS=how.columns, STEPS=how.steps, AHEAD=how.ahead, ORDERED=stack.order is not None, BIASED=bias is not None,
        WARPS=how.warps, num_warps=how.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


# -- larger batches


def many_gate_up(x: Tensor, choices: Choices, lined_up: Sorted, stack: Stack, bias: Tensor | None, gate: Gate) -> Tensor:
    """[tiles * rows, inner], in the order of the tiles"""
    inner = len(stack) // choices.count // 2
    height = lined_up.tiles * lined_up.rows
    if isinstance(stack, Tensor):
        out = torch.empty(height, inner, dtype=x.dtype, device=x.device)
        _multiply(x, choices, lined_up, stack, bias, out, gate)
        return out
    both = torch.empty(height, 2 * inner, dtype=x.dtype, device=x.device)
    _multiply_codes(in_order(x, stack), choices, lined_up, stack, bias, both, picked=True)
    return gate_and_mul(both, gate)


def many_down(x: Tensor, choices: Choices, lined_up: Sorted, stack: Stack, bias: Tensor | None, hidden: int) -> Tensor:
    """x [tiles * rows, inner] -> [T, hidden]"""
    parts = torch.empty(choices.ids.numel(), hidden, dtype=x.dtype, device=x.device)
    if isinstance(stack, Tensor):
        _multiply(x, choices, lined_up, stack, bias, parts, None)
    else:
        _multiply_codes(in_order(x, stack), choices, lined_up, stack, bias, parts, picked=False)
    out = torch.empty(len(choices.ids), hidden, dtype=x.dtype, device=x.device)
    sum_choices[(len(out), triton.cdiv(hidden, SUM_TILE))](
        parts, choices.ids, choices.weights, out, choices.first, COUNT=choices.count, CHOSEN=choices.chosen, HIDDEN=hidden, TILE=SUM_TILE,
        PDL=use_pdl(), num_warps=4, launch_pdl=use_pdl(),
    )  # fmt: skip
    return out


def _multiply(
    x: Tensor, choices: Choices, lined_up: Sorted, stack: Tensor, bias: Tensor | None, out: Tensor, gate: Gate | None
) -> None:
    number, gated, wide = choices.ids.numel(), gate is not None, out.shape[1]
    tiles = grouped_tiles(number, choices.count, x.dtype, gated)
    multiply_tiles[(triton.cdiv(wide, tiles.columns), lined_up.tiles)](
        x, lined_up.order, lined_up.experts, lined_up.count, stack, stack if bias is None else bias, out, number,
        CHOSEN=choices.chosen, SIZE=stack.shape[1], WIDE=wide, ROWS=lined_up.rows, COLUMNS=tiles.columns, STEP=tiles.step,
        STAGES=tiles.stages, GATED=gated, GATE=GATES.index(gate or "swiglu"), BIASED=bias is not None, PDL=use_pdl(),
        num_warps=tiles.warps, launch_pdl=use_pdl(),
    )  # fmt: skip


def _multiply_codes(
    x: Tensor, choices: Choices, lined_up: Sorted, stack: DeviceCodes, bias: Tensor | None, out: Tensor, picked: bool
) -> None:
    number, wide = choices.ids.numel(), out.shape[1]
    tiles = packed_grouped_tiles(number, choices.count, x.dtype)
    multiply_tiles_of_codes[(triton.cdiv(wide, tiles.columns), lined_up.tiles)](
        x, lined_up.order, lined_up.experts, lined_up.count, stack.words, stack.scales, table_of(stack), x if bias is None else bias, out,
        stack.factor, number, CHOSEN=choices.chosen, SIZE=stack.size, WIDE=wide, **form_of(stack),
        ROWS=lined_up.rows,
        COLUMNS=tiles.columns, STAGES=tiles.stages, PICKED=picked, BIASED=bias is not None, WARPS=tiles.warps, PDL=use_pdl(),
        num_warps=tiles.warps, launch_pdl=use_pdl(),
    )  # fmt: skip
