"""8-bit floats (e4m3) as wider ones, on every GPU: where no instruction converts them they come as bytes, and bits are moved."""

import triton
import triton.language as tl

REBASE = tl.constexpr(2.0**120)  # an exponent of e4m3 counts from 7, one of float32 from 127


@triton.jit
def widened(values):
    """In float32, exactly; as bytes or as 8-bit floats. A float that is none comes back as it is, in float32."""
    if values.dtype == tl.uint8:
        bits = values.to(tl.uint32)
        return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * REBASE
    else:
        return values.to(tl.float32)
