"""Compiles the Triton kernels for GPUs that are not here: `python -m tests.support.compiled 90:every 86:largest,attention ...`.

    every       each kernel, as an engine calls it          largest     the one with the largest tiles, and one with assembly in it
    further     attention of other types and head sizes, with all that scores can have; caches without new tokens; one row
    attention   prefill and decode of the commonest shape       mixture     of experts, of floats, for one token and for many
    fp8         products with weights of 8-bit floats, for one row and for many
    invariant   the kernels of `deterministic`: products of all sizes, attention of all types
    delta_net   Gated DeltaNet: decode of few rows and of many, a mixed step, and the kernel of `deterministic`
    latent      latent attention of all published sizes, with its inputs, and experts in groups
    alike       the same with the kernels of `deterministic`

The interpreter runs what the compiler may refuse. Kernels are asked for through their public functions, so with the very
arguments they get; a driver that is none says what to compile for, and nothing is launched. A kernel that spills registers or
takes more shared memory than there is ends it, too. So does a capability that the installed Triton cannot compile for.
"""

import io
import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import torch
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from octavo.kernels.cache_layout import Layout, empty_cache
from octavo.kernels.device_codes import zero_codes
from octavo.kernels.fp8_matrix import zero_fp8
from octavo.kernels.gates import Gate
from octavo.kernels.reference.sampling import Draws
from octavo.kernels.triton.attention.fused_decode import decode_attention_parts
from octavo.kernels.triton.attention.paged_attention import paged_attention
from octavo.kernels.triton.delta_net.launch import delta_net, invariant_delta_net
from octavo.kernels.triton.fp8 import by_tiles, exact_tiles, fp8_linear, invariant_fp8_linear, rule
from octavo.kernels.triton.gemv.products import linear, merge_linear, merge_parts, norm_gate_up, norm_linear
from octavo.kernels.triton.invariant.attention import invariant_attention, invariant_shares
from octavo.kernels.triton.invariant.fused import invariant_add_norm, invariant_norm_gate_up, invariant_norm_linear, invariant_norm_router
from octavo.kernels.triton.invariant.products import invariant_gate_up, invariant_linear
from octavo.kernels.triton.latent.inputs import write_latent
from octavo.kernels.triton.latent.invariant import by_head, invariant_expand, invariant_latent_attention, invariant_latent_shares
from octavo.kernels.triton.latent.launch import latent_attention
from octavo.kernels.triton.moe.products import few_tokens, mixture, shared_mixture
from octavo.kernels.triton.moe.route import choose_experts, choose_in_groups
from octavo.kernels.triton.packed.products import invariant_packed_linear, packed_gate_up, packed_linear, unpack
from octavo.kernels.triton.sampling.draw import draw
from octavo.kernels.triton.sampling.logit_edits import edit_logits
from octavo.kernels.triton.sampling.rank import rank
from octavo.kernels.triton.sampling.sample import sample
from octavo.kernels.triton.step.cache import copy_blocks, write_kv
from octavo.kernels.triton.step.elementwise import gate_and_mul, scale_logits, silu_and_mul
from octavo.kernels.triton.step.norm import add_rms_norm, gated_norm, norm_add_norm
from octavo.step.logit_edits import HEAD
from octavo.step.step_tensors import StepStates
from octavo.step.team_words import ENTRY, LINE, Teams, most_teams
from octavo.worker.compile_process import NoGPU

PUT_ASIDE = 16  # bytes of a loop's invariants, stored before and loaded after it
KIB = 1024
# Of one block of threads, as NVIDIA's programming guide has it: not taken from the rules that are to be proven.
SHARED_MEMORY = {80: 163 * KIB, 86: 99 * KIB, 87: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 121: 99 * KIB}
SPILLED = {  # what was quickest on an H200 spills a little
    90: {"prefill": 1024, "prefill_hopper": 640, "invariant_teams": 192},
    100: {"prefill": 672},
    121: {"prefill": 80, "nearest": 64, "draw_fallback": 56},  # those of float32
}
# Of every target, never timed: of recurrent layers nearly all of it in float32; of latents what is alive beside 64 lines of results.
RECURRENT = {"within": 2048, "across": 1536}
LATENTS = {"latent_decode": 512, "latent_prefill": 64, "invariant_latent_decode": 160, "invariant_latent_prefill": 128}
SHARED_PIECES = {"invariant_teams": 128, "invariant_decode": 96}  # two states of a tile while pieces are joined; never timed
PRODUCTS = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}  # what the matrix units are asked with
HEADS, KV_HEADS, DIM, SIZE = 32, 8, 128, 4096
BF16 = {"dtype": torch.bfloat16}


def compile_only(target: int) -> list[str]:
    """From here on kernels are compiled and not launched; returns the list of what they took, a line each."""
    run, taken = JITFunction.run, []
    spills, shared = RECURRENT | LATENTS | SHARED_PIECES | SPILLED.get(target, {}), SHARED_MEMORY[target]

    def compiled(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        with redirect_stdout(io.StringIO()) as said:
            kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        if "bytes spill" not in said.getvalue():
            return  # compiled before
        name, spilled = self.fn.__name__, sum(map(int, re.findall(r"(\d+) bytes spill", said.getvalue())))
        products = next((word for word, sign in PRODUCTS.items() if sign in kernel.asm["ptx"]), "-")
        taken.append(f"{target} {name} {products} spilled {spilled} shared {kernel.metadata.shared}")
        assert spilled <= spills.get(name, PUT_ASIDE) and kernel.metadata.shared <= shared, taken[-1]

    knobs.nvidia.dump_ptxas_log = True
    driver.set_active(NoGPU(target))
    JITFunction.run = compiled
    return taken


def compile_attention(
    dim: int, dtype: torch.dtype, heads: int, kv_heads: int = 8, layout: Layout = "nhd", fresh: bool = True, **options: Any
) -> None:
    """Prefill of rows whose new tokens are in this step's qkv, or in blocks like all others, and decode."""
    index, tables = torch.zeros(5, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
    cache = empty_cache(layout, (9, 16, kv_heads, dim), dtype, torch.device("cpu"))
    q, k, v = torch.empty(4, heads + 2 * kv_heads, dim, dtype=dtype).split([heads, kv_heads, kv_heads], 1)
    out = torch.empty(q.shape, dtype=dtype)
    paged_attention(q, cache, cache, tables, index, index[:4], 0.1, out, 64, fresh=(k, v) if fresh else None, **options)


def compile_few(rows: int) -> None:
    index, tables = torch.zeros(5, dtype=torch.int64), torch.zeros(4, 2, dtype=torch.int32)
    cache, turns = torch.empty(9, 16, KV_HEADS, DIM, **BF16), torch.empty(64, DIM // 2)
    qkv = torch.empty(rows, (HEADS + 2 * KV_HEADS) * DIM, **BF16)
    norms = torch.empty(DIM, **BF16), torch.empty(DIM, **BF16), 1e-6
    write_kv(qkv, norms, turns, turns, index[:rows], index[:rows], cache, cache)
    few = index[:rows], index[:rows], tables.narrow(0, 0, rows), index[:rows]
    parts = decode_attention_parts(qkv, norms, turns, turns, *few, cache, cache, 0.1)
    merge_linear(*parts, torch.empty(SIZE, HEADS * DIM, **BF16)), merge_parts(*parts, torch.bfloat16)
    x, scales, weight = torch.empty(rows, SIZE, **BF16), torch.empty(SIZE, **BF16), torch.empty(1024, SIZE, **BF16)
    linear(x, weight), norm_linear(x, x, scales, 1e-6, weight), norm_gate_up(x, x, scales, 1e-6, weight)


def compile_heads(heads: int, kv_heads: int, dim: int, rotated: int, **options: Any) -> None:
    """One row, with weights of norms in float32."""
    index, tables = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 300, dtype=torch.int32)
    cache, turns = torch.empty(9, 16, kv_heads, dim, **BF16), torch.empty(64, rotated // 2)
    qkv, norms = torch.empty(1, (heads + 2 * kv_heads) * dim, **BF16), (torch.empty(dim), torch.empty(dim), 1e-6)
    write_kv(qkv, norms, turns, turns, index, index, cache, cache)
    parts = decode_attention_parts(qkv, norms, turns, turns, index, index, tables, index, cache, cache, 0.1, **options)
    merge_linear(*parts, torch.empty(2560, heads * dim, **BF16)), merge_parts(*parts, torch.bfloat16)


def compile_mixture(
    tokens: int, hidden: int, inner: int, chosen: int, group: int = 0, table: bool = False, gate: Gate = "swiglu",
    dtype: torch.dtype = torch.bfloat16, in_order: bool = False,
) -> None:  # fmt: skip
    """Of 16 experts, as floats, or as codes of 4 bits if there is a group; gates of clamped numbers come with biases."""
    count, x = 16, torch.empty(tokens, hidden, dtype=dtype)
    shapes = (count * 2 * inner, hidden), (count * hidden, inner)
    if group:
        values = torch.zeros(16, dtype=torch.uint8) if table else None
        stacks: list[Any] = [replace(zero_codes(*shape, 4, group, "cpu"), table=values) for shape in shapes]
    else:
        stacks = [torch.empty(shape, dtype=dtype) for shape in shapes]
    biases = (torch.empty(shapes[0][0], dtype=dtype), torch.empty(shapes[1][0], dtype=dtype)) if gate == "clamped" else None
    ids, weights = choose_experts(torch.empty(tokens, count, dtype=dtype), chosen, "all", True)
    mixture(x, ids, weights, *stacks, biases, gate, in_order=in_order)
    if few_tokens(tokens) and not group and not in_order:
        shared = (torch.empty(shape, dtype=dtype) for shape in ((2 * inner, hidden), (hidden, inner), (1, hidden)))
        shared_mixture(x, ids, weights, *stacks, *shared)


def compile_mixtures() -> None:
    """Of floats and of codes, with tiles of every size."""
    for tokens in (1, 16, 64, 2048):
        compile_mixture(tokens, 2048, 768, 8)
    for tokens in (1, 64, 2048):
        compile_mixture(tokens, 2048, 768, 8, group=128)
        compile_mixture(tokens, 2880, 2880, 4, group=32, table=True, gate="clamped")


def compile_packed(rows: int, group: int = 128, size: int = SIZE) -> None:
    packed_linear(torch.empty(rows, size, **BF16), zero_codes(1024, size, 4, group, "cpu"))


def compile_fp8() -> None:
    """Of both kinds of scales; where torch would multiply, as other GPUs do."""
    for span in (SIZE, 128):
        weight = zero_fp8(1024, SIZE, span, "cpu")
        for rows in (1, 8, 16, 100):
            assert rule(rows, weight, torch.bfloat16) != "torch"
            fp8_linear(torch.empty(rows, SIZE, **BF16), weight)
        by_tiles(torch.empty(600, SIZE, **BF16), None, weight, None, torch.bfloat16, exact_tiles(600, 1024, SIZE))


def compile_invariant_attention(dim: int, dtype: torch.dtype, heads: int, kv_heads: int = 8, **options: Any) -> None:
    index, tables = torch.zeros(5, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
    cache = torch.empty(9, 16, kv_heads, dim, dtype=dtype)
    q = torch.empty(4, heads + 2 * kv_heads, dim, dtype=dtype)[:, :heads]
    shared = Teams(torch.zeros(4, ENTRY, dtype=torch.int32), torch.zeros(1 + most_teams(4), LINE, dtype=torch.int32))
    for teams in (None, shared)[: 1 if "window" in options else 2]:
        shares = invariant_shares(index, index[:4], cache, options.get("window"), teams)
        invariant_attention(q, cache, cache, tables, index, index[:4], 0.1, torch.empty(q.shape, dtype=dtype), 64, shares, **options)


def compile_invariant() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (1, 64, 300):
            invariant_linear(torch.empty(rows, SIZE, dtype=dtype), torch.empty(6144, SIZE, dtype=dtype), torch.empty(6144, dtype=dtype))
            for wide in (1024, 4096):
                invariant_linear(torch.empty(rows, SIZE, dtype=dtype), torch.empty(wide, SIZE, dtype=dtype))
            invariant_gate_up(torch.empty(min(rows, 256), SIZE, dtype=dtype), torch.empty(6144, SIZE, dtype=dtype), "swiglu")
        compile_invariant_attention(DIM, dtype, HEADS)
        for rows, size in ((1, 1024), (4, 4096), (4, 2880)):
            x, scales, weight = (torch.empty(*shape, dtype=dtype) for shape in ((rows, size), (size,), (2048, size)))
            invariant_add_norm(x, x, scales, 1e-6), invariant_norm_linear(x, x, scales, 1e-6, weight, weight[:, 0].clone())
            invariant_norm_router(x, x, scales, 1e-6, weight), invariant_norm_gate_up(x, x, scales, 1e-6, weight, "swiglu")
        for tokens in (1, 64, 2048):
            compile_mixture(tokens, 2048, 768, 8, dtype=dtype, in_order=True)
            compile_mixture(tokens, 2880, 2880, 4, group=32, table=True, gate="clamped", dtype=dtype, in_order=True)
    invariant_linear(torch.empty(300, 1000, **BF16), torch.empty(1024, 1000, **BF16))
    invariant_linear(torch.empty(1, 1024, **BF16), torch.empty(1, 1024, **BF16))  # the gate of a shared expert: 1 is a constant
    compile_invariant_attention(64, torch.float16, 64, window=128, sinks=torch.ones(64))
    compile_invariant_attention(256, torch.bfloat16, 8, 4, window=1024)
    compile_invariant_attention(80, torch.bfloat16, 32, soft_cap=30.0, slopes=torch.ones(32))
    for rows in (1, 300):
        invariant_packed_linear(torch.empty(rows, SIZE, **BF16), zero_codes(1024, SIZE, 4, 128, "cpu"))
        invariant_fp8_linear(torch.empty(rows, SIZE, **BF16), zero_fp8(1024, SIZE, 128, "cpu"))


def compile_delta_net(k_dim: int = 128, v_dim: int = 128, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)) -> None:
    k_heads, v_heads, index = 4, 8, torch.zeros(65, dtype=torch.int32)
    channels, checkpoints = 2 * k_heads * k_dim + v_heads * v_dim, torch.zeros(4, 2, dtype=torch.int32)
    states = torch.empty(3, 3, channels), torch.empty(3, v_heads, k_dim, v_dim)
    for dtype in dtypes:
        weights = torch.empty(channels, 4, dtype=dtype), torch.empty(v_heads), torch.empty(v_heads)
        for rows, tokens, kernel in ((1, 1, delta_net), (64, 64, delta_net), (2, 100, delta_net), (2, 100, invariant_delta_net)):
            qkvz, gates = torch.empty(tokens, channels + v_heads * v_dim, dtype=dtype), torch.empty(tokens, 2 * v_heads, dtype=dtype)
            slots = StepStates(index[:rows], index[:rows], index[:rows], index[: rows + 1], checkpoints)
            out = kernel(qkvz[:, :channels], gates, *weights, *states, index[: rows + 1], slots)
            gated_norm(out, qkvz[:, channels:].view(out.shape), torch.empty(v_dim, dtype=dtype), 1e-6)


def compile_latents(rank: int = 512, rotary: int = 64, plain: int = 128) -> None:
    """With 16 heads, 20, and 128."""
    index, tables, turns = torch.zeros(5, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32), torch.empty(64, rotary // 2)
    for dtype in (torch.bfloat16, torch.float32):
        cache, norm = torch.empty(9, 16, 1, rank + rotary, dtype=dtype), (torch.empty(rank, dtype=dtype), 1e-6)
        for heads in (16, 20, 128):
            given = torch.empty(4, heads * (plain + rotary) + rank + rotary, dtype=dtype).split(
                [heads * (plain + rotary), rank + rotary], 1
            )
            q = write_latent(*given, torch.empty(heads * plain, rank, dtype=dtype), norm, turns, turns, index[:4], index[:4], cache)
            out = torch.empty(4, heads, rank, dtype=dtype)
            latent_attention(q, cache, tables, index, index[:4], 0.1, out, 64)
        choose_in_groups(torch.empty(4, 256, dtype=dtype), 8, "sigmoid", True, 8, 4, torch.empty(256), 2.5)
        choose_in_groups(torch.empty(4, 160, dtype=dtype), 6, "all", False, 8, 3, None, 16.0)


def compile_invariant_latents(rank: int = 512, rotary: int = 64) -> None:
    index, tables = torch.zeros(5, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        cache = torch.empty(9, 16, 1, rank + rotary, dtype=dtype)
        for heads in (16, 20, 128):
            q, out = torch.empty(4, heads, rank + rotary, dtype=dtype), torch.empty(4, heads, rank, dtype=dtype)
            shares = invariant_latent_shares(index, index[:4], cache, heads)
            invariant_latent_attention(q, cache, tables, index, index[:4], 0.1, out, 64, shares)
        for tokens in (4, 100):
            by_head(*(torch.empty(shape, dtype=dtype) for shape in ((20, tokens, 192), (20, 192, rank), (20, tokens, rank))))
            invariant_expand(torch.empty(tokens, 20, rank, dtype=dtype), torch.empty(20 * 256, rank, dtype=dtype))


def compile_sampling() -> None:
    index = torch.zeros(4, dtype=torch.int64)
    logits, lines = torch.empty(4, 151936, **BF16), torch.zeros(4, 11, dtype=torch.int32)
    sample(logits, torch.ones(4), torch.zeros(4, 4, dtype=torch.int64), index)
    floats = lines.view(torch.float32)
    draw(logits, Draws(floats[:, 2], lines[:, 3], floats[:, 4], floats[:, 5], lines[:, 6:10], index.int()))
    rank(logits, index, 5)
    edit_logits(logits, [0], [0], [0], [torch.zeros(HEAD, dtype=torch.int32)], lines[:, 1:], lines[:, 0])


def compile_every() -> None:
    compile_attention(DIM, torch.bfloat16, HEADS)
    compile_attention(DIM, torch.float32, HEADS, layout="hnd")
    copy_blocks([torch.empty(9, 16, KV_HEADS, DIM, **BF16)], [(1, 2)])
    compile_few(4)
    x = torch.empty(4, SIZE, **BF16)
    silu_and_mul(x), add_rms_norm(x, x, torch.empty(SIZE, **BF16), 1e-6)
    gate_and_mul(x, "geglu"), norm_add_norm(x, x, torch.empty(SIZE), torch.empty(SIZE), 1e-6), scale_logits(x, 0.5, 30.0)
    compile_mixtures()
    compile_fp8()
    compile_sampling()
    for rows in (1, 4, 16, 64, 256):
        compile_packed(rows)
    packed_gate_up(x[:1], zero_codes(1024, SIZE, 4, 128, "cpu"))
    compile_packed(1, group=32, size=3 * SIZE)
    unpack(zero_codes(1024, SIZE, 4, 128, "cpu"), torch.bfloat16)


def compile_further() -> None:
    learned = torch.ones(32)
    compile_heads(64, 8, 64, 64, window=128, sinks=torch.ones(64))
    compile_heads(8, 4, 256, 256, window=1024)
    compile_heads(32, 32, 96, 96)
    compile_heads(16, 4, 256, 64)
    compile_heads(8, 4, 256, 0, soft_cap=50.0)
    compile_attention(64, torch.bfloat16, 64, 8, window=128, sinks=torch.ones(64))
    compile_attention(256, torch.bfloat16, 8, 4, window=1024)
    compile_attention(192, torch.bfloat16, 16, 4)
    compile_mixture(1, 512, 256, 2, dtype=torch.float32), compile_mixture(32, 512, 256, 2, dtype=torch.float32)
    compile_mixture(32, 512, 256, 2, group=32, dtype=torch.float32)
    for fresh in (True, False):
        compile_attention(64, torch.float16, 14, 2, fresh=fresh)
        compile_attention(128, torch.bfloat16, 16, layout="hnd", window=100, fresh=fresh)
        for head_dim in (80, 256):
            compile_attention(head_dim, torch.bfloat16, 32, soft_cap=30.0, sinks=learned, slopes=learned, fresh=fresh)
    compile_attention(DIM, torch.bfloat16, HEADS, fresh=False)
    compile_attention(DIM, torch.float32, HEADS, layout="hnd", fresh=False)
    compile_few(1)
    compile_packed(1, size=3 * SIZE)
    compile_packed(1, group=32)
    packed_gate_up(torch.empty(1, SIZE, **BF16), zero_codes(1024, SIZE, 4, 32, "cpu"))


def compile_largest() -> None:
    compile_packed(1)
    compile_packed(256)


LISTS: dict[str, Callable[[], object]] = {
    "every": compile_every,
    "further": compile_further,
    "largest": compile_largest,
    "mixture": lambda: [compile_mixture(tokens, 2048, 768, 8) for tokens in (1, 64)],
    "fp8": compile_fp8,
    "invariant": compile_invariant,
    "delta_net": compile_delta_net,
    "latent": compile_latents,
    "alike": compile_invariant_latents,
    "attention": lambda: compile_attention(DIM, torch.bfloat16, HEADS),
}


def main(wanted: dict[int, list[str]]) -> int:
    """How many capabilities failed. A process for each: what kernels are compiled for, Triton asks once."""
    failed = 0
    for target in wanted:
        pid = os.fork()
        if not pid:
            try:
                taken = compile_only(target)
                for one in wanted[target]:
                    LISTS[one]()
                print("\n".join(taken), flush=True)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        failed += os.waitpid(pid, 0)[1] != 0
    return failed


if __name__ == "__main__":
    words = (word.partition(":") for word in sys.argv[1:])
    sys.exit(main({int(capability): lists.split(",") for capability, _, lists in words}))
