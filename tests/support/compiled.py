"""Compiles the Triton kernels for Hopper down to machine code, with no GPU about: `python -m tests.support.hopper [further]`.

The interpreter runs what the compiler may refuse. Kernels are asked for through their public functions, so with the very
arguments they get; a driver that is none says what to compile for, and nothing is launched. A kernel that spills registers or
takes more shared memory than there is ends it too. `further`: attention of other types and head sizes, with all that scores can have.
"""

import io
import re
import sys
from contextlib import redirect_stdout
from typing import Any

import torch
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from octavo.kernels.asks import HEAD
from octavo.kernels.cache_layout import Layout, empty_cache
from octavo.kernels.device_codes import zero_codes
from octavo.kernels.reference.sampling import Draws
from octavo.kernels.triton.activation import silu_and_mul
from octavo.kernels.triton.adjust import adjust
from octavo.kernels.triton.attention import paged_attention
from octavo.kernels.triton.attention_few import decode_attention_parts
from octavo.kernels.triton.copy_blocks import copy_blocks
from octavo.kernels.triton.draw import draw
from octavo.kernels.triton.norm import add_rms_norm
from octavo.kernels.triton.packed import packed_gate_up, packed_linear, unpack
from octavo.kernels.triton.rank import rank
from octavo.kernels.triton.sampling import sample
from octavo.kernels.triton.skinny import gate_up, linear, merge_linear, merge_parts, norm_linear
from octavo.kernels.triton.write_kv import write_kv
from octavo.worker.compile_process import NoGPU

PUT_ASIDE = 16  # bytes of a loop's invariants, stored before and loaded after it
HOPPER = 90
SHARED_MEMORY = 227 * 1024  # of one block of threads
SPILLED = {"prefill": 1024, "prefill_hopper": 640}  # what was quickest on a GPU spills a little


def compile_only() -> list[str]:
    """From here on kernels are compiled and not launched; returns the list of what they took, a line each."""
    run, taken = JITFunction.run, []

    def compiled(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        with redirect_stdout(io.StringIO()) as said:
            kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        if "ptxas info" not in said.getvalue():
            return  # compiled before
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said.getvalue())))
        products = "wgmma" if "wgmma.mma_async" in kernel.asm["ptx"] else "mma" if "mma.sync" in kernel.asm["ptx"] else "-"
        taken.append(f"{self.fn.__name__} {products} spilled {spilled} shared {kernel.metadata.shared}")
        assert spilled <= SPILLED.get(self.fn.__name__, PUT_ASIDE) and kernel.metadata.shared <= SHARED_MEMORY, taken[-1]

    knobs.nvidia.dump_ptxas_log = True
    driver.set_active(NoGPU(HOPPER))
    JITFunction.run = compiled
    return taken


def compile_attention(dim: int, dtype: torch.dtype, heads: int, kv_heads: int = 8, layout: Layout = "nhd", **options: Any) -> None:
    """Prefill of rows in blocks and in this step's qkv, and decode."""
    index, tables = torch.zeros(5, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
    cache = empty_cache(layout, (9, 16, kv_heads, dim), dtype, torch.device("cpu"))
    q, k, v = torch.empty(4, heads + 2 * kv_heads, dim, dtype=dtype).split([heads, kv_heads, kv_heads], 1)
    out = torch.empty(q.shape, dtype=dtype)
    for fresh in (None, (k, v)):
        paged_attention(q, cache, cache, tables, index, index[:4], 0.1, out, 64, fresh=fresh, **options)


def compile_further() -> None:
    learned = torch.ones(32)
    compile_attention(64, torch.float16, 14, 2)
    compile_attention(128, torch.bfloat16, 16, layout="hnd", window=100)
    for head_dim in (80, 256):
        compile_attention(head_dim, torch.bfloat16, 32, soft_cap=30.0, sinks=learned, slopes=learned)


def compile_all() -> None:
    heads, kv_heads, dim, size = 32, 8, 128, 4096
    bf16 = {"dtype": torch.bfloat16}
    index, tables = torch.zeros(5, dtype=torch.int64), torch.zeros(4, 2, dtype=torch.int32)
    cache = torch.empty(9, 16, kv_heads, dim, **bf16)
    qkv = torch.empty(4, (heads + 2 * kv_heads) * dim, **bf16)
    norms = torch.empty(dim, **bf16), torch.empty(dim, **bf16), 1e-6
    turns = torch.empty(64, dim // 2)
    write_kv(qkv, norms, turns, turns, index, index, cache, cache)
    compile_attention(dim, torch.bfloat16, heads)
    compile_attention(dim, torch.float32, heads, layout="hnd")
    copy_blocks([cache], [(1, 2)])
    for rows in (1, 4):
        few = tables.narrow(0, 0, rows), index[:rows]
        parts = decode_attention_parts(qkv[:rows], norms, turns, turns, index[:rows], index[:rows], *few, cache, cache, 0.1)
        merge_linear(*parts, torch.empty(size, heads * dim, **bf16)), merge_parts(*parts, torch.bfloat16)
    for rows in (1, 4):
        x, scales, weight = torch.empty(rows, size, **bf16), torch.empty(size, **bf16), torch.empty(1024, size, **bf16)
        linear(x, weight), norm_linear(x, x, scales, 1e-6, weight), gate_up(x, x, scales, 1e-6, weight)
    silu_and_mul(x), add_rms_norm(x, x, scales, 1e-6)
    logits, lines = torch.empty(4, 151936, **bf16), torch.zeros(4, 11, dtype=torch.int32)
    sample(logits, torch.ones(4), torch.zeros(4, 4, dtype=torch.int64), index[:4])
    floats = lines.view(torch.float32)
    draw(logits, Draws(floats[:, 2], lines[:, 3], floats[:, 4], floats[:, 5], lines[:, 6:10], index[:4].int()))
    rank(logits, index[:4], 5)
    adjust(logits, [0], [0], [torch.zeros(HEAD, dtype=torch.int32)], lines[:, 2:], lines[:, 0], lines[:, 1])
    codes = zero_codes(1024, size, 4, 128, "cpu")
    for rows in (1, 4, 16, 64, 256):
        packed_linear(torch.empty(rows, size, **bf16), codes)
    x = torch.empty(1, size, **bf16)
    packed_gate_up(x, codes), packed_linear(torch.empty(1, 3 * size, **bf16), zero_codes(1024, 3 * size, 4, 128, "cpu"))
    short = zero_codes(1024, size, 4, 32, "cpu")
    packed_linear(x, short), packed_gate_up(x, short)
    packed_linear(torch.empty(1, 3 * size, **bf16), zero_codes(1024, 3 * size, 4, 32, "cpu"))
    unpack(codes, torch.bfloat16)


if __name__ == "__main__":
    taken = compile_only()
    compile_further() if sys.argv[1:] == ["further"] else compile_all()
    print("\n".join(taken))
