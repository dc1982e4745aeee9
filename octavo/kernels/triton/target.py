"""The GPU that kernels are compiled for, by compute capability, and its properties.

    80 A100   86 RTX 30, A10   87 Jetson Orin   89 RTX 40, L4   90 H100, H200   100 B200   120 RTX 50   121 GB10

The capability comes from Triton's driver, not from torch: kernels are also compiled on machines without a GPU, for one that a stub
driver names.
"""

from functools import cache

from triton import knobs
from triton.runtime.driver import driver

KIB = 1024
INTERPRETED, ADA, HOPPER = 0, 89, 90
ROOMY = 227 * KIB  # of shared memory for a thread block: needed by the tiles that are best on Hopper
LEAST = 99 * KIB
SHARED_MEMORY = {INTERPRETED: ROOMY, 80: 163 * KIB, 87: 163 * KIB, 90: ROOMY, 100: ROOMY, 103: ROOMY}  # all others: the minimum


@cache
def capability() -> int:
    """90 for 9.0. The interpreter has no capability and no memory limit."""
    return INTERPRETED if knobs.runtime.interpret else int(driver.active.get_current_target().arch)


def is_roomy(arch: int) -> bool:
    """Whether the largest tiles fit. Their products also use instructions that do not need registers, which other GPUs lack."""
    return SHARED_MEMORY.get(arch, LEAST) >= ROOMY


def has_copy_engine(arch: int) -> bool:
    """Whether there are tensor descriptors; the interpreter emulates them."""
    return arch >= HOPPER or arch == INTERPRETED


def converts_fp8(arch: int) -> bool:
    """Whether there are instructions for 8-bit floats (e4m3), also in the tensor cores; the interpreter emulates them."""
    return arch >= ADA or arch == INTERPRETED


def has_pdl(arch: int) -> bool:
    return arch >= HOPPER


def has_divided_prefill(arch: int) -> bool:
    """Only Hopper: `prefill_hopper.py` uses instructions that no later GPU has, and the interpreter does not support Gluon."""
    return arch == HOPPER
