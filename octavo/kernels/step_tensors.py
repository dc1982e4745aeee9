"""The tensors of a step, at fixed addresses, so that a captured graph can be replayed.

    entries   sent by the host: query_start [P+1] | row [P] | start [P] | outputs [P] | first_output [P+1], one int32 array
    the rest  read by `prepare` from the rows

P scheduled rows have T tokens and S outputs: logits that an id may be sampled from. A row has at least one output, after its last
token, and a row with drafts has one more for each of them. Padding rows have one output each, until there are S.

A scheduled row with table row -1 is padding: it computes at most one token of no sequence, which goes to the null block. Every part
starts at a multiple of 16 bytes for every P: kernels are compiled for aligned pointers, and must not be recompiled for others.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels.row_words import NOISE_WORDS, RowLayout

ALIGNED = 4  # words
PARTS = 5  # of the entries


def part_words(entries: int) -> int:
    """Returns the size of each of the PARTS."""
    return -(-(entries + 1) // ALIGNED) * ALIGNED


@dataclass(frozen=True, slots=True)
class StepTensors:
    entries: Tensor  # int32; the next five are views of it
    query_start: Tensor  # [P+1]
    row: Tensor  # [P]
    start: Tensor  # [P]: first position computed
    outputs: Tensor  # [P]: how many of its outputs are sampled from
    first_output: Tensor  # [P+1]
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [groups, T] int64: the slot of each token in the cache of a group
    context_len: Tensor  # [P] int32
    tables: Tensor  # [groups, P, max_blocks] int32, undefined after a row's last block; the null block behind a window
    sample_index: Tensor  # [S] int64: the token of each output
    temperature: Tensor  # [S] float32
    noise: Tensor  # [S, 4] int32
    draw_positions: Tensor  # [S] int32: the position of the sampled id
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)  # numpy views of the same memory, on a CPU; created on first use

    def on_host(self) -> dict[str, NDArray[Any]]:
        if not self.arrays:
            names = (each.name for each in fields(self) if each.name != "arrays")
            self.arrays.update({name: getattr(self, name).numpy() for name in names})
        return self.arrays


class StepMemory:
    """Memory for the largest step, with as many outputs as scheduled rows; steps of any size are views of its beginning."""

    def __init__(self, layout: RowLayout, max_entries: int, max_tokens: int, device: torch.device) -> None:
        def words(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.entries = words(PARTS * part_words(max_entries))
        self._token_ids, self._positions = (words(max_tokens, dtype=torch.int64) for _ in range(2))
        self._slots = words(layout.groups, max_tokens, dtype=torch.int64)
        self._context_len, self._draw_positions = words(max_entries), words(max_entries)
        self._tables = words(layout.groups, max_entries, layout.max_blocks)
        self._sample_index = words(max_entries, dtype=torch.int64)
        self._temperature = words(max_entries, dtype=torch.float32)
        self._noise = words(max_entries, NOISE_WORDS)
        self._last: StepTensors | None = None

    def step(self, entries: int, tokens: int, outputs: int) -> StepTensors:
        """Returns views of the memory. They are reused, because most steps have the same size as the previous one."""
        last = self._last
        if last is None or (len(last.row), len(last.token_ids), len(last.sample_index)) != (entries, tokens, outputs):
            self._last = last = self._views(entries, tokens, outputs)
        return last

    def _views(self, entries: int, tokens: int, outputs: int) -> StepTensors:
        size, part = entries, part_words(entries)
        words = self.entries[: PARTS * part]
        query_start, row, start, sampled, first_output = words.view(PARTS, part)
        return StepTensors(
            entries=words,
            query_start=query_start[: size + 1],
            row=row[:size],
            start=start[:size],
            outputs=sampled[:size],
            first_output=first_output[: size + 1],
            token_ids=self._token_ids[:tokens],
            positions=self._positions[:tokens],
            slots=self._slots[:, :tokens],
            context_len=self._context_len[:size],
            tables=self._tables[:, :size],
            sample_index=self._sample_index[:outputs],
            temperature=self._temperature[:outputs],
            noise=self._noise[:outputs],
            draw_positions=self._draw_positions[:outputs],
        )
