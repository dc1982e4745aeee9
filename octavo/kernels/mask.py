"""Logits behind a mask of bits, in torch's own operations, which wait for nothing on a device."""

import numpy as np
import torch
from torch import Tensor


def mask_logits(logits: Tensor, words: Tensor) -> Tensor:
    """Returns a copy of logits [n, V] with -inf where an id's bit is not set. words: [n, W] int32, least significant bit first"""
    if logits.is_cuda:
        places = torch.arange(8, dtype=torch.uint8, device=logits.device)
        bits = ((words.view(torch.uint8).unsqueeze(-1) >> places) & 1).flatten(1)  # [n, 32 * W]
    else:
        bits = torch.from_numpy(np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little"))
    return logits.masked_fill(bits[:, : logits.shape[1]] == 0, -torch.inf)
