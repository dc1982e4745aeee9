"""Programmatic dependent launch (PDL): a kernel starts while the previous one on the stream still runs.

    kernel N      launches dependents | prefetches weights | waits | reads x, writes y ............. |
    kernel N + 1        launches dependents | prefetches weights ................. waits for all of N | reads y, ...

Until `gdc_wait` has returned, a kernel reads only weights: no activations, cache, tables or lengths, and it writes nothing.
Every program of every kernel waits. So after its wait a kernel knows that all earlier kernels have ended, not only the previous one,
since that one waited in turn. Hence a kernel may write where an earlier one was still reading when this one started, as happens when
an allocator reuses memory: all writes come after the wait. Order with kernels that are launched without PDL is as usual.
Weights must not be written by a kernel just before.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton.target import capability, has_pdl


def use_pdl() -> bool:
    """Whether PDL is used: on Hopper and later, but not in the interpreter."""
    return has_pdl(capability())


@triton.jit
def begin(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    if PDL:
        gdc_wait()
