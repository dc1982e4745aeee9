"""A mixture of experts (MoE) in plain torch: the selection of experts for each token, and the weighted sum of their outputs.

    x [T, hidden] -> logits [T, count] -> ids, weights [T, chosen]
    for each expert:  its tokens -> gate, up -> activation -> down -> times the weight -> added to the tokens' rows

A stack contains the matrices of all experts, one below the other. It is a matrix like any other, and may be quantised:

    gate_up   [ gate of 0 | up of 0 | gate of 1 | up of 1 | ... ]    count * 2 * inner rows
    down      [ down of 0 | down of 1 | ... ]                        count * hidden rows

The outputs of experts are added to a token in the order of their numbers, independently of the rest of the batch.
"""

import torch
from torch import Tensor

from octavo.kernels.device_codes import DeviceCodes
from octavo.kernels.reference.layer import silu_and_mul, unpack
from octavo.kernels.reference.products import multiply

LIMIT, STEEPNESS = 7.0, 1.702  # constants of the clamped gate


def choose_experts(logits: Tensor, chosen: int, scores: str, normed: bool) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token [T, chosen] int64, the best first, and their weights [T, chosen] float32.

    logits: [T, count]; scores: "all" takes the softmax over all experts, "chosen" over the chosen ones; normed: weights sum to 1
    """
    wide = logits.float()
    if scores == "chosen":
        best, ids = wide.topk(chosen, dim=-1)
        return ids, best.softmax(-1)
    weights, ids = wide.softmax(-1).topk(chosen, dim=-1)
    return ids, weights / weights.sum(-1, keepdim=True) if normed else weights


def mixture(
    x: Tensor,  # [T, hidden]
    ids: Tensor,  # [T, chosen]
    weights: Tensor,  # [T, chosen] float32
    gate_up: Tensor | DeviceCodes,  # [count * 2 * inner, hidden]
    down: Tensor | DeviceCodes,  # [count * hidden, inner]
    biases: tuple[Tensor, Tensor] | None = None,  # [count * 2 * inner] and [count * hidden]
    activation: str = "swiglu",
    first: int = 0,  # the number of the first expert in the stack; experts that it does not contain add nothing
) -> Tensor:
    """Returns the weighted sum of the outputs of each token's experts [T, hidden]."""
    count = len(down) // x.shape[1]
    order = ids.flatten().argsort(stable=True)  # indices of all choices, sorted by expert
    sizes = torch.bincount(ids.flatten(), minlength=first + count)[first : first + count].tolist()
    start = int((ids < first).sum())
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert, size in enumerate(sizes):
        if size:
            places = order[start : start + size]
            tokens = places // ids.shape[1]
            given = _expert(x[tokens], expert, count, gate_up, down, biases, activation)
            out.index_add_(0, tokens, given.float() * weights.flatten()[places].unsqueeze(-1))
        start += size
    return out.to(x.dtype)


def _expert(
    x: Tensor, expert: int, count: int, gate_up: Tensor | DeviceCodes, down: Tensor | DeviceCodes,
    biases: tuple[Tensor, Tensor] | None, activation: str,
) -> Tensor:  # fmt: skip
    gate_bias, down_bias = (None, None) if biases is None else (bias.chunk(count)[expert] for bias in biases)
    gated = gate(multiply(x, _rows(gate_up, expert, count, x), gate_bias), activation)
    return multiply(gated, _rows(down, expert, count, x), down_bias)


def _rows(stack: Tensor | DeviceCodes, expert: int, count: int, x: Tensor) -> Tensor:
    """Returns the matrix of one expert, as floats."""
    size = len(stack) // count
    if isinstance(stack, Tensor):
        return stack[expert * size : (expert + 1) * size]
    return unpack(stack, x.dtype, torch.arange(expert * size, (expert + 1) * size, device=x.device))


def gate(x: Tensor, activation: str) -> Tensor:
    """Returns up multiplied by the activated gate [T, inner]. x: [T, 2 * inner], gate then up"""
    return {"swiglu": silu_and_mul, "clamped": clamped_and_mul}[activation](x)


def clamped_and_mul(x: Tensor) -> Tensor:
    """Returns gate * sigmoid(1.702 gate) * (up + 1), with the gate at most 7 and up from -7 to 7. x: [T, 2 * inner], gate then up"""
    gates, up = x.chunk(2, dim=-1)
    gates, up = gates.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * (gates * torch.sigmoid(gates * STEEPNESS))
