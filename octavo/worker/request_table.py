"""`RequestTable`: the worker's state of each running sequence, one row of packed int32 fields each (`step/step_tensors.py`).

    row   lengths, temperature, noise   block tables             token_ids
     0    4, 4, 0.7, ...                [ 5  9  0 .. ]           [ 12  7 99  4 .. ]
     1    3, 2, 0.0, ...                [ 5  2  0 .. ]           [ 12  7 31 .. ]

A step sends only the changes, in one upload: runs of int32 values and their destinations. Forks are copies inside the table. A
sampled id is appended on the device, so the next step can be planned and launched before the host has received it. A freed row needs
no message: its next owner overwrites it, and nothing after a row's blocks and ids is ever read. Drafts are written after a row's ids,
by the plan that computes them, and accepted ones become its ids.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels.ops import accept, copy_words
from octavo.messages import NoiseKey, RowFork, RowWrite, StepPlan
from octavo.sampling_params import SamplingParams
from octavo.step.step_tensors import HEAD, NOISE, NOISE_WORDS, NUM_PROMPT, NUM_TOKENS, OFFSET, TEMPERATURE, RowLayout, send

Words = NDArray[np.int32]
Places = NDArray[np.int64]
SampledToken = tuple[int, int, int]  # row, position, token


class RequestTable:
    def __init__(self, num_rows: int, layout: RowLayout, device: torch.device) -> None:
        self.layout = layout
        self.words = torch.zeros(num_rows, layout.width, dtype=torch.int32, device=device)  # [rows, width]; the rest are views
        self.num_tokens, self.num_prompt = self.words[:, NUM_TOKENS], self.words[:, NUM_PROMPT]
        self.token_ids = self.words[:, layout.tokens :]  # [rows, max_len]
        self._changes: TableChanges | None = None  # tracked if requested

    def watched_tables(self) -> "TableChanges":
        """Returns the block tables as seen by the host and counters of their changes, which are tracked from now on."""
        if self._changes is None:
            self._changes = TableChanges(self._block_tables() if self.words.device.type == "cpu" else None, len(self.words), self.layout)
        return self._changes

    def _block_tables(self) -> Words:
        """Returns a view of the block tables, [groups, rows, max_blocks]."""
        layout, first = self.layout, self.layout.table(0)
        lines = self.words.numpy()[:, first : first + layout.groups * layout.max_blocks]
        return np.moveaxis(lines.reshape(len(lines), layout.groups, layout.max_blocks), 1, 0)

    def apply(self, plan: StepPlan) -> None:
        """Applies every change of a plan to the rows, in the order in which they were decided."""
        if self._changes is not None:
            self._changes.apply(plan)
        if plan.row_forks:
            self._copy_lines(plan.row_forks)
        runs: list[tuple[int, Words]] = []  # destination and values
        for fork in plan.row_forks:
            runs.append((self._at(fork.row, NOISE), noise_words(fork.noise)))
        for write in plan.row_writes:
            runs.append((self._at(write.row, 0), _head(write)))
            runs.append((self._at(write.row, self.layout.tokens), np.array(write.token_ids, np.int32)))
            tables = enumerate(write.tables)
            runs.extend((self._at(write.row, self.layout.table(group)), np.array(table, np.int32)) for group, table in tables if table)
        for row, length in plan.lengths:
            runs.append((self._at(row, NUM_TOKENS), np.array([length], np.int32)))
        for entry, ids in plan.drafts.items():
            place = self.layout.tokens + plan.sampled_position(entry)  # after the row's last id
            runs.append((self._at(plan.row[entry], place), np.array(ids, np.int32)))
        if plan.new_blocks:
            runs += self._block_runs(plan.new_blocks)
        if runs:
            self._write(runs)
        if plan.last_ids:
            self._replace_last(plan.last_ids)

    def accept(self, drafted: list[tuple[int, int, int, int]], ids: Tensor) -> None:
        """Appends the ids of these rows, of which some may have drafts: row, position of its first id, its output, number of drafts."""
        accept(self.words, self.layout, upload(np.array(drafted, np.int32), self.words.device), ids)

    def learn(self, tokens: list[SampledToken]) -> None:
        """Appends tokens that another stage of a pipeline has sampled."""
        runs: list[tuple[int, Words]] = []
        for row, position, token in tokens:
            runs.append((self._at(row, self.layout.tokens + position), np.array([token], np.int32)))
            runs.append((self._at(row, NUM_TOKENS), np.array([position + 1], np.int32)))
        if runs:
            self._write(runs)

    def _at(self, row: int, word: int) -> int:
        return row * self.layout.width + word

    def _copy_lines(self, forks: list[RowFork]) -> None:
        """Copies whole rows, all reads before any write: rows that are exchanged go through separate memory."""
        width, flat, count = self.layout.width, self.words.view(-1), len(forks)
        sources, targets, beside = (np.array(rows) * width for rows in zip(*((f.source, f.row, i) for i, f in enumerate(forks))))
        if set(sources.tolist()) & set(targets.tolist()):
            lines = flat.new_empty(count * width)
            self._copy(flat, lines, sources, beside)
            self._copy(lines, flat, beside, targets)
        else:
            self._copy(flat, flat, sources, targets)

    def _copy(self, source: Tensor, target: Tensor, starts: Places, places: Places) -> None:
        width = self.layout.width
        runs = np.stack([starts, places, np.full_like(starts, width)], axis=1)  # [N, 3]
        copy_words(source, target, _runs(upload(runs.ravel().view(np.int32), self.words.device)), width)

    def _replace_last(self, last_ids: list[tuple[int, int]]) -> None:
        """The host may not know the length of a row, so it is read on the device."""
        rows, ids = upload(np.array(last_ids, np.int32).T.copy(), self.words.device)
        places = self.num_tokens.index_select(0, rows) - 1
        self.token_ids[rows.long(), places.long()] = ids

    def _block_runs(self, new_blocks: list[tuple[int, int, int, int]]) -> list[tuple[int, Words]]:
        layout = self.layout
        rows, groups, index, blocks = np.array(new_blocks).T
        places = rows * layout.width + layout.table(0) + groups * layout.max_blocks + index
        return list(zip(places.tolist(), blocks.astype(np.int32)[:, None], strict=True))

    def _write(self, runs: list[tuple[int, Words]]) -> None:
        counts = np.array([len(words) for _, words in runs])
        starts = 6 * len(runs) + counts.cumsum() - counts
        places = np.array([place for place, _ in runs], np.int64)
        table = np.stack([starts, places, counts], axis=1).ravel().view(np.int32)  # [N, 3], each number two int32 values
        sent = upload(np.concatenate([table, *(words for _, words in runs)]), self.words.device)
        copy_words(sent, self.words.view(-1), _runs(sent[: table.size]), int(counts.max()))


class TableChanges:
    """Counts the changes of each block table except appends. While a counter is unchanged, earlier findings about the table hold."""

    def __init__(self, tables: Words | None, num_rows: int, layout: RowLayout) -> None:
        """`tables`: [groups, rows, max_blocks] if they are in host memory. Otherwise a copy is maintained here."""
        shape = layout.groups, num_rows
        self._kept = tables is None
        self.tables = np.zeros((*shape, layout.max_blocks), np.int32) if tables is None else tables
        self.count = np.zeros(shape, np.int64)
        self._blocks = np.zeros(shape, np.int64)  # length of each table

    def apply(self, plan: StepPlan) -> None:
        if self._kept:
            self._keep(plan)
        forked = [self._blocks[:, fork.source].copy() for fork in plan.row_forks]  # all reads before any write
        for fork, blocks in zip(plan.row_forks, forked):
            self.count[:, fork.row] += 1
            self._blocks[:, fork.row] = blocks
        for write in plan.row_writes:
            self.count[:, write.row] += 1
            self._blocks[:, write.row] = [len(table) for table in write.tables]
        for row, _ in plan.lengths:
            self.count[:, row] += 1
        if plan.new_blocks:
            rows, groups, index, _ = np.array(plan.new_blocks).T
            replaced = index < self._blocks[groups, rows]
            self.count[groups[replaced], rows[replaced]] += 1
            np.maximum.at(self._blocks, (groups, rows), index + 1)

    def _keep(self, plan: StepPlan) -> None:
        """Applies the changes to the copy of the tables."""
        if plan.row_forks:
            targets, sources = [fork.row for fork in plan.row_forks], [fork.source for fork in plan.row_forks]
            self.tables[:, targets] = self.tables[:, sources]
        for write in plan.row_writes:
            for group, table in enumerate(write.tables):
                self.tables[group, write.row, : len(table)] = table
        if plan.new_blocks:
            rows, groups, index, blocks = np.array(plan.new_blocks).T
            self.tables[groups, rows, index] = blocks


def _runs(words: Tensor) -> Tensor:
    """Views the runs of `copy_words` as [N, 3] int64: all rows together may have more than 2^31 int32 values."""
    return words.view(torch.int64).view(-1, 3)


def upload(words: Words, device: torch.device) -> Tensor:
    """Returns the values on the device, without waiting for it."""
    if device.type == "cpu":
        return torch.from_numpy(words)
    sent = torch.empty(words.shape, dtype=torch.int32, device=device)
    send(words, sent)
    return sent


def _head(write: RowWrite) -> Words:
    head = np.zeros(HEAD, np.int32)
    head[NUM_TOKENS], head[NUM_PROMPT] = len(write.token_ids), write.num_prompt
    head.view(np.float32)[TEMPERATURE] = _temperature(write)
    head[NOISE : NOISE + NOISE_WORDS] = noise_words(write.noise)
    head[OFFSET] = write.position_offset
    return head


def _temperature(write: RowWrite) -> float:
    """The temperature for the step's own sampling: 0, which is greedy, also if the sampler resamples the row."""
    params = write.params
    return 0.0 if params.greedy or redrawn(params, write.bad_words) else params.temperature


def redrawn(params: SamplingParams, bad_words: list[list[int]]) -> bool:
    """Returns whether the sampler resamples a row, so that the ids of its steps are provisional."""
    return params.filtered or params.edits_logits or bool(bad_words) or params.structured_outputs is not None


def noise_words(noise: NoiseKey) -> Words:
    return np.array([*noise.key, noise.stream, noise.high], np.uint32).view(np.int32)
