"""The kernels around a forward: updates of the rows, a step's tensors from them, results back into them. One program per scheduled row.

Run-time sizes are never specialised, so that no batch causes a compilation.
"""

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.row_words import HEAD, NOISE, NOISE_WORDS, NUM_TOKENS, TEMPERATURE, RowLayout
from octavo.kernels.step_tensors import NO_SLOT, StepTensors

TILE = 1024
AT_TABLE, AT_LENGTH, AT_TEMPERATURE, AT_NOISE, WORDS_OF_NOISE = map(tl.constexpr, (HEAD, NUM_TOKENS, TEMPERATURE, NOISE, NOISE_WORDS))
NOWHERE = tl.constexpr(NO_SLOT)


@triton.jit
def copy_runs(source, target, runs, TILE: tl.constexpr):
    run = runs + tl.program_id(0) * 3
    start, place, count = tl.load(run), tl.load(run + 1), tl.load(run + 2)
    word = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = word < count
    tl.store(target + place + word, tl.load(source + start + word, mask=inside), mask=inside)


@triton.jit(
    do_not_specialize=["num_entries", "num_tokens", "width", "tokens_at", "table_width", "slots_stride", "lengths_stride", "tables_stride"]
)
def prepare_entries(
    words,
    query_start,
    rows,
    starts,
    context_len,
    token_ids,
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
    slots_stride,
    lengths_stride,
    tables_stride,
    BLOCK_SIZE: tl.constexpr,
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
            tl.store(positions + at + lane, nothing, mask=inside)
            for group in tl.static_range(GROUPS):
                tl.store(slots + group * slots_stride + at + lane, nothing + NOWHERE, mask=inside)
        return
    end = tl.load(query_start + entry + 1)
    row = tl.load(rows + entry)
    present = row >= 0
    line = words + tl.maximum(row, 0).to(tl.int64) * width
    first = tl.load(starts + entry)
    for at in range(0, end - begin, TILE):
        inside = (at + lane < end - begin) & present
        position = tl.where(inside, first + at + lane, 0)
        token = tl.load(line + tokens_at + position, mask=inside, other=0)
        place, written = begin + at + lane, at + lane < end - begin
        tl.store(token_ids + place, token.to(tl.int64), mask=written)
        tl.store(positions + place, position.to(tl.int64), mask=written)
        for group in tl.static_range(GROUPS):
            table = line + AT_TABLE + group * table_width
            block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            slot = tl.where(inside, block * BLOCK_SIZE + position % BLOCK_SIZE, NOWHERE)
            tl.store(slots + group * slots_stride + place, slot, mask=written)
    for group in tl.static_range(GROUPS):
        held = tl.cdiv(tl.load(context_len + group * lengths_stride + entry), BLOCK_SIZE)
        for at in range(0, held, TILE):
            index = at + lane
            blocks = tl.load(line + AT_TABLE + group * table_width + index, mask=index < held)
            tl.store(tables + group * tables_stride + entry.to(tl.int64) * table_width + index, blocks, mask=index < held)
    tl.store(sample_index + entry, tl.maximum(end - 1, 0).to(tl.int64))
    warmth = tl.load(line + AT_TEMPERATURE, mask=present, other=0).to(tl.float32, bitcast=True)
    tl.store(temperature + entry, warmth)
    tl.store(draw_positions + entry, tl.load(line + AT_LENGTH, mask=present, other=0))
    word = tl.arange(0, WORDS_OF_NOISE)
    tl.store(noise + entry * WORDS_OF_NOISE + word, tl.load(line + AT_NOISE + word, mask=present, other=0))


@triton.jit
def finite_tokens(states, flags, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Whether all of a token's values are finite: 1 or 0."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    values = tl.load(states + token * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
    tl.store(flags + token, tl.min((tl.abs(values) < float("inf")).to(tl.int32), 0))  # false for NaN, too


@triton.jit(do_not_specialize=["width", "tokens_at"])
def finish_entries(words, query_start, rows, samples, ids, flags, last, result, width, tokens_at, TILE: tl.constexpr):
    entry = tl.program_id(0)
    row = tl.load(rows + entry)
    if row < 0:
        return
    begin, end = tl.load(query_start + entry), tl.load(query_start + entry + 1)
    good = tl.full([TILE], 1, tl.int32) * tl.load(last + entry)
    lane = tl.arange(0, TILE)
    for at in range(begin, end, TILE):
        good &= tl.load(flags + at + lane, mask=at + lane < end, other=1)
    token = tl.load(ids + entry).to(tl.int32)
    sampled = tl.load(samples + entry) != 0
    line = words + row.to(tl.int64) * width
    length = tl.load(line + AT_LENGTH)
    tl.store(line + tokens_at + length, token, mask=sampled)
    tl.store(line + AT_LENGTH, length + 1, mask=sampled)
    tl.store(result + entry, tl.where(tl.min(good, 0) == 1, tl.where(sampled, token, 0), -1))


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
        words, step.query_start, step.row, step.start, step.context_len, step.token_ids, step.positions, step.slots, step.tables,
        step.sample_index, step.temperature, step.noise, step.draw_positions, entries, len(step.token_ids), layout.width, layout.tokens,
        layout.max_blocks, step.slots.stride(0), step.context_len.stride(0), step.tables.stride(0), BLOCK_SIZE=block_size,
        GROUPS=layout.groups, TILE=TILE, num_warps=4,
    )  # fmt: skip


def finish(words: Tensor, layout: RowLayout, step: StepTensors, ids: Tensor, states: Tensor, hidden: Tensor, result: Tensor) -> None:
    """Appends the sampled ids to their rows. result [entries]: the id, 0 if none was sampled, -1 if states are not finite.

    states: of all tokens [T, any size]; hidden: of the last token of each scheduled row [entries, size], which may be the same tensor
    """
    flags = _finite(states, words)
    last = flags if states is hidden else _finite(hidden, words)
    finish_entries[(len(step.row),)](
        words, step.query_start, step.row, step.samples, ids, flags, last, result, layout.width, layout.tokens, TILE=TILE // 4, num_warps=1
    )


def _finite(states: Tensor, words: Tensor) -> Tensor:
    count, size = states.shape
    flags = words.new_empty(count)
    padded = triton.next_power_of_2(size)
    finite_tokens[(count,)](states, flags, SIZE=size, PADDED=padded, num_warps=min(max(padded // 512, 1), 16))
    return flags
