"""Gated DeltaNet on a GPU: rows of few tokens go through the recurrence, and prompts through chunks, beside each other in one step.

    a decode step    recur
    a mixed step     recur: rows of few tokens | convolve, within, across: all others

All kernels leave out the rows of the others, so grids depend on the number of tokens and rows alone, and steps can be captured. With
`deterministic` the recurrence computes all rows by one kernel: where chunks of tokens end, and what is computed beside a row, then
changes no bit of it.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from octavo.kernels.reference.delta_net import EPS
from octavo.kernels.triton.attention.tiles import MIN_DOT
from octavo.kernels.triton.delta_net.chunks import CELL, across, convolve, within
from octavo.kernels.triton.delta_net.recurrence import recur
from octavo.kernels.triton.pdl import use_pdl
from octavo.kernels.triton.target import capability, is_roomy
from octavo.step.step_tensors import StepStates

SHORT = 4  # tokens: rows of more are computed in chunks
PROGRAMS = 512  # of the recurrence, at least, while a tile of a state can be narrower
TILES = (64, 32, 16)  # columns of a state in a program
MIXED_TILE = 32  # of a mixed step, and of `deterministic`
TILED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, PROGRAMS)  # of decode steps: together they have every tile that any number of rows has
CONVOLVED = 16  # tokens of a program
WITHIN_WARPS, ACROSS_TILE = 2, 32  # in 16 bits, the fastest on an H200
LARGE_STATE = 8192  # numbers of a tile that need more warps


def padded(dim: int) -> int:
    return max(int(triton.next_power_of_2(dim)), MIN_DOT)


@dataclass(frozen=True)
class Step:
    """The arguments that kernels have in common."""

    qkv: Tensor
    gates: Tensor
    weights: tuple[Tensor, Tensor, Tensor]  # of the convolution; decay and dt_bias
    conv: Tensor
    recurrent: Tensor
    query_start: Tensor
    states: StepStates

    @property
    def sizes(self) -> dict[str, int]:
        _, v_heads, k_dim, v_dim = self.recurrent.shape
        k_heads = (self.conv.shape[2] - v_heads * v_dim) // (2 * k_dim)
        return {"K_HEADS": k_heads, "V_HEADS": v_heads, "K_DIM": k_dim, "V_DIM": v_dim}

    @cached_property
    def inputs(self) -> dict[str, Any]:
        return {"STRIDE": self.qkv.stride(0), "WIDTH": self.weights[0].shape[1]}

    @property
    def norms(self) -> dict[str, float]:
        return {"EPS": EPS, "SCALE": self.recurrent.shape[2] ** -0.5}

    @property
    def k_tile(self) -> int:
        return padded(self.recurrent.shape[2])

    @property
    def v_tile(self) -> int:
        return padded(self.recurrent.shape[3])

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(len(self.qkv), *shape, dtype=dtype or self.qkv.dtype, device=self.qkv.device)


def delta_net(
    qkv: Tensor, gates: Tensor, conv_weight: Tensor, decay: Tensor, dt_bias: Tensor, conv: Tensor, recurrent: Tensor,
    query_start: Tensor, states: StepStates,
) -> Tensor:  # fmt: skip
    """Like the reference (`kernels/reference/delta_net.py`). A step of as many tokens as rows has one token in each of them."""
    step = checked(qkv, gates, conv_weight, decay, dt_bias, conv, recurrent, query_start, states)
    tokens, rows, (v_heads, _, v_dim) = len(qkv), len(states.read), recurrent.shape[1:]
    out = step.empty(v_heads, v_dim, dtype=torch.float32)
    if not tokens:
        return out
    if tokens == rows:
        wide = (tile for tile in TILES if rows * v_heads * triton.cdiv(v_dim, tile) >= PROGRAMS)
        by_recurrence(step, out, min(next(wide, TILES[-1]), step.v_tile), single=True, most=1)
        return out
    by_recurrence(step, out, min(MIXED_TILE, step.v_tile), single=False, most=SHORT)
    by_chunks(step, out)
    return out


def invariant_delta_net(
    qkv: Tensor, gates: Tensor, conv_weight: Tensor, decay: Tensor, dt_bias: Tensor, conv: Tensor, recurrent: Tensor,
    query_start: Tensor, states: StepStates,
) -> Tensor:  # fmt: skip
    """Like `delta_net`: a row's bits do not depend on the other rows, nor on where its tokens are divided into steps."""
    step = checked(qkv, gates, conv_weight, decay, dt_bias, conv, recurrent, query_start, states)
    out = torch.zeros(len(qkv), recurrent.shape[1], recurrent.shape[3], dtype=torch.float32, device=qkv.device)
    if len(qkv):
        by_recurrence(step, out, min(MIXED_TILE, step.v_tile), single=False, most=0)
    return out


def checked(
    qkv: Tensor, gates: Tensor, conv_weight: Tensor, decay: Tensor, dt_bias: Tensor, conv: Tensor, recurrent: Tensor,
    query_start: Tensor, states: StepStates,
) -> Step:  # fmt: skip
    assert qkv.stride(1) == 1 and gates.is_contiguous() and conv_weight.is_contiguous() and conv.is_contiguous()
    assert recurrent.is_contiguous() and conv.dtype == recurrent.dtype == decay.dtype == dt_bias.dtype == torch.float32
    return Step(qkv, gates, (conv_weight, decay, dt_bias), conv, recurrent, query_start, states)


def by_recurrence(step: Step, out: Tensor, v_tile: int, single: bool, most: int) -> None:
    """Computes the rows of at most `most` tokens; all, if it is 0."""
    states, pdl = step.states, use_pdl()
    _, v_heads, _, v_dim = step.recurrent.shape
    recur[(triton.cdiv(v_dim, v_tile), v_heads, len(states.read))](
        step.qkv, step.gates, *step.weights, step.conv, step.recurrent, step.query_start, states.read, states.write,
        states.first_checkpoint, states.checkpoints, out, **step.inputs, **step.sizes, **step.norms, K_TILE=step.k_tile, V_TILE=v_tile,
        SINGLE=single, MOST=most, PDL=pdl, num_warps=8 if step.k_tile * v_tile > LARGE_STATE else 4, launch_pdl=pdl,
    )  # fmt: skip


def by_chunks(step: Step, out: Tensor) -> None:
    """Computes the rows of more than SHORT tokens, and fills the results of padding."""
    states, pdl, tokens, rows = step.states, use_pdl(), len(step.qkv), len(step.states.read)
    k_heads, v_heads, k_dim, v_dim = step.sizes.values()
    conv_weight, decay, dt_bias = step.weights
    q, k, v = step.empty(k_heads, k_dim), step.empty(k_heads, k_dim), step.empty(v_heads, v_dim)
    convolve[(triton.cdiv(tokens, CONVOLVED), 2 * k_heads + v_heads)](
        step.qkv, conv_weight, step.conv, step.query_start, states.read, q, k, v, out, tokens, rows, **step.inputs, **step.sizes,
        **step.norms, TOKENS=CONVOLVED, DIM_TILE=max(step.k_tile, step.v_tile), MOST=SHORT, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    wide = step.qkv.dtype == torch.float32
    w, scores, faded = step.empty(v_heads, k_dim), step.empty(v_heads, CELL.value), step.empty(v_heads, dtype=torch.float32)
    within[(tokens // CELL.value + 2 * rows, v_heads)](
        q, k, v, w, scores, faded, step.gates, decay, dt_bias, step.query_start, states.start, states.first_checkpoint,
        states.checkpoints, rows, **step.sizes, K_TILE=step.k_tile, V_TILE=step.v_tile,
        BLOCK=32 if wide else 64, MOST=SHORT, PDL=pdl, num_warps=4 if wide else WITHIN_WARPS, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip
    v_tile = min(TILES[2] if wide else ACROSS_TILE, step.v_tile)
    across[(triton.cdiv(v_dim, v_tile), v_heads, rows)](
        q, k, v, w, scores, faded, step.qkv, step.conv, step.recurrent, step.query_start, states.read, states.write, states.start,
        states.first_checkpoint, states.checkpoints, out, **step.inputs, **step.sizes, K_TILE=step.k_tile, V_TILE=v_tile, MOST=SHORT,
        STAGES=2 if is_roomy(capability()) and not wide else 1, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
