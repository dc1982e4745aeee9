"""Scales and caps logits in place, one tile per program."""

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.attention.common import capped
from octavo.kernels.triton.pdl import begin, use_pdl, wait

TILE = 2048


@triton.jit(do_not_specialize=["count"])
def scale_tile(logits, scale, cap, count, CAPPED: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    wait(PDL)
    wide = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
    result = capped(wide, scale, cap, CAPPED) if CAPPED else wide * scale
    tl.store(logits + at, result.to(logits.dtype.element_ty), mask=inside)


def scale_logits(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    """Scales logits in place, and then caps them: cap * tanh(logits / cap)."""
    assert logits.is_contiguous()
    if logits.numel():
        scale_tile[(triton.cdiv(logits.numel(), TILE),)](
            logits, scale, cap or 0.0, logits.numel(), CAPPED=cap is not None, TILE=TILE, PDL=use_pdl(), num_warps=4, launch_pdl=use_pdl()
        )
    return logits
