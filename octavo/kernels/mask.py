"""Logits behind a mask of bits, in torch's own operations: they wait for nothing, on any device."""

import torch
from torch import Tensor


def mask_logits(logits: Tensor, words: Tensor) -> Tensor:
    """A copy of logits [n, V] with -inf where an id's bit is not set. words: [n, W] int32, least significant bit first"""
    places = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (words.view(torch.uint8).unsqueeze(-1) >> places) & 1  # [n, 4 * W, 8]
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
