"""Programmatic dependent launch: a kernel begins while the one before it on the stream still runs.

    kernel N      launches dependents | weights on their way | waits | reads x, writes y ............ |
    kernel N + 1        launches dependents | weights on their way ................... waits for all of N | reads y, ...

Until `gdc_wait` has returned a kernel touches nothing but weights: no activations, cache, tables or lengths, and no writes.
Every program of every kernel waits. So, whoever has waited knows that all kernels before it have ended, not only the last:
that one ended because it had waited in turn. Hence a kernel may write where an earlier one still read when this one began, which
is what an allocator makes of memory that was freed: all writes come after the wait. A kernel that is launched plainly, before or
after, is waited for or waits as ever. Weights must not be written by a kernel just before.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton.target import capability, has_pdl


def use_pdl() -> bool:
    """Hopper and later; not in the interpreter."""
    return has_pdl(capability())


@triton.jit
def begin(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    if PDL:
        gdc_wait()
