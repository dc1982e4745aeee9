"""The twin of the kernel that divides decode attention into shares (`kernels/share_words.py`): row by row."""

import torch
from torch import Tensor

from octavo.kernels.share_words import LINE, num_lines


def decode_shares(
    query_start: Tensor,  # [R+1]
    context_len: Tensor,  # [R]
    window: int | None,
    kv_heads: int,
    tile: int,  # keys
    programs: int,
    least: int,  # tiles of a share
) -> Tensor:
    """[lines, LINE] int32; what is not written is 0"""
    starts, contexts = query_start.tolist(), context_len.tolist()
    shares = torch.zeros(num_lines(programs, len(contexts)), LINE, dtype=torch.int32)
    in_all, line = 0, 1 + programs
    for row, end in enumerate(contexts):
        if starts[row + 1] - starts[row] != 1:
            continue
        first = 0 if window is None else max(end - window, 0)
        tiles = max(-(-(end - first) // tile), 1)
        shares[line, :-1] = torch.tensor([in_all, tiles, starts[row], row, first, end, line + 1])
        in_all, line = in_all + tiles * kv_heads, line + 1
    share = max(-(-in_all // programs), least)
    shares[0, :2] = torch.tensor([share, in_all])
    for program in range(-(-in_all // share)):
        begun = shares[1 + programs : line, 0] <= program * share
        shares[1 + program] = shares[programs + int(begun.sum())]
    return shares.to(query_start.device)
