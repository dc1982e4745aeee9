"""The references of the kernels around a forward: updates of the rows, the tensors of a step from them, results back into them.

They use numpy, which is faster than torch for the small arrays of a decode step.
"""

from math import isfinite
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.step.step_tensors import HEAD, NO_SLOT, NOISE, NOISE_WORDS, NUM_TOKENS, OFFSET, TEMPERATURE, RowLayout, StepTensors

Words = NDArray[np.int32]
Arrays = dict[str, NDArray[Any]]


def copy_words(source: Tensor, target: Tensor, runs: Tensor, longest: int) -> None:
    """Copies runs of int32 values from one flat tensor to another; no run has more than `longest`.

    runs: index in source, index in target, count, [N, 3] int64
    """
    words, places = source.numpy(), target.numpy()
    for start, place, count in runs.tolist():
        places[place : place + count] = words[start : start + count]


def prepare(words: Tensor, layout: RowLayout, block_size: int, step: StepTensors) -> None:
    """Fills the tensors of a step from the rows. words: [rows, width] int32

    A table is null after a row's last block, up to the longest row of the step.
    """
    lines, out = words.numpy(), step.on_host()
    rows, starts, firsts = out["row"], out["query_start"], out["start"]
    counts, total, padded = starts[1:] - starts[:-1], int(starts[-1]), rows[-1] < 0
    if total == len(rows) and counts.max() == 1:  # one token each, as in a decode step
        token_rows, index = rows, firsts.astype(np.int64)
    else:
        token_rows = rows.repeat(counts)
        index = np.arange(total) + (firsts - starts[:-1]).repeat(counts)
    after = firsts + counts  # the position after the last token of each scheduled row
    if padded:  # padding reads row 0, and writes nothing
        index[token_rows < 0] = 0
        after[rows < 0] = 0
    _fill(out["cache_index"], index, token_rows)
    for axis in out["positions"]:
        _fill(axis, index + lines[token_rows, OFFSET], token_rows)
    _fill(out["token_ids"], lines[token_rows, layout.tokens + index], token_rows)
    for group, (links, context) in enumerate(zip(layout.links, out["context_len"])):
        table, span = layout.table(group), links * block_size
        slots = lines[token_rows, table + index // span].astype(np.int64) * span + index % span
        _fill(out["slots"][group], slots, token_rows, NO_SLOT)
        held = -(-context // span)
        longest = int(held.max())
        tables = lines[rows, table : table + longest]
        out["tables"][group][:, :longest] = np.where(np.arange(longest) < held[:, None], tables, 0)
    _fill_outputs(out, lines, rows, starts[1:], after)


def _fill_outputs(out: Arrays, lines: Words, rows: Words, ends: Words, after: Words) -> None:
    """Fills what a step needs of each output. ends, after: the token and the position after the last ones of each scheduled row"""
    if out["outputs"].max() > 1:  # some rows have drafts
        counts = np.diff(out["first_output"])
        last = out["first_output"][1:].repeat(counts) - 1
        behind = last - np.arange(len(last))  # outputs of the same row after this one
        rows, ends, after = rows.repeat(counts), ends.repeat(counts) - behind, after.repeat(counts) - behind
    out["sample_index"][:] = np.maximum(ends - 1, 0)
    out["draw_positions"][:] = after
    heads = lines[rows, :HEAD]
    if rows[-1] < 0:
        heads[rows < 0] = 0
    out["temperature"][:] = heads[:, TEMPERATURE].view(np.float32)
    out["noise"][:] = heads[:, NOISE : NOISE + NOISE_WORDS]


def _fill(numbers: NDArray[Any], values: NDArray[np.int64], rows: NDArray[np.int32], padding: int = 0) -> None:
    """Writes the values of a step's tokens, and another one for padding and after the last scheduled row."""
    numbers[: len(rows)] = values if rows[-1] >= 0 else np.where(rows < 0, padding, values)
    numbers[len(rows) :] = padding


def finish(words: Tensor, layout: RowLayout, step: StepTensors, ids: Tensor, states: Tensor, hidden: Tensor, result: Tensor) -> None:
    """Appends the sampled ids to their rows, except to rows with drafts, whose ids `accept` appends.

    states: of all tokens [T, any size]; hidden: of each output [S, size], which may be the same tensor
    result [S]: the id of each output, 0 if none is sampled, -1 if states of its row are not finite
    """
    lines, host, found = words.numpy(), step.on_host(), result.numpy()
    rows, first, tokens = host["row"], host["first_output"], ids.numpy()
    (alone,) = (host["outputs"] == 1).nonzero()  # padding is never sampled from
    places, outputs = rows[alone], first[alone]
    lengths = lines[places, NUM_TOKENS]
    found[:] = 0
    found[outputs] = lines[places, layout.tokens + lengths] = tokens[outputs]
    lines[places, NUM_TOKENS] = lengths + 1
    for entry in (host["outputs"] > 1).nonzero()[0].tolist():
        found[first[entry] : first[entry + 1]] = tokens[first[entry] : first[entry + 1]]
    for entry in _bad_entries(states, hidden, host["query_start"], first):
        if entry < len(rows) and rows[entry] >= 0:
            found[first[entry] : first[entry + 1]] = -1


def accept(words: Tensor, layout: RowLayout, drafted: Tensor, ids: Tensor) -> None:
    """Appends ids to rows that contain their drafts already: a draft is accepted while it is the id sampled before it, then one id more.

    drafted [N, 4] int32: table row, position of the first id, its output, number of drafts. ids: of each output, [S]
    """
    lines, tokens = words.numpy(), ids.numpy()
    for row, position, output, count in drafted.tolist():
        line = lines[row, layout.tokens + position :]
        accepted = int((line[:count] == tokens[output : output + count]).cumprod().sum())
        line[accepted] = max(tokens[output + accepted], 0)
        lines[row, NUM_TOKENS] = position + accepted + 1


def _bad_entries(states: Tensor, hidden: Tensor, starts: Words, first_output: Words) -> set[int]:
    """Returns the scheduled rows with values that are not finite. Tokens after the last row count as one more."""
    bad = set() if hidden is states else _owners(_not_finite(hidden), first_output)
    return bad | _owners(_not_finite(states), starts)


def _owners(places: NDArray[np.int64], starts: Words) -> set[int]:
    return set((np.searchsorted(starts, places, side="right") - 1).tolist()) if len(places) else set()


def _not_finite(states: Tensor) -> NDArray[np.int64]:
    """Returns the indices of the states that contain a number that is not finite."""
    # The sum is nearly always finite. A dot product would be faster, but numpy's BLAS threads occupy a core for some time after it.
    with np.errstate(over="ignore", invalid="ignore"):  # a sum that is not finite is examined below
        total = np.add.reduce(states.numpy(), axis=None) if states.dtype == torch.float32 else states.sum()
    if isfinite(total):
        return np.zeros(0, np.int64)
    return np.flatnonzero(~states.isfinite().all(dim=1).numpy())
