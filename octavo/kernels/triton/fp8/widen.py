"""Converts 8-bit floats (e4m3) to float32 on every GPU. If there is no instruction for it, they are loaded as bytes and bits are moved."""

import triton
import triton.language as tl

REBASE = tl.constexpr(2.0**120)  # the exponent bias of e4m3 is 7, that of float32 127


@triton.jit
def widened(values):
    """Converts bytes or 8-bit floats to float32, exactly. Wider floats are only converted to float32."""
    if values.dtype == tl.uint8:
        bits = values.to(tl.uint32)
        return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * REBASE
    else:
        return values.to(tl.float32)
