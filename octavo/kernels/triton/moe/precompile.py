"""Calls that precompile the MoE kernels: routing, and each way to divide the products that some number of tokens selects."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from octavo.kernels.device_codes import DeviceCodes, zero_codes
from octavo.kernels.gates import Gate
from octavo.kernels.kernel_shapes import ExpertShape
from octavo.kernels.triton.moe.products import mixture
from octavo.kernels.triton.moe.route import choose_experts
from octavo.kernels.triton.moe.rules import few_tokens, grouped_rows

MOST_TOKENS = 1 << 14


def mixture_calls(
    experts: ExpertShape, hidden: int, inner: int, gate: Gate, dtype: torch.dtype, device: torch.device
) -> list[Callable[[], object]]:
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
        ids, weights = choose_experts(logits, experts.chosen, experts.scores, experts.normed)
        tall, wide = experts.count * 2 * inner, experts.count * hidden
        stacks = stack(experts, tall, hidden, dtype, device), stack(experts, wide, inner, dtype, device)
        biases = tuple(torch.empty(rows, dtype=dtype, device=device) for rows in (tall, wide)) if experts.bias else None
        mixture(x, ids, weights, *stacks, biases, gate)  # type: ignore[arg-type]

    return call


def stack(experts: ExpertShape, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor | DeviceCodes:
    """Returns untouched memory: the stack of a large model has gigabytes."""
    if not experts.bits:
        return torch.empty(rows, size, dtype=dtype, device=device)
    table = torch.zeros(16, dtype=torch.uint8, device=device) if experts.table else None
    return replace(zero_codes(rows, size, experts.bits, experts.group, device), table=table, floats=experts.floats)
