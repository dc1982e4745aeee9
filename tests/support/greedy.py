"""Comparing greedy texts: equal tokens, except where the reference's best two are as good as equal.

Every sequence an engine made is fed to the reference once (teacher-forced): if each token is the reference's argmax over
the same beginning, the reference would have made the same text by itself. A token may differ only where the reference's
top two logits are within `TIE`; such places are counted, and there may be one in `TIES_ALLOWED` tokens at most. In bfloat16 both
engines round all the way: there logits are ties within `ROUGH_TIE`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo import RequestOutput

TIE, ROUGH_TIE = 1e-4, 0.1
TIES_ALLOWED, ROUGH_TIES_ALLOWED = 5000, 10
LOGIT_TOLERANCE, ROUGH_TOLERANCE = 1e-3, 0.2


@dataclass
class Comparison:
    rough: bool = False
    tokens: int = 0
    ties: int = 0
    largest_gap: float = 0.0  # of a token to the reference's best, where they differ
    largest_difference: float = 0.0  # of logprobs

    def accept(self, tolerance: float = LOGIT_TOLERANCE) -> None:
        print(f"{self.tokens} tokens, {self.ties} ties within {self.largest_gap:.1e}, logprobs within {self.largest_difference:.1e}")
        assert self.ties <= -(-self.tokens // (ROUGH_TIES_ALLOWED if self.rough else TIES_ALLOWED))
        assert self.largest_difference <= (ROUGH_TOLERANCE if self.rough else tolerance)


@torch.inference_mode()
def compare_with_reference(outputs: list[RequestOutput], model: Any, batch_size: int = 20) -> Comparison:
    """`outputs` of one completion each, with logprobs, against a transformers model, on its device and in its dtype."""
    comparison = Comparison(rough=model.dtype != torch.float32)
    outputs = sorted(outputs, key=lambda output: len(output.prompt_token_ids))
    for start in range(0, len(outputs), batch_size):
        batch = outputs[start : start + batch_size]
        sequences = [torch.tensor(output.prompt_token_ids + output.outputs[0].token_ids) for output in batch]
        padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)  # the tail is masked by causality
        logits = model(padded.to(model.device), use_cache=False).logits.float().cpu()
        for output, rows in zip(batch, logits, strict=True):
            _compare_one(output, rows, comparison)
    return comparison


def _compare_one(output: RequestOutput, logits: Tensor, comparison: Comparison) -> None:
    completion, first = output.outputs[0], len(output.prompt_token_ids) - 1
    assert completion.logprobs is not None
    for position, (token, choices) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True), start=first):
        row = logits[position]
        best = row.topk(2)
        if int(best.indices[0]) != token:
            gap = float(best.values[0] - row[token])
            tie = ROUGH_TIE if comparison.rough else TIE
            assert gap <= tie, f"request {output.request_id}, position {position}: {token} for {int(best.indices[0])}, {gap:.2e} behind"
            comparison.ties += 1
            comparison.largest_gap = max(comparison.largest_gap, gap)
        reference = row.log_softmax(0)
        for other, found in choices.items():
            comparison.largest_difference = max(comparison.largest_difference, abs(float(reference[other]) - found.logprob))
        comparison.tokens += 1


def same_greedy_text(one: RequestOutput, other: RequestOutput) -> bool:
    """Whether two runs of an engine agree under the same rule: they may part only where the best two were a tie."""
    a, b = one.outputs[0], other.outputs[0]
    assert a.logprobs is not None
    for token, twin, choices in zip(a.token_ids, b.token_ids, a.logprobs, strict=True):
        if token != twin:
            best = sorted((choice.logprob for choice in choices.values()), reverse=True)
            return twin in choices and best[0] - choices[twin].logprob <= TIE
    return a.text == b.text
