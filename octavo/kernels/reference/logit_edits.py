"""Logits after what a request asks to be done to them: allowed ids, bans, bias, penalties, in this order.

A row's newest id is provisional: it was drawn from these very logits, before they were edited. What counts are the ids before it.
"""

import torch
from torch import Tensor

from octavo.kernels.logit_edits import LogitEdits


def edit_logits(
    logits: Tensor,  # [P, V]
    entries: list[int],  # which of these
    rows: list[int],  # the row of each
    edits: list[LogitEdits],  # what each asks for
    token_ids: Tensor,  # [rows, positions]
    num_tokens: Tensor,  # [rows], the provisional one among them
    num_prompt: Tensor,  # [rows]
) -> Tensor:
    """Returns the edited logits of the entries, [len(entries), V] float32."""
    scores = logits[entries].float()  # a copy
    for score, row, asked in zip(scores, rows, edits, strict=True):
        ids = token_ids[row, : int(num_tokens[row]) - 1]
        _edit(score, ids, ids[int(num_prompt[row]) :], asked)
    return scores


def _edit(scores: Tensor, ids: Tensor, output: Tensor, edits: LogitEdits) -> None:
    """Changes scores in place. scores: [V]; ids: prompt and output; output: its end alone"""
    if edits.allowed:
        kept = scores[edits.allowed_ids]
        scores.fill_(-torch.inf)
        scores[edits.allowed_ids] = kept
    banned = _word_ends(edits, output) | (edits.end_ids if len(output) < edits.min_tokens else frozenset())
    if banned and (not edits.allowed or not edits.allowed <= banned):  # else nothing would be left
        scores[list(banned)] = -torch.inf
    if len(edits.bias_ids):
        scores[edits.bias_ids] += edits.biases
    if edits.repetition != 1:
        seen = scores[ids]
        scores[ids] = torch.where(seen > 0, seen / edits.repetition, seen * edits.repetition)  # an id met twice is written twice, alike
    if edits.frequency != 0 or edits.presence != 0:
        met, counts = output.unique(return_counts=True)
        scores[met] -= edits.frequency * counts + edits.presence


def _word_ends(edits: LogitEdits, output: Tensor) -> frozenset[int]:
    """Returns the ids that would complete a bad word: all but its last stand at the end of the output."""
    tail = output[max(len(output) - edits.longest_word + 1, 0) :].tolist() if edits.longest_word > 1 else []
    words = edits.longer_words.get(tail[-1], ()) if tail else ()
    ends = {word[-1] for word in words if len(word) <= len(tail) + 1 and tail[len(tail) - len(word) + 1 :] == word[:-1]}
    return edits.single_words.union(ends)
