"""Logits after what a request asks to be done to them: allowed ids, bans, bias, penalties, in this order.

A row's newest id is provisional: it was drawn from these very logits, before they were adjusted. What counts are the ids before it.
"""

import torch
from torch import Tensor

from octavo.kernels.asks import Ask, unpack


def adjust(
    logits: Tensor,  # [P, V]
    entries: list[int],  # which of these
    rows: list[int],  # the row of each
    asks: list[Tensor],  # what each asks for, packed, int32
    token_ids: Tensor,  # [rows, positions]
    num_tokens: Tensor,  # [rows], the provisional one among them
    num_prompt: Tensor,  # [rows]
) -> Tensor:
    """The adjusted logits of the entries, [len(entries), V] float32."""
    scores = logits[entries].float()
    for score, row, packed in zip(scores, rows, asks, strict=True):
        ids = token_ids[row, : int(num_tokens[row]) - 1].long()
        _adjust_row(score, ids, ids[int(num_prompt[row]) :], unpack(packed.numpy()))
    return scores


def _adjust_row(scores: Tensor, ids: Tensor, output: Tensor, ask: Ask) -> None:
    """In place. scores: [V]; ids: prompt and output; output: its end alone"""
    if ask.allowed:
        others = torch.ones_like(scores, dtype=torch.bool)
        others[ask.allowed] = False
        scores[others] = -torch.inf
    banned = {word[-1] for word in ask.bad_words if _stands_at_end(word[:-1], output)}
    banned |= set(ask.end_ids) if len(output) < ask.min_tokens else set()
    if not ask.allowed or not banned.issuperset(ask.allowed):  # else nothing would be left
        scores[list(banned)] = -torch.inf
    scores[list(ask.bias)] += torch.tensor(list(ask.bias.values()), dtype=torch.float32)
    if ask.repetition != 1:
        seen = ids.unique()
        scores[seen] = torch.where(scores[seen] > 0, scores[seen] / ask.repetition, scores[seen] * ask.repetition)
    met, counts = output.unique(return_counts=True)
    scores[met] -= ask.frequency * counts + ask.presence


def _stands_at_end(ids: list[int], output: Tensor) -> bool:
    return len(ids) <= len(output) and output[len(output) - len(ids) :].tolist() == ids
