"""The GPU that kernels are compiled for, by its compute capability, and what follows from it.

    80 A100   86 RTX 30, A10   87 Jetson Orin   89 RTX 40, L4   90 H100, H200   100 B200   120 RTX 50   121 GB10

Asked of Triton's driver and not of torch: kernels are also compiled where there is no GPU, for the one that a driver names.
"""

from functools import cache

from triton import knobs
from triton.runtime.driver import driver

KIB = 1024
INTERPRETED, ADA, HOPPER = 0, 89, 90
ROOMY = 227 * KIB  # of shared memory for a block of threads: what the tiles that are best on Hopper need
LEAST = 99 * KIB
SHARED_MEMORY = {INTERPRETED: ROOMY, 80: 163 * KIB, 87: 163 * KIB, 90: ROOMY, 100: ROOMY, 103: ROOMY}  # all others: the least


@cache
def capability() -> int:
    """90 for 9.0. The interpreter is no GPU, and lacks no memory."""
    return INTERPRETED if knobs.runtime.interpret else int(driver.active.get_current_target().arch)


def is_roomy(arch: int) -> bool:
    """Whether the largest tiles fit. Their products are also of instructions that leave registers alone, which other GPUs lack."""
    return SHARED_MEMORY.get(arch, LEAST) >= ROOMY


def has_copy_engine(arch: int) -> bool:
    """Tensor descriptors; the interpreter plays them."""
    return arch >= HOPPER or arch == INTERPRETED


def converts_fp8(arch: int) -> bool:
    """Instructions for 8-bit floats (e4m3), which matrix units multiply, too; the interpreter plays them."""
    return arch >= ADA or arch == INTERPRETED


def has_pdl(arch: int) -> bool:
    return arch >= HOPPER


def has_divided_prefill(arch: int) -> bool:
    """Hopper alone: the products of `prefill_hopper.py` are instructions that no later GPU has, and the interpreter knows no Gluon."""
    return arch == HOPPER
