"""The twins of the kernels around a forward: changes into the rows, a step's tensors out of them, results back into them."""

import torch
from torch import Tensor

from octavo.kernels.row_words import HEAD, NOISE, NOISE_WORDS, NUM_TOKENS, TEMPERATURE, RowLayout
from octavo.kernels.step_tensors import StepTensors


def copy_words(source: Tensor, target: Tensor, runs: Tensor, longest: int) -> None:
    """Runs of words from one flat tensor to another; no run has more than `longest`.

    runs: place in source, place in target, count, [N, 3] int64
    """
    for start, place, count in runs.tolist():
        target[place : place + count] = source[start : start + count].clone()


def prepare(words: Tensor, layout: RowLayout, block_size: int, step: StepTensors) -> None:
    """Fills the tensors of a step out of the rows. words: [rows, width] int32"""
    starts, rows, firsts = step.query_start.tolist(), step.row.tolist(), step.start.tolist()
    for part in (step.token_ids, step.positions, step.slots, step.context_len, step.sample_index, step.temperature, step.noise):
        part.zero_()
    step.draw_positions.zero_()
    for entry, (row, first) in enumerate(zip(rows, firsts, strict=True)):
        begin, end = starts[entry : entry + 2]
        step.sample_index[entry] = max(end - 1, 0)
        if row < 0:  # padding: nothing is read, and what is written goes to the null block
            continue
        line, context = words[row], first + end - begin
        positions = torch.arange(first, context, device=words.device)
        table = line[HEAD : HEAD + -(-context // block_size)].long()
        step.token_ids[begin:end] = line[layout.tokens + first : layout.tokens + context]
        step.positions[begin:end] = positions
        step.slots[begin:end] = table[positions // block_size] * block_size + positions % block_size
        step.context_len[entry] = context
        step.tables[entry, : len(table)] = table
        step.temperature[entry] = line[TEMPERATURE].view(torch.float32)
        step.noise[entry] = line[NOISE : NOISE + NOISE_WORDS]
        step.draw_positions[entry] = line[NUM_TOKENS]


def finish(words: Tensor, layout: RowLayout, step: StepTensors, ids: Tensor, states: Tensor, hidden: Tensor, result: Tensor) -> None:
    """Appends the sampled ids to their rows. result [entries]: the id, 0 where none was sampled, -1 where states are not finite.

    states: of all tokens [T, any size]; hidden: of the last token of each entry [entries, size], which may be the same tensor
    """
    finite, last = states.isfinite().all(dim=1), hidden.isfinite().all(dim=1)  # [T], [P]
    starts, rows, samples = step.query_start.tolist(), step.row.tolist(), step.samples.tolist()
    for entry, (row, sampled) in enumerate(zip(rows, samples, strict=True)):
        if row < 0:
            continue
        result[entry] = ids[entry] if sampled else 0
        if sampled:
            length = int(words[row, NUM_TOKENS])
            words[row, layout.tokens + length] = ids[entry]
            words[row, NUM_TOKENS] = length + 1
        if not bool(finite[starts[entry] : starts[entry + 1]].all() & last[entry]):
            result[entry] = -1
