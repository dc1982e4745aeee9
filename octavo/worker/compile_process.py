"""The process that compiles kernels for its parent, which starts it in `compilers.py`.

It reads a `Wanted` as a line of JSON. Every kernel is called on CPU tensors, and a hook records the compilations that Triton would
start. Then up to the given number of processes take the jobs one by one, the slow ones first. Neither this process nor its children
start CUDA: a stub driver names the GPU to compile for. It prints one line for each event:

    all NAME...         the kernels that will be compiled
    done NAME           the kernel is in Triton's cache
    failed NAME why     it could not be compiled
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver

from octavo.child import die_with
from octavo.worker.compilers import DONE, DRIVER, FAILED, SEEN, Wanted, variant
from octavo.worker.kernel_calls import KernelCalls, kernel_keys
from octavo.worker.kernel_shapes import from_json

SLOW = (  # slowest first
    "prefill_hopper", "latent_prefill", "latent_decode", "within", "across", "prefill", "draw_fallback", "packed_gemm", "packed_gemv",
    "settle", "packed_small_gemm", "merge_gemv", "fused_decode", "decode", "fp8_tiles", "nearest", "gather", "weigh", "adjust_rows",
)  # fmt: skip
MOST_PROCESSES = 16
MOST_LETTERS = 1000  # of an error: a line must be written to the pipe in one piece


class NoGPU:
    """A stub driver that names the GPU to compile for and supports nothing else."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    compile: Callable[[], object]


def find_jobs(wanted: Wanted) -> tuple[list[Job], list[str]]:
    """Returns one job for each kernel to compile, slow ones first, and errors that may have hidden some."""
    found: dict[str, Job] = {}
    troubles = []

    def write_down(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        name = variant(fn, key)
        found[name] = Job(name, partial(compile_kernel, fn.jit_function, compile["specialization_data"]))
        return True  # do not compile it now

    driver.set_active(NoGPU(wanted.capability))
    knobs.runtime.jit_cache_hook = write_down
    dtype, cpu = getattr(torch, wanted.dtype), torch.device("cpu")
    for call in KernelCalls(wanted.shapes, dtype, wanted.block_size, wanted.max_len, cpu, wanted.layout).calls():
        try:
            call()
        except Exception as error:
            troubles.append(repr(error))
    knobs.runtime.jit_cache_hook = None
    return [Job(DRIVER, CudaUtils), *sorted(found.values(), key=lambda job: _slowness(job.name))], troubles


def _slowness(name: str) -> int:
    kernel = name.partition("-")[0].rpartition(".")[2]
    return SLOW.index(kernel) if kernel in SLOW else len(SLOW)


def compile_kernel(function: Any, specialization: str) -> None:
    """Compiles a kernel to machine code, and the small C library that launches it. Both are stored in the cache."""
    kernel = function.preload(specialization)
    CudaLauncher(kernel.src, kernel.metadata)


def compile_all(jobs: list[Job], processes: int, results: int) -> None:
    """Runs all jobs in several processes. A pipe holds the job numbers, one byte each, and an idle process takes the next."""
    queue, filling = os.pipe()
    os.write(filling, bytes(range(len(jobs))))
    os.close(filling)
    own = os.getpid()
    for child in [_fork(partial(work, jobs, queue, results, own)) for _ in range(min(processes, MOST_PROCESSES, len(jobs)))]:
        os.waitpid(child, 0)


def _fork(task: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            task()
        finally:
            os._exit(0)  # the child must not continue with the parent's code
    return pid


def work(jobs: list[Job], queue: int, results: int, parent: int) -> None:
    die_with(parent)
    while number := os.read(queue, 1):
        job = jobs[number[0]]
        try:
            job.compile()
            say(results, DONE, job.name)
        except Exception as error:
            say(results, FAILED, job.name, repr(error)[:MOST_LETTERS])


def say(results: int, *words: str) -> None:
    os.write(results, " ".join(" ".join(words).split()).encode() + b"\n")


def main(parent: int) -> None:
    die_with(parent)
    results = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of compilers must not mix with results
    torch.set_num_threads(1)
    kernel_keys()
    triton_key()  # hashes all of Triton: once, before children are forked
    line = sys.stdin.readline()
    if line and not knobs.runtime.interpret:
        wanted: Wanted = from_json(Wanted, json.loads(line))
        jobs, troubles = find_jobs(wanted)
        for why in troubles:
            say(results, FAILED, "call", why[:MOST_LETTERS])
        say(results, SEEN, *(job.name for job in jobs))
        compile_all(jobs, wanted.processes, results)
