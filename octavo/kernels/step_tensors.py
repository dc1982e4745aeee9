"""The tensors of a step on the device, at fixed addresses, so that a captured graph finds them again.

    entries   what the host sends: query_start [P+1] | row [P] | start [P] | samples [P], one line of words
    the rest  what `prepare` reads out of the rows for them

An entry with row -1 is padding: it computes at most one token of no sequence, which goes to the null block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.row_words import NOISE_WORDS, RowLayout


def entry_words(entries: int) -> int:
    return 4 * entries + 1


@dataclass(frozen=True, slots=True)
class StepTensors:
    entries: Tensor  # [4P + 1] int32
    query_start: Tensor  # [P+1], these four are views of it
    row: Tensor  # [P]
    start: Tensor  # [P]: first position computed
    samples: Tensor  # [P]: 1 where an id is sampled after the last one
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64
    context_len: Tensor  # [P] int32
    tables: Tensor  # [P, max_blocks] int32, garbage past a row's last block
    sample_index: Tensor  # [P] int64: the last token of each entry
    temperature: Tensor  # [P] float32
    noise: Tensor  # [P, 4] int32
    draw_positions: Tensor  # [P] int32: the place a sampled id will take


class StepMemory:
    """Memory for the largest step; steps of any size are views of its beginning."""

    def __init__(self, layout: RowLayout, max_entries: int, max_tokens: int, device: torch.device) -> None:
        def words(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.entries = words(entry_words(max_entries))
        self._tokens = words(3, max_tokens, dtype=torch.int64)
        self._context_len, self._draw_positions = words(2, max_entries)
        self._tables = words(max_entries, layout.max_blocks)
        self._sample_index = words(max_entries, dtype=torch.int64)
        self._temperature = words(max_entries, dtype=torch.float32)
        self._noise = words(max_entries, NOISE_WORDS)

    def step(self, entries: int, tokens: int) -> StepTensors:
        line, size = self.entries[: entry_words(entries)], entries
        token_ids, positions, slots = self._tokens[:, :tokens]
        return StepTensors(
            entries=line, query_start=line[: size + 1], row=line[size + 1 : 2 * size + 1], start=line[2 * size + 1 : 3 * size + 1],
            samples=line[3 * size + 1 :], token_ids=token_ids, positions=positions, slots=slots, context_len=self._context_len[:size],
            tables=self._tables[:size], sample_index=self._sample_index[:size], temperature=self._temperature[:size],
            noise=self._noise[:size], draw_positions=self._draw_positions[:size],
        )  # fmt: skip
