"""Logits are adjusted on the device as by the twin: whatever is asked for, and whatever stands in the row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.reference import sampling as twin
from octavo.kernels.triton.sampling import logit_edits as kernels
from octavo.step.logit_edits import pack, unpack
from tests.support.asking import Asked, asking

VOCAB = 24


@settings(max_examples=15)
@given(batch=st.lists(asking(VOCAB), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_rows_are_adjusted_as_by_the_twin(device: str, batch: list[Asked], seed: int) -> None:
    monkey = pytest.MonkeyPatch()
    monkey.setattr(kernels, "CHUNK", 8)  # ids and lists in more than one piece
    logits = torch.randn(len(batch) + 2, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    lines = torch.full((2 * len(batch), 1 + 40), 7, dtype=torch.int32)  # prompt, then ids; every second line is nobody's
    for line, asked in zip(lines[1::2], batch):
        line[0] = asked.num_prompt
        line[1 : 1 + len(asked.ids)] = torch.tensor(asked.ids)
    outputs, rows, positions = list(range(len(batch), 0, -1)), list(range(1, 2 * len(batch), 2)), [len(asked.ids) for asked in batch]
    found = []
    packed = [pack(asked.params, asked.end_ids, asked.bad_words) for asked in batch]
    ways = ((kernels.edit_logits, device, lambda words: torch.from_numpy(words).to(device)), (twin.edit_logits, "cpu", unpack))
    for edit_logits, where, held in ways:
        table, edits = lines.to(where), [held(words) for words in packed]
        given = logits.to(where, torch.bfloat16)
        found.append(edit_logits(given, outputs, rows, positions, edits, table[:, 1:], table[:, 0]).cpu())
    monkey.undo()
    assert torch.allclose(found[0], found[1], rtol=1e-6, atol=1e-6), (found[0] - found[1]).abs().nan_to_num()
