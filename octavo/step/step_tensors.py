"""What a device has of sequences and steps: the rows of the request table (`RowLayout`), and the tensors of a step (`StepTensors`).

    row       | 8 words: lengths, temperature, noise, offset | block tables, max_blocks words for each group | token ids, max_len words |
    entries   sent by the host, one int32 array:
              query_start [P+1] | row [P] | start [P] | outputs [P] | first_output [P+1] | context_len [groups, P]
              of a recurrent model also   state_read [P] | state_write [P] | first_checkpoint [P+1]
    checkpoints  of a recurrent model, sent by the host: checkpoint_end [K] | checkpoint_state [K]
    the rest  of the tensors is read by `prepare` from the rows

P scheduled rows have T tokens and S outputs: logits that an id may be sampled from. A row has at least one output, after its last
token, and a row with drafts has one more for each of them. Padding rows have one output each, until there are S. The tensors are at
fixed addresses, so that a captured graph can be replayed.

A token's index in the cache follows from its row alone: it determines the slot, the keys that the token reads and its sampling noise.
Its position is what the model encodes: the index plus the row's offset, on each axis.
"""

from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo import layout
from octavo.errors import ConfigError
from octavo.messages import StepPlan

# -- rows
#
# A row is copied, written and read as int32; floats are stored as their bits. This module defines the layout for kernels and host.
# Lengths, ids and blocks are below 2^31: a row has at most MOST_WORDS fields, and settings, vocabulary and pool are checked when they
# are read. The noise words are unsigned, and use all 32 bits. The offset of a row in the table may exceed 2^31, and is an int64.

NUM_TOKENS, NUM_PROMPT, TEMPERATURE, NOISE = range(4)
NOISE_WORDS = layout.NOISE_WORDS
OFFSET = NOISE + NOISE_WORDS  # the position of a token is its index in the row plus this
HEAD = layout.ROW_HEAD  # start of the first block table
MOST_WORDS = 65_535 * 1024  # of a row: a run is copied by programs in the second dimension of a grid, which is limited


@dataclass(frozen=True, slots=True)
class RowLayout:
    max_blocks: int  # of one table
    max_len: int
    links: tuple[int, ...] = (1,)  # per cache group: a block of its table has this many times `block_size` tokens
    has_states: bool = False  # the model has recurrent layers

    def __post_init__(self) -> None:
        if self.width > MOST_WORDS:
            raise ConfigError(
                f"max_model_len is too large: a row of {self.max_len:,} tokens in {self.max_blocks:,} blocks takes "
                f"{self.width:,} words, at most {MOST_WORDS:,}"
            )

    @property
    def groups(self) -> int:
        return len(self.links)

    def table(self, group: int) -> int:
        """Returns the start of the block table of a group."""
        return HEAD + group * self.max_blocks

    @property
    def tokens(self) -> int:
        """The start of the token ids."""
        return self.table(self.groups)

    @property
    def width(self) -> int:
        return self.tokens + self.max_len


# -- steps
#
# A scheduled row with table row -1 is padding: it computes at most one token of no sequence, which is not stored. Every part starts at
# a multiple of 16 bytes for every P: kernels are compiled for aligned pointers, and must not be recompiled for others.

ALIGNED = 4  # words
NO_SLOT = -1  # nothing is stored there
AXES = 1  # of positions: text has one
PADDING = -1  # the row of a padding entry
ENTRY_PARTS = 5  # before the lengths, of which there is a part for each cache group
STATE_PARTS = 3  # after the lengths
NO_STATE = -1  # nothing is stored there


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a step, maybe padded."""

    entries: int
    tokens: int
    outputs: int  # at least one for each entry, and as many if no row has drafts
    in_teams: bool = False  # on a device: some rows have shared-prefix groups, which need more kernels
    checkpoints: int = 0  # of a recurrent model: states written on the way of an entry

    @property
    def decodes(self) -> bool:
        """Whether every scheduled row has one token."""
        return self.entries == self.tokens


def part_words(entries: int) -> int:
    """Returns the size of each part."""
    return -(-(entries + 1) // ALIGNED) * ALIGNED


def packed_entries(plan: StepPlan, shape: Shape, groups: int) -> NDArray[np.int32]:
    """Returns the plan as packed int32 fields, padded to a shape, in the order of `StepTensors`."""
    count, size, lengths_end = len(plan.row), shape.entries, ENTRY_PARTS + groups
    words = np.zeros((lengths_end + (STATE_PARTS if plan.states else 0), part_words(size)), np.int32)
    (query_start, row, start, outputs, first_output), context_len = words[:ENTRY_PARTS], words[ENTRY_PARTS:lengths_end, :count]
    query_start[1 : count + 1] = list(accumulate(plan.num_query))
    if size > count:
        query_start[count + 1 : size + 1] = query_start[count] + (np.arange(1, size - count + 1) if shape.decodes else 0)
    row[:count], row[count:] = plan.row, PADDING
    start[:count], outputs[:count] = plan.start, plan.outputs
    first_output[: size + 1] = np.arange(size + 1)
    if plan.drafts:
        first_output[: count + 1] = plan.first_outputs()
        first_output[count + 1 :] = np.minimum(first_output[count] + np.arange(1, len(first_output) - count), shape.outputs)
    context_len[:] = start[:count] + query_start[1 : count + 1] - query_start[:count]
    for group, lengths in plan.group_lengths.items():
        context_len[group] = lengths
    if plan.states:
        read, write, first_checkpoint = words[lengths_end:]
        read[:count], write[:count] = zip(*plan.states)
        write[count:] = NO_STATE
        entries = [entry for entry, _, _ in plan.checkpoints]
        first_checkpoint[: size + 1] = np.searchsorted(entries, np.arange(size + 1))
    return words.ravel()


def packed_checkpoints(plan: StepPlan) -> NDArray[np.int32]:
    """Returns [K, 2]: the token of the step after which each checkpoint of the plan is written (its index plus 1), and the state slot."""
    first = list(accumulate(plan.num_query, initial=0))
    rows = [(first[entry] + covered - plan.start[entry], state) for entry, covered, state in plan.checkpoints]
    return np.array(rows, np.int32).reshape(-1, 2)


def plan_sizes(plan: StepPlan) -> tuple[int, int, int]:
    """Returns how many entries, tokens and outputs a plan has."""
    return len(plan.row), sum(plan.num_query), plan.first_outputs()[-1]


@dataclass(frozen=True, slots=True)
class StepStates:
    """The state slots of a step. All are int32."""

    read: Tensor  # [P]: the state before an entry's first token; the null slot: there is none before
    write: Tensor  # [P]: receives the state after its last token; NO_STATE for padding
    start: Tensor  # [P]: tokens that the state before an entry covers
    first_checkpoint: Tensor  # [P+1]
    checkpoints: Tensor  # [K, 2]: the end of the tokens that it covers, as an index of the step's tokens, and its state slot


@dataclass(frozen=True, slots=True)
class StepTensors:
    entries: Tensor  # int32; the next six are views of it
    query_start: Tensor  # [P+1]
    row: Tensor  # [P]
    start: Tensor  # [P]: first position computed
    outputs: Tensor  # [P]: how many of its outputs are sampled from
    first_output: Tensor  # [P+1]
    context_len: Tensor  # [groups, P]: positions in the cache after the step
    token_ids: Tensor  # [T] int64
    cache_index: Tensor  # [T] int32
    positions: Tensor  # [axes, T] int32
    slots: Tensor  # [groups, T] int64: the slot of each token in the cache of a group, NO_SLOT for padding
    tables: Tensor  # [groups, P, max_blocks] int32, undefined after a row's last block; the null block behind a window
    sample_index: Tensor  # [S] int64: the token of each output
    temperature: Tensor  # [S] float32
    noise: Tensor  # [S, 4] int32
    draw_positions: Tensor  # [S] int32: the position of the sampled id
    states: StepStates | None = None  # of a recurrent model
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)  # numpy views of the same memory, on a CPU; created on first use

    def on_host(self) -> dict[str, NDArray[Any]]:
        if not self.arrays:
            names = (each.name for each in fields(self) if each.name not in ("arrays", "states"))
            self.arrays.update({name: getattr(self, name).numpy() for name in names})
        return self.arrays


def send(words: NDArray[np.int32], target: Tensor) -> None:
    """Copies values to the beginning of a tensor. A copy to a device reads pinned memory, which is kept until it is done."""
    if target.is_cuda:
        target[: len(words)].copy_(torch.from_numpy(words).pin_memory(), non_blocking=True)
    else:
        target.numpy()[: len(words)] = words


class StepMemory:
    """Memory for the largest step, with as many outputs as scheduled rows; steps of any size are views of its beginning."""

    def __init__(self, layout: RowLayout, max_entries: int, max_tokens: int, device: torch.device) -> None:
        def words(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._parts = ENTRY_PARTS + layout.groups + (STATE_PARTS if layout.has_states else 0)
        self._groups, self._has_states = layout.groups, layout.has_states
        self.checkpoints = words(max_tokens if layout.has_states else 0, 2)
        self.entries = words(self._parts * part_words(max_entries))
        self._token_ids, self._cache_index = words(max_tokens, dtype=torch.int64), words(max_tokens)
        self._positions = words(AXES, max_tokens)
        self._slots = words(layout.groups, max_tokens, dtype=torch.int64)
        self._draw_positions = words(max_entries)
        self._tables = words(layout.groups, max_entries, layout.max_blocks)
        self._sample_index = words(max_entries, dtype=torch.int64)
        self._temperature = words(max_entries, dtype=torch.float32)
        self._noise = words(max_entries, NOISE_WORDS)
        self._last: StepTensors | None = None

    def send(self, plan: StepPlan, shape: Shape) -> None:
        """Sends the scheduled rows of a plan, padded to a shape."""
        assert len(plan.states) == len(plan.row) * self._has_states, "the slots of the recurrent states do not fit the plan"
        send(packed_entries(plan, shape, self._groups), self.entries)
        if plan.checkpoints:
            send(packed_checkpoints(plan).ravel(), self.checkpoints.view(-1))

    def step(self, entries: int, tokens: int, outputs: int, checkpoints: int = 0) -> StepTensors:
        """Returns views of the memory. They are reused, because most steps have the same size as the previous one."""
        last, size = self._last, (entries, tokens, outputs, checkpoints)
        if last is None or _size(last) != size:
            self._last = last = self._views(*size)
        return last

    def _views(self, entries: int, tokens: int, outputs: int, checkpoints: int) -> StepTensors:
        size, part, lengths_end = entries, part_words(entries), ENTRY_PARTS + self._groups
        parts = self.entries[: self._parts * part].view(self._parts, part)
        query_start, row, start, sampled, first_output = parts[:ENTRY_PARTS]
        states = None
        if self._has_states:
            read, write, first_checkpoint = parts[lengths_end:]
            states = StepStates(read[:size], write[:size], start[:size], first_checkpoint[: size + 1], self.checkpoints[:checkpoints])
        return StepTensors(
            entries=parts.view(-1),
            query_start=query_start[: size + 1],
            row=row[:size],
            start=start[:size],
            outputs=sampled[:size],
            first_output=first_output[: size + 1],
            context_len=parts[ENTRY_PARTS:lengths_end, :size],
            token_ids=self._token_ids[:tokens],
            cache_index=self._cache_index[:tokens],
            positions=self._positions[:, :tokens],
            slots=self._slots[:, :tokens],
            tables=self._tables[:, :size],
            sample_index=self._sample_index[:outputs],
            temperature=self._temperature[:outputs],
            noise=self._noise[:outputs],
            draw_positions=self._draw_positions[:outputs],
            states=states,
        )


def _size(step: StepTensors) -> tuple[int, int, int, int]:
    checkpoints = 0 if step.states is None else len(step.states.checkpoints)
    return len(step.row), len(step.token_ids), len(step.sample_index), checkpoints
