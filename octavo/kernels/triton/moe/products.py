"""`mixture`: the weighted sum of each token's experts, by the number of tokens and the format of the stacks.

    few    gate_up of each choice -> down of all choices of a token: each token reads its own experts' matrices
    more   choices sorted by expert -> gate_up of tiles -> down of tiles -> their sum: a matrix is read once per tile of rows,
           which should be as tall as the expert has rows

A stack contains the matrices of all experts, one below the other (drawn in `kernels/reference/layer.py`), as floats or packed codes.
How the work is divided depends on shape and GPU only, and is never tuned at run time.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
from torch import Tensor

from octavo.kernels.device_codes import DeviceCodes, zero_codes
from octavo.kernels.gates import Gate
from octavo.kernels.kernel_shapes import ExpertShape
from octavo.kernels.triton.gemv.products import linear
from octavo.kernels.triton.moe.direct import direct_down, direct_gate_up
from octavo.kernels.triton.moe.grouped import grouped_rows, grouped_tiles, many_down, many_gate_up, packed_grouped_tiles
from octavo.kernels.triton.moe.route import Choices, Stack, choose_experts, choose_in_groups, sort_by_expert
from octavo.kernels.triton.moe.small_batch import MAX_HELD, Shared, few_down, few_gate_up, row_tiles
from octavo.kernels.triton.step.elementwise import add_weighted, gate_and_mul

FEW_TOKENS = 4
MOST_TOKENS = 1 << 14  # that are precompiled


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
    in_order: bool = False,  # with `deterministic`: a token's bits do not depend on the others
) -> Tensor:
    """[T, hidden]"""
    count = len(down) // x.shape[1]
    assert x.is_contiguous() and ids.is_contiguous() and weights.is_contiguous() and len(gate_up) % (2 * count) == 0
    assert all(stack.is_contiguous() and stack.dtype == x.dtype for stack in (gate_up, down) if isinstance(stack, Tensor))
    if not len(x):
        return torch.empty_like(x)
    choices = Choices(ids, weights, count, first)
    of_gate_up, of_down = biases or (None, None)
    if in_order and few_tokens(len(x)):
        return direct_down(direct_gate_up(x, choices, gate_up, of_gate_up, activation), choices, down, of_down, x.shape[1])
    alone = few_tokens(len(x)) and fit_a_program(choices, gate_up, down) if few is None else few
    if alone and not in_order:
        return few_down(few_gate_up(x, choices, gate_up, of_gate_up, activation), choices, down, of_down, x)
    lined_up = sort_by_expert(ids, count, first, tile_rows(choices, x.dtype, gate_up, down))
    gated = many_gate_up(x, choices, lined_up, gate_up, of_gate_up, activation, in_order)
    return many_down(gated, choices, lined_up, down, of_down, x.shape[1], in_order)


def shared_mixture(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared_gate_up: Tensor,  # [2 * width, hidden]
    shared_down: Tensor,  # [hidden, width]
    shared_gate: Tensor | None,  # [1, hidden]; None: the shared expert has weight 1
    first: int = 0,
) -> Tensor:
    """`mixture` of few tokens in floats, and an expert through which all of them pass"""
    choices, shared = Choices(ids, weights, len(down) // x.shape[1], first), Shared(shared_gate_up, shared_down, shared_gate)
    if not fits_beside(x.shape[1], down.shape[1], shared_down.shape[1], choices.chosen):
        added = linear(gate_and_mul(linear(x, shared_gate_up), "swiglu"), shared_down)
        out = mixture(x, ids, weights, gate_up, down, first=first)
        return out + added if shared_gate is None else add_weighted(out, added, x, shared_gate)
    return few_down(few_gate_up(x, choices, gate_up, None, "swiglu", shared), choices, down, None, x, shared)


def fits_beside(hidden: int, inner: int, width: int, chosen: int) -> bool:
    """Whether a program can hold a row of the shared expert beside those of the chosen ones."""
    held = triton.next_power_of_2(inner) * chosen + triton.next_power_of_2(width)
    return row_tiles(hidden, 2) is not None and held <= MAX_HELD


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


def few_tokens(tokens: int) -> bool:
    return tokens <= FEW_TOKENS


# -- precompilation


def mixture_calls(
    experts: ExpertShape, hidden: int, inner: int, gate: Gate, dtype: torch.dtype, device: torch.device
) -> list[Callable[[], object]]:
    """Returns calls of the routing, and of each way to divide the products that some number of tokens selects."""
    found: dict[int, int] = {}  # way of dividing -> number of tokens
    for tokens in (1, *(1 << power for power in range(MOST_TOKENS.bit_length()))):
        way = 0 if few_tokens(tokens) else grouped_rows(tokens * experts.chosen, experts.count)
        found.setdefault(way, tokens)
    return [_call(experts, hidden, inner, gate, tokens, dtype, device) for tokens in found.values()]


def _call(
    experts: ExpertShape, hidden: int, inner: int, gate: Gate, tokens: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    def call() -> None:
        x, logits = (torch.empty(tokens, size, dtype=dtype, device=device) for size in (hidden, experts.count))
        if experts.in_groups is None:
            ids, weights = choose_experts(logits, experts.chosen, experts.scores, experts.normed)
        else:
            correction = torch.empty(experts.count, device=device) if experts.biased else None
            ids, weights = choose_in_groups(logits, experts.chosen, experts.scores, experts.normed, *experts.in_groups, correction, 1.0)
        tall, wide = experts.count * 2 * inner, experts.count * hidden
        stacks = stack(experts, tall, hidden, dtype, device), stack(experts, wide, inner, dtype, device)
        biases = tuple(torch.empty(rows, dtype=dtype, device=device) for rows in (tall, wide)) if experts.bias else None
        mixture(x, ids, weights, *stacks, biases, gate)  # type: ignore[arg-type]
        if experts.shared and not experts.bits and gate == "swiglu" and few_tokens(tokens):
            up, back = (torch.empty(size, dtype=dtype, device=device) for size in ((2 * experts.shared, hidden), (hidden, experts.shared)))
            shared_gate = torch.empty(1, hidden, dtype=dtype, device=device) if experts.shared_gated else None
            shared_mixture(x, ids, weights, *stacks, up, back, shared_gate)  # type: ignore[arg-type]

    return call


def stack(experts: ExpertShape, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor | DeviceCodes:
    """Returns untouched memory: the stack of a large model has gigabytes."""
    if not experts.bits:
        return torch.empty(rows, size, dtype=dtype, device=device)
    table = torch.zeros(16, dtype=torch.uint8, device=device) if experts.table else None
    return replace(zero_codes(rows, size, experts.bits, experts.group, device), table=table, floats=experts.floats)
