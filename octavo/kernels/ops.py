"""Calls kernels by device: on a GPU the Triton kernel, elsewhere its torch reference with the same name and signature.

Triton is imported when the first kernel runs on a GPU, so it is not needed on machines without one.
"""

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from octavo.kernels.device_codes import DeviceCodes
from octavo.kernels.fp8_matrix import Fp8Matrix
from octavo.kernels.gates import Gate
from octavo.kernels.logit_edits import LogitEdits
from octavo.kernels.reference import attention as reference_attention
from octavo.kernels.reference import fp8 as reference_fp8
from octavo.kernels.reference import layer as reference_layer
from octavo.kernels.reference import mixture as reference_mixture
from octavo.kernels.reference import partial_attention as reference_partial
from octavo.kernels.reference import rows as reference_rows
from octavo.kernels.reference import sampling as reference_sampling
from octavo.kernels.reference.sampling import Draws, Ranking
from octavo.kernels.row_words import RowLayout
from octavo.kernels.share_words import DecodeShares
from octavo.kernels.step_tensors import StepTensors
from octavo.kernels.team_words import Teams
from octavo.kernels.triton.gemv.tiles import GEMV_ROWS  # only rules: this module does not import triton

Edits = Tensor | LogitEdits


@cache
def _triton(name: str) -> ModuleType:
    return import_module(f"octavo.kernels.triton.{name}")


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Adds x, scaled, to the residual stream and normalises the sum. Returns (normed, new residual), each [T, size].

    The weight of a norm is of x's dtype or float32, here and below.
    """
    kernels = _triton("step.norm") if x.is_cuda else reference_layer
    normed, stream = kernels.add_rms_norm(x, residual, weight, eps, scale)
    return normed, stream


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x [T, size] normalised."""
    normed: Tensor = (_triton("step.norm") if x.is_cuda else reference_layer).rms_norm(x, weight, eps)
    return normed


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Returns x [T, size], centred and normalised."""
    normed: Tensor = (_triton("step.layer_norm") if x.is_cuda else reference_layer).layer_norm(x, weight, bias, eps)
    return normed


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Adds x to the residual stream, centres and normalises the sum. Returns (normed, new residual), each [T, size]."""
    kernels = _triton("step.layer_norm") if x.is_cuda else reference_layer
    normed, stream = kernels.add_layer_norm(x, residual, weight, bias, eps)
    return normed, stream


def norm_add(x: Tensor, residual: Tensor, after: Tensor, eps: float, scale: float = 1.0) -> Tensor:
    """Returns the new residual stream: the output of a sub-layer is normed, scaled and added."""
    stream: Tensor = (_triton("step.norm") if x.is_cuda else reference_layer).norm_add(x, residual, after, eps, scale)
    return stream


def norm_add_norm(
    x: Tensor, residual: Tensor, after: Tensor, weight: Tensor, eps: float, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns (the normed sum for the next sub-layer, the new residual); `after` norms x before it is added."""
    kernels = _triton("step.norm") if x.is_cuda else reference_layer
    normed, stream = kernels.norm_add_norm(x, residual, after, weight, eps, scale)
    return normed, stream


def scale_logits(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    """Scales logits in place, and then caps them: cap * tanh(logits / cap)."""
    scaled: Tensor = (_triton("step.logits") if logits.is_cuda else reference_layer).scale_logits(logits, scale, cap)
    return scaled


def gelu(x: Tensor) -> Tensor:
    """Returns gelu(x) [T, size], with the tanh approximation: the activation of an MLP without a gate."""
    activated: Tensor = (_triton("step.activation") if x.is_cuda else reference_layer).gelu(x)
    return activated


def silu_and_mul(x: Tensor) -> Tensor:
    """Returns silu(gate) * up [T, size]. x: [T, 2 * size], gate then up"""
    gated: Tensor = (_triton("step.activation") if x.is_cuda else reference_layer).silu_and_mul(x)
    return gated


def gelu_and_mul(x: Tensor) -> Tensor:
    """Returns gelu(gate) * up [T, size], with the tanh approximation of GELU. x: [T, 2 * size], gate then up"""
    gated: Tensor = (_triton("step.activation") if x.is_cuda else reference_layer).gelu_and_mul(x)
    return gated


def gate_and_mul(x: Tensor, gate: Gate) -> Tensor:
    """Returns the gated values [T, size] of an MLP (`kernels/gates.py`). x: [T, 2 * size], gate then up"""
    gated: Tensor = (_triton("step.activation") if x.is_cuda else reference_layer).gate_and_mul(x, gate)
    return gated


def write_kv(
    qkv: Tensor,  # [T, (heads + 2 * kv_heads) * head_dim]
    norms: tuple[Tensor, Tensor, float] | None,  # weights of q and k, [head_dim] or of all heads, of qkv's dtype or float32; eps
    cos: Tensor,  # [max_position, rotated / 2] float32, for the first dimensions of a head; without columns, nothing is rotated
    sin: Tensor,
    positions: Tensor,  # [T]
    slots: Tensor,  # [T]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    v_cache: Tensor,
) -> Tensor:
    """Norms and rotates q and k in place and stores k and v in the cache. Returns q [T, heads, head_dim], a view of qkv."""
    kernels = _triton("step.write_kv") if qkv.is_cuda else reference_attention
    q: Tensor = kernels.write_kv(qkv, norms, cos, sin, positions, slots, k_cache, v_cache)
    return q


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
        rows = tables, query_start, context_len
        return reference_attention.paged_attention(
            q, k_cache, v_cache, *rows, scale, out, window, soft_cap=soft_cap, sinks=sinks, slopes=slopes
        )
    kernels = _triton("attention.paged_attention")
    kernels.paged_attention(
        q, k_cache, v_cache, tables, query_start, context_len, scale, out, max_query, window, paged=paged, shares=shares, fresh=fresh,
        soft_cap=soft_cap, sinks=sinks, slopes=slopes,
    )  # fmt: skip
    return out


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
    rows = tables, query_start, context_len
    if not q.is_cuda:
        return reference_partial.partial_attention(q, k_cache, v_cache, *rows, scale, rank, ranks, window, scales, soft_cap)
    kernels = _triton("attention.partial_attention")
    out, lse = kernels.partial_attention(q, k_cache, v_cache, *rows, scale, rank, ranks, window, soft_cap)
    return out, lse


def decode_shares(
    query_start: Tensor, context_len: Tensor, k_cache: Tensor, window: int | None, teams: Teams | None
) -> DecodeShares | None:
    """Returns the split-KV work items of this step's decode attention (`kernels/share_words.py`), or None for the torch reference."""
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


def norm_linear(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor | None,  # None: the sum itself is multiplied
    eps: float,
    weight: Tensor | Fp8Matrix,
    bias: Tensor | None,
    after: Tensor | None = None,  # norm of x before it is added
    scale: float = 1.0,  # factor on x when it is added
) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(x + residual) W^T, the new residual)."""
    kernels = _triton("gemv.products") if x.is_cuda else reference_layer
    product, stream = kernels.norm_linear(x, residual, norm_weight, eps, weight, bias, after, scale)
    return product, stream


def norm_router(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,  # [experts, in]
    bias: Tensor | None,
    after: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (logits of all experts, the normed rows they are computed from, the new residual), like `norm_linear`."""
    kernels = _triton("gemv.products") if x.is_cuda else reference_layer
    logits, normed, stream = kernels.norm_router(x, residual, norm_weight, eps, weight, bias, after, scale)
    return logits, normed, stream


def gate_up(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    weight: Tensor | Fp8Matrix,  # [2 * size, in], gate over up
    after: Tensor | None = None,
    scale: float = 1.0,
    gate: Gate = "swiglu",
) -> tuple[Tensor, Tensor]:
    """Returns (the gated values of rms_norm(x + residual), the new residual), like `norm_linear`."""
    kernels = _triton("gemv.products") if x.is_cuda else reference_layer
    gated, stream = kernels.gate_up(x, residual, norm_weight, eps, weight, after, scale, gate)
    return gated, stream


def merge_linear(parts: Tensor, parts_lse: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Merges parts [rows, splits, heads, head_dim] of attention. Returns them times W^T, [rows, out]."""
    product: Tensor = (_triton("gemv.products") if parts.is_cuda else reference_layer).merge_linear(parts, parts_lse, weight, bias)
    return product


def merge_parts(parts: Tensor, parts_lse: Tensor, dtype: torch.dtype) -> Tensor:
    """Merges parts [rows, splits, heads, head_dim] of attention. Returns [rows, heads * head_dim]."""
    merged: Tensor = (_triton("gemv.products") if parts.is_cuda else reference_layer).merge_parts(parts, parts_lse, dtype)
    return merged


def few_linear(x: Tensor, weight: Tensor | Fp8Matrix, bias: Tensor | None) -> Tensor:
    """Returns x W^T [rows, out]. x: [rows, in]; weight: [out, in]"""
    product: Tensor = (_triton("gemv.products") if x.is_cuda else reference_layer).linear(x, weight, bias)
    return product


def decode_attention_parts(
    qkv: Tensor,  # [rows, (heads + 2 * kv_heads) * head_dim]
    norms: tuple[Tensor, Tensor, float] | None,  # weights of q and k [head_dim], of qkv's dtype or float32; eps
    cos: Tensor,  # [max_position, rotated / 2] float32, for the first dimensions of a head; without columns, nothing is rotated
    sin: Tensor,
    positions: Tensor,  # [rows]
    slots: Tensor,  # [rows]
    tables: Tensor,  # [rows, B]
    context_len: Tensor,  # tokens, including the new one; 0 is padding, which writes nothing
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    v_cache: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,  # [heads]
) -> tuple[Tensor, Tensor]:
    """Writes the cache and attends, in splits of the context. The log-sum-exp of the first split includes the sinks.

    Returns (parts [rows, splits, heads, head_dim], their log-sum-exp [rows, splits, heads] in units of log2), both float32.
    """
    kernels = _triton("attention.fused_decode") if qkv.is_cuda else reference_attention
    parts, parts_lse = kernels.decode_attention_parts(
        qkv, norms, cos, sin, positions, slots, tables, context_len, k_cache, v_cache, scale, window, soft_cap, sinks
    )
    return parts, parts_lse


def copy_blocks(buffers: list[Tensor], pairs: list[tuple[int, int]]) -> None:
    """Copies block `source` onto block `target` for every pair, all reads before any write. buffers: each [num_blocks, ...]"""
    (_triton("step.copy_blocks") if buffers[0].is_cuda else reference_attention).copy_blocks(buffers, pairs)


def sample(logits: Tensor, temperature: Tensor, noise: Tensor, positions: Tensor) -> Tensor:
    """Returns one id per row, [S] int64, without filters: argmax at temperature 0, else with noise. noise: [S, 4]; positions: [S]"""
    ids: Tensor = (_triton("sampling.sample") if logits.is_cuda else reference_sampling).sample(logits, temperature, noise, positions)
    return ids


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """Returns one id per row, [S] int64, among those that pass the filters. logits: [S, V]"""
    ids: Tensor = (_triton("sampling.draw") if logits.is_cuda else reference_sampling).draw(logits, draws)
    return ids


def rank(logits: Tensor, ids: Tensor, count: int) -> Ranking:
    """Returns the rank of each row's id, and the row's `count` best. logits: [S, V]; ids: [S]"""
    found: Ranking = (_triton("sampling.rank") if logits.is_cuda else reference_sampling).rank(logits, ids, count)
    return found


def edit_logits(
    logits: Tensor,  # [P, V]
    entries: list[int],  # which rows of logits
    rows: list[int],  # the table row of each
    edits: list[Edits],  # the edits of each: packed, on the GPU; else unpacked (`kernels/logit_edits.py`)
    token_ids: Tensor,  # [rows, positions]
    num_tokens: Tensor,  # [rows], including the provisional one
    num_prompt: Tensor,  # [rows]
) -> Tensor:
    """Returns the logits of these scheduled rows after allowed ids, bans, bias and penalties, [len(entries), V] float32."""
    kernels = _triton("sampling.logit_edits") if logits.is_cuda else reference_sampling
    scores: Tensor = kernels.edit_logits(logits, entries, rows, edits, token_ids, num_tokens, num_prompt)
    return scores


def copy_words(source: Tensor, target: Tensor, runs: Tensor, longest: int) -> None:
    """Copies runs of int32 values from one flat tensor to another. No run has more than `longest`.

    runs: index in source, index in target, count, [N, 3] int64
    """
    (_triton("step.rows") if source.is_cuda else reference_rows).copy_words(source, target, runs, longest)


def prepare(words: Tensor, layout: RowLayout, block_size: int, step: StepTensors) -> None:
    """Fills the tensors of a step from the rows. words: [rows, width] int32"""
    (_triton("step.rows") if words.is_cuda else reference_rows).prepare(words, layout, block_size, step)


def finish(words: Tensor, layout: RowLayout, step: StepTensors, ids: Tensor, states: Tensor, hidden: Tensor, result: Tensor) -> None:
    """Appends the sampled ids to their rows. result [entries]: the id, 0 if none was sampled, -1 if states are not finite.

    states: of all tokens [T, any size]; hidden: of the last token of each scheduled row [entries, size], which may be the same tensor
    """
    (_triton("step.rows") if words.is_cuda else reference_rows).finish(words, layout, step, ids, states, hidden, result)


def packed_linear(x: Tensor, weight: DeviceCodes, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Returns x W^T [rows, out], in `out` if given. x: [rows, in]"""
    product: Tensor = (_triton("packed.products") if x.is_cuda else reference_layer).packed_linear(x, weight, bias, out)
    return product


def packed_gate_up(x: Tensor, weight: DeviceCodes, gate: Gate = "swiglu") -> Tensor:
    """Returns the gated values. The weight has the rows of gate, then those of up."""
    product: Tensor = (_triton("packed.products") if x.is_cuda else reference_layer).packed_gate_up(x, weight, gate)
    return product


def unpack(weight: DeviceCodes, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
    """Returns all rows, or those of an index [count], dequantised [count, in], with columns in their original order."""
    weights: Tensor = (_triton("packed.products") if weight.words.is_cuda else reference_layer).unpack(weight, dtype, rows)
    return weights


def fp8_linear(x: Tensor, weight: Fp8Matrix, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Returns x W^T [rows, out], in `out` if given. x: [rows, in]; if it is not a small batch, it is rounded to 8 bits, too."""
    product: Tensor = (_triton("fp8.products") if x.is_cuda else reference_fp8).fp8_linear(x, weight, bias, out)
    return product


def choose_experts(logits: Tensor, chosen: int, scores: str, normed: bool) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token [T, chosen] int64, the best first, and their weights [T, chosen] float32.

    logits: [T, count]; scores: "all" takes the softmax over all experts, "chosen" over the chosen ones; normed: weights sum to 1
    """
    ids, weights = (_triton("moe.route") if logits.is_cuda else reference_mixture).choose_experts(logits, chosen, scores, normed)
    return ids, weights


def mixture(
    x: Tensor,  # [T, hidden]
    ids: Tensor,  # [T, chosen]
    weights: Tensor,  # [T, chosen] float32
    gate_up: Tensor | DeviceCodes,  # [count * 2 * inner, hidden]: for each expert the rows of the gate, then those of up
    down: Tensor | DeviceCodes,  # [count * hidden, inner]
    biases: tuple[Tensor, Tensor] | None,  # [count * 2 * inner] and [count * hidden]
    activation: str,
    first: int = 0,  # the number of the first expert in the stacks; experts that they do not contain add nothing
) -> Tensor:
    """Returns the weighted sum of the outputs of each token's experts [T, hidden]."""
    kernels = _triton("moe.products") if x.is_cuda else reference_mixture
    mixed: Tensor = kernels.mixture(x, ids, weights, gate_up, down, biases, activation, first)
    return mixed
