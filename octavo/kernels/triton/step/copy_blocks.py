"""Copies of whole blocks, in every layer's buffers at once: one launch for all pairs and all buffers.

    froms, tos   [buffers]     the addresses of buffers; buffers with the same block size may be anywhere
    grid         (pairs, buffers, pieces of a block)

All reads come before any write. If one pair reads a block that another writes, blocks go through temporary memory, in
two launches; usually none does, and one launch is enough.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 2048  # words of four bytes


@triton.jit(do_not_specialize_on_alignment=["sources", "targets"])  # targets follow sources in memory, at any offset
def copy(froms, tos, sources, targets, WORDS: tl.constexpr, PIECE: tl.constexpr):
    pair, buffer = tl.program_id(0), tl.program_id(1)
    word = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
    inside = word < WORDS
    source = tl.multiple_of(tl.load(froms + buffer).to(tl.pointer_type(tl.int32)), 16)
    target = tl.multiple_of(tl.load(tos + buffer).to(tl.pointer_type(tl.int32)), 16)
    moved = tl.load(source + tl.load(sources + pair) * WORDS + word, mask=inside)
    tl.store(target + tl.load(targets + pair) * WORDS + word, moved, mask=inside)


def copy_blocks(buffers: list[Tensor], pairs: list[tuple[int, int]]) -> None:
    """Copies block `source` onto block `target` for every pair. buffers: each [num_blocks, ...], with blocks of equal size in bytes"""
    device = buffers[0].device
    size = buffers[0][0].numel() * buffers[0].element_size()
    assert size % 16 == 0, f"{size} bytes a block"
    assert all(b.stride(0) * b.element_size() == size and b.data_ptr() % 16 == 0 and b[0].numel() == b.stride(0) for b in buffers)
    starts, froms, tos = [b.data_ptr() for b in buffers], [source for source, _ in pairs], [target for _, target in pairs]
        # from pinned memory: any other upload would wait for the device
    sent = torch.tensor([*starts, *froms, *tos], dtype=torch.int64, pin_memory=buffers[0].is_cuda).to(device, non_blocking=True)
    addresses, sources, targets = sent.split([len(buffers), len(pairs), len(pairs)])
    grid = (len(pairs), len(buffers), triton.cdiv(size, 4 * PIECE))
    fixed = {"WORDS": size // 4, "PIECE": PIECE, "num_warps": 4}
    if not set(froms) & set(tos):
        copy[grid](addresses, addresses, sources, targets, **fixed)
        return
    aside = torch.empty(len(buffers), len(pairs), size, dtype=torch.uint8, device=device)
    places = aside.data_ptr() + torch.arange(len(buffers), device=device) * aside.stride(0)
    order = torch.arange(len(pairs), device=device)
    copy[grid](addresses, places, sources, order, **fixed)
    copy[grid](places, addresses, order, targets, **fixed)
