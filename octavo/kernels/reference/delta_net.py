"""Gated DeltaNet in plain torch, token by token: a convolution over the last tokens, and a state that each token updates.

    slots of `conv` and `recurrent`     0: zeros, where every sequence begins     3      7      9
    a row of 5 tokens                   reads slot 3 -> t0 t1 t2 | t3 t4 -> writes slot 7
                                                                +-> checkpoint: writes slot 9

A step reads and writes different slots, so it can be computed twice.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.step.step_tensors import NO_STATE, StepStates

EPS = 1e-6  # of the norms of q and k


def delta_net(
    qkv: Tensor,  # [T, channels]: q heads, k heads, v heads
    gates: Tensor,  # [T, 2 * v_heads]: of each v head, how much is written (b), and how much is forgotten (a)
    conv_weight: Tensor,  # [channels, width]
    decay: Tensor,  # [v_heads]: the logarithm of the rate
    dt_bias: Tensor,  # [v_heads]
    conv: Tensor,  # [slots, width - 1, channels]: the last inputs of the convolution, oldest first
    recurrent: Tensor,  # [slots, v_heads, k_dim, v_dim]
    query_start: Tensor,  # [P+1]
    states: StepStates,
) -> Tensor:
    """Returns the result of each token [T, v_heads, v_dim] float32, and stores the states of all rows."""
    _, heads, k_dim, v_dim = recurrent.shape
    width = conv_weight.shape[1]
    b, a = gates.float().split(heads, dim=1)
    beta, forgetting = b.sigmoid(), -decay.exp() * F.softplus(a + dt_bias)  # [T, v_heads]
    out = torch.zeros(len(qkv), heads, v_dim, dtype=torch.float32, device=qkv.device)
    starts, checkpoints = query_start.tolist(), states.checkpoints.tolist()
    first_checkpoint = states.first_checkpoint.tolist()
    for row, (read, write) in enumerate(zip(states.read.tolist(), states.write.tolist(), strict=True)):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        inputs = torch.cat([conv[read], qkv[start:end].float()])  # [width - 1 + tokens, channels]
        q, k, v = _heads(_convolved(inputs, conv_weight), heads, k_dim, v_dim)
        targets = dict(checkpoints[first_checkpoint[row] : first_checkpoint[row + 1]]) | ({} if write == NO_STATE else {end: write})
        state = recurrent[read]
        for token in range(start, end):
            at = token - start
            state = state * forgetting[token].exp()[:, None, None]
            missing = v[at] - torch.einsum("hkv,hk->hv", state, k[at])  # what the state does not know of this token
            state = state + torch.einsum("hk,hv->hkv", k[at], missing * beta[token, :, None])
            out[token] = torch.einsum("hkv,hk->hv", state, q[at])
            if (slot := targets.get(token + 1)) is not None:
                recurrent[slot], conv[slot] = state, inputs[at + 1 : at + width]
    return out


def _convolved(inputs: Tensor, weight: Tensor) -> Tensor:
    """Returns silu of the causal convolution, channel by channel. inputs: [width - 1 + tokens, channels]"""
    width = weight.shape[1]
    tokens = len(inputs) - width + 1
    wide, total = weight.float(), torch.zeros_like(inputs[:tokens])
    for behind in range(width):
        total = total + inputs[behind : behind + tokens] * wide[:, behind]
    return F.silu(total)


def _heads(mixed: Tensor, heads: int, k_dim: int, v_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k [tokens, v_heads, k_dim] and v [tokens, v_heads, v_dim]: q and k normed, and repeated for their v heads."""
    v_size = heads * v_dim
    q, k, v = mixed.split([(mixed.shape[1] - v_size) // 2, (mixed.shape[1] - v_size) // 2, v_size], dim=1)
    q, k = (_normed(x.unflatten(1, (-1, k_dim))) for x in (q, k))
    times = heads // q.shape[1]
    return q.repeat_interleave(times, dim=1) * k_dim**-0.5, k.repeat_interleave(times, dim=1), v.unflatten(1, (heads, v_dim))


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns rms_norm(x) * weight * silu(gate), over the last dimension, in the dtype of gate. x: float32"""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float() * F.silu(gate.float())).to(gate.dtype)
