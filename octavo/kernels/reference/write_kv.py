"""The twin of the fused cache write: norms, rotation and two stores, one after another."""

from torch import Tensor

from octavo.kernels.reference.norm import rms_norm
from octavo.kernels.reference.rotary import rotate


def write_kv(
    qkv: Tensor,  # [T, (heads + 2 * kv_heads) * head_dim]
    norms: tuple[Tensor, Tensor, float] | None,  # weights of q and k [head_dim], eps
    cos: Tensor,  # [max_position, head_dim / 2] float32
    sin: Tensor,
    positions: Tensor,  # [T]
    slots: Tensor,  # [T]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    v_cache: Tensor,
) -> Tensor:
    """Returns q [T, heads, head_dim], a view of qkv; q and k are overwritten there."""
    kv_heads, head_dim = k_cache.shape[2:]
    parts = qkv.view(len(qkv), -1, head_dim)
    heads = parts.shape[1] - 2 * kv_heads
    q, k, v = parts[:, :heads], parts[:, heads:-kv_heads], parts[:, -kv_heads:]
    normed_q, normed_k = q, k
    if norms is not None:
        normed_q, normed_k = rms_norm(q, norms[0], norms[2]), rms_norm(k, norms[1], norms[2])
    turns = cos[positions], sin[positions]  # [T, head_dim / 2] each
    q.copy_(rotate(normed_q, *turns))
    k.copy_(rotate(normed_k, *turns))
    places = slots // k_cache.shape[1], slots % k_cache.shape[1]  # a cache may be strided: there is no view of it by slots
    k_cache[places], v_cache[places] = k, v
    return q
