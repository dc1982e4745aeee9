"""Calls kernels by device: on a GPU the Triton kernel, elsewhere its torch reference with the same name and signature.

Most kernels take their signature and documentation from the reference (`by_device`). The last ones differ in what they take.
Triton is imported when the first kernel runs on a GPU, so it is not needed on machines without one.
"""

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from octavo.kernels.device_codes import DeviceCodes
from octavo.kernels.fp8_matrix import Fp8Matrix
from octavo.kernels.gates import Gate
from octavo.kernels.reference import attention, fp8, latent, layer, rows, sampling
from octavo.kernels.reference import delta_net as delta
from octavo.kernels.reference import partial_attention as partial
from octavo.kernels.triton.gemv.tiles import GEMV_ROWS  # only rules: this module does not import triton
from octavo.step.logit_edits import LogitEdits
from octavo.step.share_words import DecodeShares
from octavo.step.team_words import Teams

Edits = Tensor | LogitEdits
P = ParamSpec("P")
R = TypeVar("R")


@cache
def _triton(name: str) -> ModuleType:
    return import_module(f"octavo.kernels.triton.{name}")


def by_device(reference: Callable[P, R], module: str) -> Callable[P, R]:
    """Returns the reference, with the Triton kernel of the same name in place of it on a GPU. The first argument says where it runs."""
    name = reference.__name__

    @wraps(reference)
    def kernel(*given: P.args, **named: P.kwargs) -> R:
        run: Callable[P, R] = getattr(_triton(module), name) if _on_gpu(given[0]) else reference
        return run(*given, **named)

    kernel.triton = module  # type: ignore[attr-defined]
    return kernel


def _on_gpu(first: Any) -> bool:
    if isinstance(first, list):
        first = first[0]
    on_gpu: bool = (first.words if isinstance(first, DeviceCodes) else first).is_cuda
    return on_gpu


# -- norms, gates and logits

rms_norm = by_device(layer.rms_norm, "step.norm")
add_rms_norm = by_device(layer.add_rms_norm, "step.norm")
layer_norm = by_device(layer.layer_norm, "step.norm")
add_layer_norm = by_device(layer.add_layer_norm, "step.norm")
norm_add = by_device(layer.norm_add, "step.norm")
norm_add_norm = by_device(layer.norm_add_norm, "step.norm")
gelu = by_device(layer.gelu, "step.elementwise")
silu_and_mul = by_device(layer.silu_and_mul, "step.elementwise")
gelu_and_mul = by_device(layer.gelu_and_mul, "step.elementwise")
gate_and_mul = by_device(layer.gate_and_mul, "step.elementwise")
scale_logits = by_device(layer.scale_logits, "step.elementwise")
add_weighted = by_device(layer.add_weighted, "step.elementwise")

# -- products of small batches, each with the small operations before it

few_linear = by_device(layer.linear, "gemv.products")
norm_linear = by_device(layer.norm_linear, "gemv.products")
norm_router = by_device(layer.norm_router, "gemv.products")
norm_gate_up = by_device(layer.norm_gate_up, "gemv.products")
merge_linear = by_device(layer.merge_linear, "gemv.products")
merge_parts = by_device(layer.merge_parts, "gemv.products")

# -- products with quantised weights, and experts

packed_linear = by_device(layer.packed_linear, "packed.products")
packed_gate_up = by_device(layer.packed_gate_up, "packed.products")
unpack = by_device(layer.unpack, "packed.products")
fp8_linear = by_device(fp8.fp8_linear, "fp8")
choose_experts = by_device(layer.choose_experts, "moe.route")
choose_in_groups = by_device(layer.choose_in_groups, "moe.route")
mixture = by_device(layer.mixture, "moe.products")
shared_mixture = by_device(layer.shared_mixture, "moe.products")

# -- the cache, the rows, and the samples

write_kv = by_device(attention.write_kv, "step.cache")
decode_attention_parts = by_device(attention.decode_attention_parts, "attention.fused_decode")
copy_blocks = by_device(attention.copy_blocks, "step.cache")
copy_words = by_device(rows.copy_words, "step.rows")
prepare = by_device(rows.prepare, "step.rows")
finish = by_device(rows.finish, "step.rows")
accept = by_device(rows.accept, "step.rows")
sample = by_device(sampling.sample, "sampling.sample")
draw = by_device(sampling.draw, "sampling.draw")
rank = by_device(sampling.rank, "sampling.rank")

# -- recurrent layers

delta_net = by_device(delta.delta_net, "delta_net.launch")
gated_norm = by_device(delta.gated_norm, "step.norm")

# -- latent attention

write_latent = by_device(latent.write_latent, "latent.inputs")
expand = by_device(latent.expand, "latent.inputs")

# -- kernels that exist for a GPU only: a row's bits do not depend on the other rows


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Returns x W^T [rows, out features], in `out` if given."""
    product: Tensor = _triton("invariant.products").invariant_linear(x, weight, bias, out)
    return product


def invariant_gate_up(x: Tensor, weight: Tensor, gate: Gate) -> Tensor:
    """Returns the gated values [rows, out features / 2]; the weight has rows of gate over rows of up."""
    out: Tensor = _triton("invariant.products").invariant_gate_up(x, weight, gate)
    return out


def invariant_add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Like `add_rms_norm`."""
    out, stream = _triton("invariant.fused").invariant_add_norm(x, residual, weight, eps)
    return out, stream


def invariant_norm_linear(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the bits of `invariant_add_norm` and `invariant_linear`: the product and the new residual. For few rows, like the next two"""
    out, stream = _triton("invariant.fused").invariant_norm_linear(x, residual, norm_weight, eps, weight, bias)
    return out, stream


def invariant_norm_router(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the logits, the normed rows and the new residual."""
    out, normed, stream = _triton("invariant.fused").invariant_norm_router(x, residual, norm_weight, eps, weight, bias)
    return out, normed, stream


def invariant_norm_gate_up(
    x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, gate: Gate
) -> tuple[Tensor, Tensor]:
    """Returns the gated values and the new residual."""
    out, stream = _triton("invariant.fused").invariant_norm_gate_up(x, residual, norm_weight, eps, weight, gate)
    return out, stream


def invariant_packed_linear(x: Tensor, weight: DeviceCodes, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    product: Tensor = _triton("packed.products").invariant_packed_linear(x, weight, bias, out)
    return product


def invariant_fp8_linear(x: Tensor, weight: Fp8Matrix, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    product: Tensor = _triton("fp8").invariant_fp8_linear(x, weight, bias, out)
    return product


def invariant_mixture(x: Tensor, *given: Any) -> Tensor:
    """Takes the arguments of `mixture`."""
    out: Tensor = _triton("moe.products").mixture(x, *given, in_order=True)
    return out


def invariant_delta_net(qkv: Tensor, *given: Any) -> Tensor:
    """Takes the arguments of `delta_net`."""
    out: Tensor = _triton("delta_net.launch").invariant_delta_net(qkv, *given)
    return out


def invariant_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, query_start: Tensor, context_len: Tensor, scale: float, out: Tensor,
    max_query: int, shares: DecodeShares, window: int | None, paged: bool, soft_cap: float | None, sinks: Tensor | None,
    slopes: Tensor | None,
) -> Tensor:  # fmt: skip
    """Like `paged_attention`, with work items from `invariant_shares`."""
    _triton("invariant.attention").invariant_attention(
        q, k_cache, v_cache, tables, query_start, context_len, scale, out, max_query, shares, window, paged, soft_cap, sinks, slopes
    )
    return out


def invariant_shares(
    query_start: Tensor, context_len: Tensor, k_cache: Tensor, window: int | None, teams: Teams | None
) -> DecodeShares:
    shares: DecodeShares = _triton("invariant.attention").invariant_shares(query_start, context_len, k_cache, window, teams)
    return shares


def invariant_write_latent(q: Tensor, *given: Any) -> Tensor:
    """Takes the arguments of `write_latent`."""
    out: Tensor = _triton("latent.invariant").invariant_write_latent(q, *given)
    return out


def invariant_expand(mixed: Tensor, v_up: Tensor) -> Tensor:
    """Takes the arguments of `expand`."""
    out: Tensor = _triton("latent.invariant").invariant_expand(mixed, v_up)
    return out


def invariant_latent_attention(q: Tensor, *given: Any) -> Tensor:
    """Takes the arguments of `latent_attention`, with work items from `invariant_latent_shares`."""
    out: Tensor = _triton("latent.invariant").invariant_latent_attention(q, *given)
    return out


def invariant_latent_shares(query_start: Tensor, context_len: Tensor, cache: Tensor, heads: int) -> DecodeShares:
    shares: DecodeShares = _triton("latent.invariant").invariant_latent_shares(query_start, context_len, cache, heads)
    return shares


# -- kernels that take more on one of both

def paged_attention(
    q: Tensor,  # [T, heads, head_dim]
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,  # [R, B]; not paged: [R, 1], the region of each row
    query_start: Tensor,  # [R+1]
    context_len: Tensor,  # [R]
    scale: float,
    out: Tensor,  # [T, heads, head_dim]
    max_query: int,  # an upper bound that the host knows
    shares: DecodeShares | None,  # of the same rows and window
    window: int | None = None,
    paged: bool = True,
    fresh: tuple[Tensor, Tensor] | None = None,  # k and v of q's tokens, as write_kv leaves them in qkv: equal to those in the cache
    soft_cap: float | None = None,
    sinks: Tensor | None = None,  # [heads]: a score per head that takes part in the softmax but has no value
    slopes: Tensor | None = None,  # [heads] float32: ALiBi, subtracted from a score for each token between query and key
) -> Tensor:
    """Fills and returns `out`: attention of each row's queries, the last of its context, over its keys and values."""
    if not q.is_cuda:
        read = tables, query_start, context_len
        return attention.paged_attention(
            q, k_cache, v_cache, *read, scale, out, window, soft_cap=soft_cap, sinks=sinks, slopes=slopes
        )
    kernels = _triton("attention.paged_attention")
    kernels.paged_attention(
        q, k_cache, v_cache, tables, query_start, context_len, scale, out, max_query, window, paged=paged, shares=shares, fresh=fresh,
        soft_cap=soft_cap, sinks=sinks, slopes=slopes,
    )  # fmt: skip
    return out


def latent_attention(
    q: Tensor,  # [T, heads, latent + rotary_dim]
    cache: Tensor,  # of latents and rotary keys
    tables: Tensor,  # [R, B]; not paged: [R, 1], the region of each row
    query_start: Tensor,  # [R+1]
    context_len: Tensor,  # [R]
    scale: float,
    out: Tensor,  # [T, heads, latent]
    max_query: int,  # an upper bound that the host knows
    shares: DecodeShares | None,  # from `latent_shares`
    paged: bool = True,
) -> Tensor:
    """Fills and returns `out`: the weighted latents of each row's queries, the last of its context."""
    if not q.is_cuda:
        return latent.latent_attention(q, cache, tables, query_start, context_len, scale, out)
    kernels = _triton("latent.launch")
    kernels.latent_attention(q, cache, tables, query_start, context_len, scale, out, max_query, shares, paged)
    return out


def latent_shares(query_start: Tensor, context_len: Tensor, cache: Tensor, heads: int) -> DecodeShares | None:
    """Like `decode_shares`, for latent attention with so many heads."""
    if not cache.is_cuda:
        return None
    shares: DecodeShares = _triton("latent.launch").latent_shares(query_start, context_len, cache, heads)
    return shares


def partial_attention(
    q: Tensor,  # [T, heads, head_dim]
    k_cache: Tensor,  # on this rank
    v_cache: Tensor,
    tables: Tensor,  # [R, B]: of blocks that cover `ranks` times as many tokens
    query_start: Tensor,  # [R+1]
    context_len: Tensor,  # [R]: tokens, on all ranks
    scale: float,
    rank: int,
    ranks: int,
    window: int | None = None,
    scales: tuple[Tensor, Tensor] | None = None,  # on a CPU: of k and v, if these are quantised
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns attention over the keys stored on this rank [T, heads, head_dim], and the log-sum-exp [T, heads]; both float32.

    For a query that sees none of them, these are zeros and -inf.
    """
    read = tables, query_start, context_len
    if not q.is_cuda:
        return partial.partial_attention(q, k_cache, v_cache, *read, scale, rank, ranks, window, scales, soft_cap)
    kernels = _triton("attention.partial_attention")
    out, lse = kernels.partial_attention(q, k_cache, v_cache, *read, scale, rank, ranks, window, soft_cap)
    return out, lse


def decode_shares(
    query_start: Tensor, context_len: Tensor, k_cache: Tensor, window: int | None, teams: Teams | None
) -> DecodeShares | None:
    """Returns the split-KV work items of this step's decode attention (`step/share_words.py`), or None for the torch reference."""
    if not k_cache.is_cuda:
        return None
    shares: DecodeShares = _triton("attention.paged_attention").shares_of(query_start, context_len, k_cache, window, teams=teams)
    return shares


def team_sizes(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[int, int]:
    """Returns how many rows a shared-prefix group may have on a device, and how many groups fill it."""
    rows, wanted = _triton("attention.paged_attention").team_sizes(heads, kv_heads, head_dim, dtype, device)
    return rows, wanted


def few_rows(head_dim: int) -> int:
    """Returns the maximum number of rows in a decode step for the small-batch kernels below."""
    return GEMV_ROWS if head_dim % 16 == 0 and head_dim <= 256 else 0


def edit_logits(
    logits: Tensor,  # [S, V]
    outputs: list[int],  # which rows of logits
    rows: list[int],  # the table row of each
    positions: list[int],  # of the id to sample: only the ids before it count
    edits: list[Edits],  # the edits of each: packed, on the GPU; else unpacked (`step/logit_edits.py`)
    token_ids: Tensor,  # [rows, positions]
    num_prompt: Tensor,  # [rows]
) -> Tensor:
    """Returns the logits of these outputs after allowed ids, bans, bias and penalties, [len(outputs), V] float32."""
    kernels = _triton("sampling.logit_edits") if logits.is_cuda else sampling
    scores: Tensor = kernels.edit_logits(logits, outputs, rows, positions, edits, token_ids, num_prompt)
    return scores
