"""The kernels around a forward: updates of the rows, a step's tensors from them, results back into them. One program per scheduled row.

Run-time sizes are never specialised, so that no batch causes a compilation.
"""

import triton
import triton.language as tl
from torch import Tensor

from octavo.step.step_tensors import HEAD, NO_SLOT, NOISE, NOISE_WORDS, NUM_TOKENS, OFFSET, TEMPERATURE, RowLayout, StepTensors

TILE = 1024
AT_TABLE, AT_LENGTH, AT_TEMPERATURE, AT_OFFSET = map(tl.constexpr, (HEAD, NUM_TOKENS, TEMPERATURE, OFFSET))
AT_NOISE, WORDS_OF_NOISE = map(tl.constexpr, (NOISE, NOISE_WORDS))
NOWHERE = tl.constexpr(NO_SLOT)


@triton.jit
def copy_runs(source, target, runs, TILE: tl.constexpr):
    run = runs + tl.program_id(0) * 3
    start, place, count = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    word = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = word < count
    tl.store(target + place + word, tl.load(source + start + word, mask=inside), mask=inside)


@triton.jit(
    do_not_specialize=[
        "num_entries", "num_tokens", "width", "tokens_at", "table_width",
        "positions_stride", "slots_stride", "lengths_stride", "tables_stride",
    ]
)
def prepare_entries(
    words,
    query_start,
    rows,
    starts,
    context_len,
    first_output,
    token_ids,
    cache_index,
    positions,
    slots,
    tables,
    sample_index,
    temperature,
    noise,
    draw_positions,
    num_entries,
    num_tokens,
    width,
    tokens_at,
    table_width,
    positions_stride,
    slots_stride,
    lengths_stride,
    tables_stride,
    BLOCK_SIZE: tl.constexpr,
    AXES: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
):
    entry = tl.program_id(0)
    lane = tl.arange(0, TILE)
    begin = tl.load(query_start + entry)
    if entry == num_entries:  # the tokens after the last scheduled row
        for at in range(begin, num_tokens, TILE):
            inside = at + lane < num_tokens
            nothing = tl.zeros([TILE], tl.int64)
            tl.store(token_ids + at + lane, nothing, mask=inside)
            tl.store(cache_index + at + lane, nothing.to(tl.int32), mask=inside)
            for axis in tl.static_range(AXES):
                tl.store(positions + axis * positions_stride + at + lane, nothing.to(tl.int32), mask=inside)
            for group in tl.static_range(GROUPS):
                tl.store(slots + group * slots_stride + at + lane, nothing + NOWHERE, mask=inside)
        return
    end = tl.load(query_start + entry + 1)
    row = tl.load(rows + entry)
    present = row >= 0
    line = words + tl.maximum(row, 0).to(tl.int64) * width
    first = tl.load(starts + entry)
    offset = tl.load(line + AT_OFFSET)
    for at in range(0, end - begin, TILE):
        inside = (at + lane < end - begin) & present
        index = tl.where(inside, first + at + lane, 0)
        token = tl.load(line + tokens_at + index, mask=inside, other=0)
        place, written = begin + at + lane, at + lane < end - begin
        tl.store(token_ids + place, token.to(tl.int64), mask=written)
        tl.store(cache_index + place, index, mask=written)
        for axis in tl.static_range(AXES):
            tl.store(positions + axis * positions_stride + place, tl.where(inside, index + offset, 0), mask=written)
        for group in tl.static_range(GROUPS):
            table = line + AT_TABLE + group * table_width
            block = tl.load(table + index // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            slot = tl.where(inside, block * BLOCK_SIZE + index % BLOCK_SIZE, NOWHERE)
            tl.store(slots + group * slots_stride + place, slot, mask=written)
    for group in tl.static_range(GROUPS):
        held = tl.cdiv(tl.load(context_len + group * lengths_stride + entry), BLOCK_SIZE)
        for at in range(0, held, TILE):
            index = at + lane
            blocks = tl.load(line + AT_TABLE + group * table_width + index, mask=index < held)
            tl.store(tables + group * tables_stride + entry.to(tl.int64) * table_width + index, blocks, mask=index < held)
    after = tl.where(present, first + end - begin, 0)  # the position after its last token
    warmth = tl.load(line + AT_TEMPERATURE, mask=present, other=0).to(tl.float32, bitcast=True)
    word = tl.arange(0, WORDS_OF_NOISE)
    key = tl.load(line + AT_NOISE + word, mask=present, other=0)
    end_output = tl.load(first_output + entry + 1)
    for output in range(tl.load(first_output + entry), end_output):
        behind = end_output - 1 - output  # outputs of the same row after this one
        tl.store(sample_index + output, tl.maximum(end - 1 - behind, 0).to(tl.int64))
        tl.store(temperature + output, warmth)
        tl.store(draw_positions + output, after - behind)
        tl.store(noise + output * WORDS_OF_NOISE + word, key)


@triton.jit
def finite_tokens(states, flags, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Whether all of a token's values are finite: 1 or 0."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    values = tl.load(states + token * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
    tl.store(flags + token, tl.min((tl.abs(values) < float("inf")).to(tl.int32), 0))  # false for NaN, too


@triton.jit(do_not_specialize=["width", "tokens_at"])
def finish_entries(words, query_start, rows, outputs, first_output, ids, flags, last, result, width, tokens_at, TILE: tl.constexpr):
    entry = tl.program_id(0)
    row = tl.load(rows + entry)
    if row < 0:
        return
    begin, end = tl.load(query_start + entry), tl.load(query_start + entry + 1)
    good = tl.full([TILE], 1, tl.int32)
    lane = tl.arange(0, TILE)
    for at in range(begin, end, TILE):
        good &= tl.load(flags + at + lane, mask=at + lane < end, other=1)
    output, end_output = tl.load(first_output + entry), tl.load(first_output + entry + 1)
    for at in range(output, end_output, TILE):
        good &= tl.load(last + at + lane, mask=at + lane < end_output, other=1)
    finite = tl.min(good, 0) == 1
    sampled = tl.load(outputs + entry)
    for at in range(output, end_output, TILE):
        inside = at + lane < end_output
        token = tl.load(ids + at + lane, mask=inside, other=0).to(tl.int32)
        tl.store(result + at + lane, tl.where(finite, tl.where(sampled > 0, token, 0), -1), mask=inside)
    line = words + row.to(tl.int64) * width
    length = tl.load(line + AT_LENGTH)
    tl.store(line + tokens_at + length, tl.load(ids + output).to(tl.int32), mask=sampled == 1)
    tl.store(line + AT_LENGTH, length + 1, mask=sampled == 1)


@triton.jit(do_not_specialize=["width", "tokens_at"])
def accept_drafts(words, drafted, ids, width, tokens_at):
    drafted += tl.program_id(0) * 4
    position, output, count = tl.load(drafted + 1), tl.load(drafted + 2), tl.load(drafted + 3)
    line = words + tl.load(drafted).to(tl.int64) * width
    at = line + tokens_at + position
    accepted = 0
    for draft in range(count):  # the sum stops growing at the first draft that differs
        same = tl.load(at + draft) == tl.load(ids + output + draft).to(tl.int32)
        accepted += ((accepted == draft) & same).to(tl.int32)
    tl.store(at + accepted, tl.maximum(tl.load(ids + output + accepted).to(tl.int32), 0))
    tl.store(line + AT_LENGTH, position + accepted + 1)


def copy_words(source: Tensor, target: Tensor, runs: Tensor, longest: int) -> None:
    """Copies runs of int32 values from one flat tensor to another; no run has more than `longest`.

    runs: index in source, index in target, count, [N, 3] int64
    """
    copy_runs[(len(runs), triton.cdiv(longest, TILE))](source, target, runs, TILE=TILE, num_warps=4)


def prepare(words: Tensor, layout: RowLayout, block_size: int, step: StepTensors) -> None:
    """Fills the tensors of a step from the rows. words: [rows, width] int32"""
    assert layout.links == (1,) * layout.groups, "the kernel has one size of blocks for all groups"
    entries = len(step.row)
    prepare_entries[(entries + 1,)](
        words, step.query_start, step.row, step.start, step.context_len, step.first_output, step.token_ids, step.cache_index,
        step.positions, step.slots, step.tables, step.sample_index, step.temperature, step.noise, step.draw_positions, entries,
        len(step.token_ids), layout.width, layout.tokens, layout.max_blocks, step.positions.stride(0), step.slots.stride(0),
        step.context_len.stride(0), step.tables.stride(0), BLOCK_SIZE=block_size, AXES=len(step.positions), GROUPS=layout.groups,
        TILE=TILE, num_warps=4,
    )  # fmt: skip


def finish(words: Tensor, layout: RowLayout, step: StepTensors, ids: Tensor, states: Tensor, hidden: Tensor, result: Tensor) -> None:
    """Appends the sampled ids to their rows, except to rows with drafts, whose ids `accept` appends.

    states: of all tokens [T, any size]; hidden: of each output [S, size], which may be the same tensor
    result [S]: the id of each output, 0 if none is sampled, -1 if states of its row are not finite
    """
    flags = _finite(states, words)
    last = flags if states is hidden else _finite(hidden, words)
    finish_entries[(len(step.row),)](
        words, step.query_start, step.row, step.outputs, step.first_output, ids, flags, last, result, layout.width,
        layout.tokens, TILE=TILE // 4, num_warps=1,
    )  # fmt: skip


def accept(words: Tensor, layout: RowLayout, drafted: Tensor, ids: Tensor) -> None:
    """Appends ids to rows that contain their drafts already: a draft is accepted while it is the id sampled before it, then one id more.

    drafted [N, 4] int32: table row, position of the first id, its output, number of drafts. ids: of each output, [S]
    """
    accept_drafts[(len(drafted),)](words, drafted, ids, layout.width, layout.tokens, num_warps=1)


def _finite(states: Tensor, words: Tensor) -> Tensor:
    count, size = states.shape
    flags = words.new_empty(count)
    padded = triton.next_power_of_2(size)
    finite_tokens[(count,)](states, flags, SIZE=size, PADDED=padded, num_warps=min(max(padded // 512, 1), 16))
    return flags
