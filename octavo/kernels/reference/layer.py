"""All parts of a layer except attention, in plain torch: norm, rotation, gate, products of small batches or quantised weights, and MoE.

A GPU kernel fuses several of these steps. Its reference here has the same name and arguments and does them one by one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.device_codes import WORD_BITS, DeviceCodes
from octavo.kernels.fp8_matrix import Fp8Matrix
from octavo.kernels.gates import ALPHA, CLAMP, Gate
from octavo.kernels.reference.fp8 import fp8_linear
from octavo.kernels.reference.merge import log2_weights
from octavo.kernels.reference.products import multiply

TINY = 1e-20  # a total of weights is at least this, so that sigmoids of 0 divide nothing by 0


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    The mean is computed in float32 for any dtype of x. x is rounded back to its own dtype before the weight multiplies it, or after, if
    the weight is float32. Published models were trained in one of these orders.
    """
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return ((wide * inverse).to(weight.dtype) * weight).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Returns (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, over the last dimension. It is rounded once, at the end."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (normed if bias is None else normed + bias.float()).to(x.dtype)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Adds x to the residual stream, centres and normalises the sum. Returns (normed, new residual)."""
    residual = residual + x
    return layer_norm(residual, weight, bias, eps), residual


def norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x [T, heads, head_dim] normed: each head by a weight [head_dim], or all together by a weight [heads * head_dim]."""
    if len(weight) == x.shape[-1]:
        return rms_norm(x, weight, eps)
    return rms_norm(x.flatten(1), weight, eps).view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Adds x, scaled, to the residual stream and normalises the sum. Returns (normed, new residual)."""
    residual = residual + (x if scale == 1.0 else x * scale)
    return rms_norm(residual, weight, eps), residual


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x [T, heads, head_dim] with each head rotated by its token's position.

    Dimensions i and i + head_dim/2 of a head are the coordinates of a point that is rotated by an angle:

        head   [ x0 x1 x2 x3 | y0 y1 y2 y3 ]        (xi, yi) -> (xi cos - yi sin, yi cos + xi sin)

    cos and sin: [T, head_dim / 2] float32, for the positions of these tokens. If they are narrower, only the first dimensions are rotated.
    """
    half = cos.shape[-1]
    if half == 0:
        return x
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """Returns gelu(x), with the tanh approximation: the activation of an MLP without a gate."""
    return F.gelu(x, approximate="tanh")


def silu_and_mul(x: Tensor) -> Tensor:
    """Returns silu(gate) * up [T, size], the gate of a SwiGLU MLP. x: [T, 2 * size], gate then up"""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(x: Tensor) -> Tensor:
    """Returns gelu(gate) * up [T, size], with the tanh approximation of GELU. x: [T, 2 * size], gate then up"""
    gate, up = x.chunk(2, dim=-1)
    return gelu(gate) * up


def gate_and_mul(x: Tensor, gate: Gate) -> Tensor:
    """Returns the gated values [T, size] of an MLP (`kernels/gates.py`). x: [T, 2 * size], gate then up"""
    if gate != "clamped":
        return silu_and_mul(x) if gate == "swiglu" else gelu_and_mul(x)
    low, up = x.float().chunk(2, dim=-1)
    low = low.clamp(max=CLAMP)
    return ((up.clamp(-CLAMP, CLAMP) + 1) * (low * torch.sigmoid(low * ALPHA))).to(x.dtype)


def norm_add(x: Tensor, residual: Tensor, after: Tensor, eps: float, scale: float = 1.0) -> Tensor:
    """Returns the new residual stream: the output of a sub-layer is normed, scaled and added."""
    return residual + rms_norm(x, after, eps) * scale


def norm_add_norm(
    x: Tensor, residual: Tensor, after: Tensor, weight: Tensor, eps: float, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns (the normed sum for the next sub-layer, the new residual); `after` norms x before it is added."""
    stream = norm_add(x, residual, after, eps, scale)
    return rms_norm(stream, weight, eps), stream


def scale_logits(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    """Scales logits in place, and then caps them: cap * tanh(logits / cap)."""
    wide = logits.float() * scale
    return logits.copy_(wide if cap is None else cap * torch.tanh(wide / cap))


def add_weighted(out: Tensor, shared: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Returns out + sigmoid(x w) * shared: the result of an expert that all tokens share. x: [T, hidden]; weight: [1, hidden]"""
    return out + torch.sigmoid(multiply(x, weight)) * shared


# -- products of small batches, each fused with the step before or after it


def linear(x: Tensor, weight: Tensor | Fp8Matrix, bias: Tensor | None = None) -> Tensor:
    """Returns x W^T [rows, out]. x: [rows, in]; weight: [out, in]"""
    return multiply(x, weight, bias) if isinstance(weight, Tensor) else fp8_linear(x, weight, bias)


def norm_linear(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor | None,  # None: the sum itself is multiplied
    eps: float,
    weight: Tensor | Fp8Matrix,
    bias: Tensor | None = None,
    after: Tensor | None = None,  # norm of x before it is added
    scale: float = 1.0,  # factor on x when it is added
) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(x + residual) W^T, the new residual)."""
    x = x if after is None else rms_norm(x, after, eps)
    stream = residual + (x if scale == 1.0 else x * scale)
    return linear(stream if norm_weight is None else rms_norm(stream, norm_weight, eps), weight, bias), stream


def norm_router(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,  # [experts, in]
    bias: Tensor | None = None,
    after: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (logits of all experts, the normed rows they are computed from, the new residual), like `norm_linear`."""
    logits, stream = norm_linear(x, residual, norm_weight, eps, weight, bias, after, scale)
    return logits, rms_norm(stream, norm_weight, eps), stream


def head(x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (logits, the normed rows they are computed from)."""
    hidden, _ = add_rms_norm(x, residual, norm_weight, eps)
    return multiply(hidden, weight), hidden


def norm_gate_up(
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
    product, stream = norm_linear(x, residual, norm_weight, eps, weight, None, after, scale)
    return gate_and_mul(product, gate), stream


def merge_linear(
    parts: Tensor,  # [rows, splits, heads, head_dim] float32
    parts_lse: Tensor,  # [rows, splits, heads], in units of log2; -inf: the part is empty and is not read
    weight: Tensor,  # [out, heads * head_dim]
    bias: Tensor | None = None,
) -> Tensor:
    """Returns the merged parts times W^T, [rows, out]."""
    return multiply(merge_parts(parts, parts_lse, weight.dtype), weight, bias)


def merge_parts(parts: Tensor, parts_lse: Tensor, dtype: torch.dtype) -> Tensor:
    """Merges parts [rows, splits, heads, head_dim] of attention. Returns [rows, heads * head_dim]."""
    seen = (parts_lse > -torch.inf).unsqueeze(-1)
    mixed = torch.where(seen, parts * log2_weights(parts_lse).unsqueeze(-1), 0).sum(1)  # [rows, heads, head_dim]
    return mixed.flatten(1).to(dtype)


# -- products with packed quantised weights: all weights are unpacked first


def packed_linear(x: Tensor, weight: DeviceCodes, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Returns x W^T [rows, out], in `out` if given. x: [rows, in]"""
    product = multiply(x, unpack(weight, x.dtype), bias)
    return product if out is None else out.copy_(product)


def packed_gate_up(x: Tensor, weight: DeviceCodes, gate: Gate = "swiglu") -> Tensor:
    """Returns the gated values. The weight has the rows of gate, then those of up."""
    return gate_and_mul(packed_linear(x, weight), gate)


def unpack(weight: DeviceCodes, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
    """Returns all rows, or those of an index [count], dequantised [count, in], with columns in their original order."""
    words, pairs = (weight.words, weight.scales) if rows is None else (weight.words[rows], weight.scales[rows])
    halves = pairs.view(torch.float16).view(*pairs.shape, 2).float().repeat_interleave(weight.group, dim=1)  # [count, columns, 2]
    codes = unpack_words(words, weight.bits, weight.span)
    codes = codes if weight.table is None else weight.table[codes]
    scale, offset = halves[:, : codes.shape[1]].unbind(-1)
    values = ((scale * codes + offset) * weight.factor).to(dtype)[:, : weight.size]
    return values.contiguous() if weight.order is None else torch.empty_like(values).index_copy_(1, weight.order, values)


def unpack_words(words: Tensor, bits: int, span: int) -> Tensor:
    """Returns the codes [n, columns] int32 that are packed in words [n, blocks * span] int16."""
    wide = words.int().unflatten(1, (-1, 4, 2, span // 16, 2)).transpose(2, 4).flatten(2)  # [n, blocks, span], by columns
    spans = [wide >> shift & (1 << bits) - 1 for shift in range(0, WORD_BITS, bits)]
    return torch.stack(spans, dim=2).flatten(1)


def pack_words(codes: Tensor, bits: int, span: int) -> Tensor:
    """Packs codes [n, columns] uint8 into words [n, blocks * span] int16. Columns must be whole blocks."""
    spans = codes.unflatten(1, (-1, WORD_BITS // bits, span))  # [n, blocks, spans, span]
    words = torch.zeros(len(codes), spans.shape[1], span, dtype=torch.int32, device=codes.device)
    for index in range(WORD_BITS // bits):
        words |= spans[:, :, index].int() << bits * index
    by_thread: Tensor = words.to(torch.int16).unflatten(2, (span // 16, 2, 4, 2)).transpose(2, 4)
    return by_thread.flatten(1)


# -- mixtures of experts (MoE): the selection of experts for each token, and the weighted sum of their outputs
#
#     x [T, hidden] -> logits [T, count] -> ids, weights [T, chosen]
#     for each expert:  its tokens -> gate, up -> activation -> down -> times the weight -> added to the tokens' rows
#
# A stack contains the matrices of all experts, one below the other. It is a matrix like any other, and may be quantised:
#
#     gate_up   [ gate of 0 | up of 0 | gate of 1 | up of 1 | ... ]    count * 2 * inner rows
#     down      [ down of 0 | down of 1 | ... ]                        count * hidden rows
#
# The outputs of experts are added to a token in the order of their numbers, independently of the rest of the batch.


def choose_experts(logits: Tensor, chosen: int, scores: str, normed: bool) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token [T, chosen] int64, the best first, and their weights [T, chosen] float32.

    logits: [T, count]; scores: "all" takes the softmax over all experts, "chosen" over the chosen ones; normed: weights sum to 1
    """
    wide = logits.float()
    if scores == "chosen":
        best, ids = wide.topk(chosen, dim=-1)
        return ids, best.softmax(-1)
    weights, ids = wide.softmax(-1).topk(chosen, dim=-1)
    return ids, weights / weights.sum(-1, keepdim=True) if normed else weights


def choose_in_groups(
    logits: Tensor,  # [T, count]
    chosen: int,
    scores: str,
    normed: bool,
    groups: int,
    chosen_groups: int,
    bias: Tensor | None,  # [count] float32
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Like `choose_experts`, but only among the experts of the best groups, and with weights times `scale`.

    scores: "all" takes the softmax over all experts, "sigmoid" that of each logit. The bias decides who is selected, not the weights.
    """
    weights = logits.float().sigmoid() if scores == "sigmoid" else logits.float().softmax(-1)
    ranked = weights if bias is None else weights + bias
    if chosen_groups < groups:
        by_group = ranked.unflatten(-1, (groups, -1))
        of_groups = by_group.topk(2, dim=-1).values.sum(-1) if scores == "sigmoid" else by_group.amax(-1)  # [T, groups]
        passed = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, of_groups.topk(chosen_groups, dim=-1).indices, False)
        ranked = by_group.masked_fill(passed.unsqueeze(-1), -torch.inf).flatten(1)
    ids = ranked.topk(chosen, dim=-1).indices
    weights = weights.gather(1, ids)
    return ids, (weights / (weights.sum(-1, keepdim=True) + TINY) if normed else weights) * scale


def mixture(
    x: Tensor,  # [T, hidden]
    ids: Tensor,  # [T, chosen]
    weights: Tensor,  # [T, chosen] float32
    gate_up: Tensor | DeviceCodes,  # [count * 2 * inner, hidden]
    down: Tensor | DeviceCodes,  # [count * hidden, inner]
    biases: tuple[Tensor, Tensor] | None = None,  # [count * 2 * inner] and [count * hidden]
    activation: Gate = "swiglu",
    first: int = 0,  # the number of the first expert in the stack; experts that it does not contain add nothing
) -> Tensor:
    """Returns the weighted sum of the outputs of each token's experts [T, hidden]."""
    count = len(down) // x.shape[1]
    order = ids.flatten().argsort(stable=True)  # indices of all choices, sorted by expert
    sizes = torch.bincount(ids.flatten(), minlength=first + count)[first : first + count].tolist()
    start = int((ids < first).sum())
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert, size in enumerate(sizes):
        if size:
            places = order[start : start + size]
            tokens = places // ids.shape[1]
            given = _expert(x[tokens], expert, count, gate_up, down, biases, activation)
            out.index_add_(0, tokens, given.float() * weights.flatten()[places].unsqueeze(-1))
        start += size
    return out.to(x.dtype)


def shared_mixture(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared_gate_up: Tensor,  # [2 * width, hidden]
    shared_down: Tensor,  # [hidden, width]
    shared_gate: Tensor | None,  # [1, hidden]; None: the shared expert has weight 1
    first: int = 0,
) -> Tensor:
    """Returns `mixture` of few tokens in floats, with an expert through which all of them pass."""
    added = multiply(gate_and_mul(multiply(x, shared_gate_up), "swiglu"), shared_down)
    out = mixture(x, ids, weights, gate_up, down, first=first)
    return out + added if shared_gate is None else add_weighted(out, added, x, shared_gate)


def _expert(
    x: Tensor, expert: int, count: int, gate_up: Tensor | DeviceCodes, down: Tensor | DeviceCodes,
    biases: tuple[Tensor, Tensor] | None, activation: Gate,
) -> Tensor:  # fmt: skip
    gate_bias, down_bias = (None, None) if biases is None else (bias.chunk(count)[expert] for bias in biases)
    gated = gate_and_mul(multiply(x, _rows(gate_up, expert, count, x), gate_bias), activation)
    return multiply(gated, _rows(down, expert, count, x), down_bias)


def _rows(stack: Tensor | DeviceCodes, expert: int, count: int, x: Tensor) -> Tensor:
    """Returns the matrix of one expert, as floats."""
    size = len(stack) // count
    if isinstance(stack, Tensor):
        return stack[expert * size : (expert + 1) * size]
    return unpack(stack, x.dtype, torch.arange(expert * size, (expert + 1) * size, device=x.device))
