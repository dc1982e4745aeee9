"""The twin of the kernel that divides decode attention into shares (`kernels/share_words.py`): row by row."""

import torch
from torch import Tensor

from octavo.kernels.share_words import IN_ALL, LINE, most_shares


def decode_shares(
    query_start: Tensor,  # [R+1]
    context_len: Tensor,  # [R]
    window: int | None,
    kv_heads: int,
    tile: int,  # keys
    programs: int,  # that a GPU runs at once
    each: int,  # shares that rows are cut into for each of them, at most
    grain: int,  # tiles of a share: as soon as there are twice as many for each program to read, there are more shares
) -> Tensor:
    """[lines, LINE] int32; what is not written is 0"""
    starts, contexts = query_start.tolist(), context_len.tolist()
    shares = torch.zeros(1 + most_shares(len(contexts), kv_heads, programs, each), LINE, dtype=torch.int32)
    seen = {}  # tiles of a row, and its first key
    for row, end in enumerate(contexts):
        if starts[row + 1] - starts[row] == 1:
            first = 0 if window is None else max(end - window, 0)
            seen[row] = max(-(-(end - first) // tile), 1), first
    in_all = sum(tiles for tiles, _ in seen.values()) * kv_heads
    longest = -(-in_all // (programs * min(max(in_all // (programs * grain), 1), each)))
    line = 1
    for row, (tiles, first) in sorted(seen.items(), key=lambda one: -one[1][0]):
        size = -(-tiles // -(-tiles // longest))
        parts = -(-tiles // size)
        for part in range(parts):
            low = first + part * size * tile
            for kv_head in range(kv_heads):
                words = starts[row], row, kv_head, low, min(low + size * tile, contexts[row]), contexts[row], part, parts
                shares[line, : len(words)] = torch.tensor(words)
                line += 1
    shares[0, IN_ALL] = line - 1
    return shares.to(query_start.device)
