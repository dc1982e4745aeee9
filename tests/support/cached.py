"""What is in Triton's cache of what an engine calls, and what is not: `python -m tests.support.cached < wanted.json`, a line each.

Some kernels are called as an engine calls them, for a GPU that is not there, and loaded, but not launched.
"""

import json
import sys
from typing import Any

import torch
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime import build
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from octavo.worker.compile_process import NoGPU
from octavo.worker.compilers import Wanted
from octavo.worker.kernel_calls import KernelCalls, kernel_keys
from octavo.worker.kernel_shapes import from_json


def call_fewer() -> None:
    """A few of the kernels: those that share functions, one with tensor descriptors, some small ones."""
    KernelCalls.calls = lambda self: [self.attend_to(1, 32, self.spec), self.around_a_step, self.behind_a_step()[0]]  # type: ignore[method-assign]


def compile_only() -> None:
    run = JITFunction.run

    def compiled(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        CudaLauncher(kernel.src, kernel.metadata)

    JITFunction.run = compiled


def report() -> None:
    make = build._build

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        print("found" if cache_hit else "compiled", src.name)

    def built(name: str, *rest: Any) -> Any:
        print("built", name)
        return make(name, *rest)

    knobs.compilation.listener = listen
    build._build = built


def main() -> None:
    wanted = from_json(Wanted, json.loads(sys.stdin.readline()))
    driver.set_active(NoGPU(wanted.capability))
    report()
    call_fewer()
    compile_only()
    CudaUtils()
    kernel_keys()
    calls = KernelCalls(wanted.shapes, getattr(torch, wanted.dtype), wanted.block_size, wanted.max_len, torch.device("cpu"))
    for call in calls.calls():
        call()


if __name__ == "__main__":
    main()
