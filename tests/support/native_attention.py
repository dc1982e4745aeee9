"""What writing into a cache and attending over it give, by the torch twins; and mixes of rows that try all of it."""

import random
from typing import Any

import numpy as np
import torch

from octavo.kernels.cpu.attention_case import AttentionCase, Cache
from octavo.kernels.cpu.library import BF16, F16, Q8
from octavo.kernels.cpu.packing import Floats
from octavo.kernels.reference.attention import attend, causal_mask
from octavo.kernels.reference.layer import norm_heads, rotate

MIXED = ((0, 37), (30, 1), (7, 70), (65, 1), (0, 1))  # prompts, chunks after a past, single tokens
# Runs of single tokens over the same beginning: of different lengths, one that ends a token after it, one that leaves early, two runs
# with a prompt between, a beginning too short to count.
TOGETHER = (((200, 1), (190, 1), (176, 1), (300, 1), (70, 33), (260, 1), (261, 1), (20, 1)), (0, 11, 11, 5, 0, 4, 16, 1))
MANY_TOGETHER = (((530, 1),) * 20, (0,) + (32,) * 19)


def tree_of_rows(seed: int, rows: int = 24, prompts: int = 4, longest: int = 300, **kind: Any) -> AttentionCase:
    """Single tokens whose contexts begin like that of any row before them, so that beginnings make a tree and rows stand in no order.

    The first rows are prompts that begin like nobody. Some of the others compute several tokens.
    """
    draw, size = random.Random(seed), int(kind.get("block_size", 16))
    pasts = [longest if row < prompts else draw.randint(1, longest) for row in range(rows)]
    like = [0] * prompts + [draw.randrange(row) for row in range(prompts, rows)]
    shared = [0] * prompts + [draw.randint(0, min(pasts[row], pasts[like[row]]) // size) for row in range(prompts, rows)]
    new = [draw.choice((1, 1, 1, 1, 1, 1, 5)) if row >= prompts else 1 for row in range(rows)]
    return AttentionCase(rows=tuple(zip(pasts, new)), shared=tuple(shared), like=tuple(like), seed=seed, **kind)


def written_twin(case: AttentionCase, projected: Floats | None = None, norms: tuple[Floats, Floats] | None = None) -> Floats:
    """q, k and v of the case, or those of a layer that has its rows, normed and rotated."""
    projected, norms = (case.projected, case.norms) if projected is None else (projected, norms)
    q, k, v, gate = torch.from_numpy(projected.copy()).split(case.parts, dim=1)
    if norms is not None:
        q, k = (norm_heads(part, torch.from_numpy(norm), 1e-6) for part, norm in zip((q, k), norms))
    cos, sin = (torch.from_numpy(part[case.positions]) for part in (np.cos(case.angles), np.sin(case.angles)))
    return torch.cat((rotate(q, cos, sin), rotate(k, cos, sin), v, gate), dim=1).numpy()


def attended_twin(case: AttentionCase, qkv: Floats, k: Cache, v: Cache) -> Floats:
    numbers = [torch.from_numpy(cache.numbers().reshape(-1, case.kv_heads, case.head_dim)) for cache in (k, v)]
    out = []
    for row, (past, new) in enumerate(case.rows):
        slots = case.slots(np.full(past + new, row), np.arange(past + new))
        keys, values = (part[slots].unsqueeze(0) for part in numbers)
        queries = torch.from_numpy(qkv[case.token_rows == row, : case.heads]).unsqueeze(0)
        mask = causal_mask(torch.tensor([past + new]), new, past + new, case.window or None, torch.float32)
        sinks = None if case.sink_scores is None else torch.from_numpy(case.sink_scores)
        if case.slopes is not None:  # a mask for each head
            keys, values = (part.repeat_interleave(case.heads // case.kv_heads, 2) for part in (keys, values))
            distances = torch.arange(past + new) - torch.arange(past, past + new)[:, None]
            mask = mask + torch.from_numpy(case.slopes)[None, :, None, None] * distances
        out.append(attend(queries, keys, values, mask, False, case.head_dim**-0.5, case.soft_cap or None, sinks)[0])
    attended = torch.cat(out)
    return (attended * torch.from_numpy(qkv[:, -case.heads :]).sigmoid() if case.output_gate else attended).numpy()


def stored_twin(case: AttentionCase, before: tuple[Cache, Cache], qkv: Floats) -> tuple[Cache, Cache]:
    """The caches with the new tokens in them."""
    after = []
    for cache, new in zip(before, case.new_kv(qkv)):
        held = Cache.holding(np.ascontiguousarray(new), case.cache_kind)
        values, scale = cache.values.copy(), None if cache.scale is None else cache.scale.copy()
        values.reshape(-1, *new.shape[1:])[case.new_slots] = held.values
        if scale is not None and held.scale is not None:
            scale.reshape(-1, case.kv_heads)[case.new_slots] = held.scale
        after.append(Cache(values, scale))
    return after[0], after[1]


def rounds(level: str, case: AttentionCase) -> bool:
    """Whether queries are rounded to bfloat16, and perhaps weights: with scores that are large, that can move a lot."""
    return level in ("avx512bf16", "amx") and case.cache_kind in (BF16, Q8) and case.head_dim % 32 == 0


def in_halves(level: str, case: AttentionCase) -> bool:
    """Whether keys, queries, weights and values are multiplied and summed in float16, 32 at a time."""
    return level in ("neon", "i8mm") and case.cache_kind == F16 and case.head_dim % 16 == 0
