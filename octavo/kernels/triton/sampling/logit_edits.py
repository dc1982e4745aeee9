"""Logit edits in two launches: a copy in float32, then the ids and lists of each request, one program per row.

    lay_out       scores = logits, or -inf if only some ids are allowed; marks = 0         every token
    edit_rows     allowed ids -> bans -> bias -> penalties                                 only listed tokens

`marks` [n, V] stores that a token is banned, or an index where it occurs in the row: all its occurrences mark it, and the one that
removes the mark applies the penalty, so that an id is penalised once, by its count. Ids are read on the device, because the host's
copy may be a step behind.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.step import logit_edits as words

TILE, CHUNK = 2048, 1024
AT_ALLOWED, AT_BIAS, AT_ENDS, AT_WORDS, AT_LONGEST = map(
    tl.constexpr, (words.NUM_ALLOWED, words.NUM_BIAS, words.NUM_ENDS, words.NUM_WORDS, words.LONGEST)
)
AT_MIN_TOKENS, AT_REPETITION, AT_FREQUENCY, AT_PRESENCE, HEAD = map(
    tl.constexpr, (words.MIN_TOKENS, words.REPETITION, words.FREQUENCY, words.PRESENCE, words.HEAD)
)
IN_PROMPT = tl.constexpr(1 << 29)  # in a mark; the bits below count the token in the output
BANNED = tl.constexpr(1 << 30)


@triton.jit
def ask_of(lines, place):
    return tl.load(lines + place * 4 + 3).to(tl.pointer_type(tl.int32))


@triton.jit
def load_float(at):
    return tl.load(at).to(tl.float32, bitcast=True)


@triton.jit
def lay_out(logits, lines, scores, marks, VOCAB: tl.constexpr, STRIDE: tl.constexpr, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = token < VOCAB
    score = tl.load(logits + tl.load(lines + place * 4) * STRIDE + token, mask=inside, other=0.0).to(tl.float32)
    some_only = tl.load(ask_of(lines, place) + AT_ALLOWED) > 0
    tl.store(scores + place * VOCAB + token, tl.where(some_only, float("-inf"), score), mask=inside)
    tl.store(marks + place * VOCAB + token, tl.zeros([TILE], tl.int32), mask=inside)


@triton.jit
def completing(starts, ids, word, num_words, longest, output, length, VOCAB: tl.constexpr):
    """The last id of each word, and whether the output ends with all ids before it. word: [CHUNK]"""
    inside = word < num_words
    start = tl.load(starts + word, mask=inside, other=0)
    size = tl.load(starts + word + 1, mask=inside, other=1) - start - 1  # ids before the last
    stands = inside & (size <= length)
    for place in range(longest - 1):
        compared = stands & (place < size)
        wanted = tl.load(ids + start + place, mask=compared, other=0)
        stands = stands & (wanted == tl.load(output + length - size + place, mask=compared, other=0))
    token = tl.load(ids + start + size, mask=inside, other=0)
    return token, stands & (token < VOCAB)


@triton.jit(do_not_specialize=["row_step"], do_not_specialize_on_alignment=["token_ids", "num_prompt"])
def edit_rows(
    logits,
    lines,
    token_ids,
    num_prompt,
    scores,
    marks,
    row_step,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    row = tl.load(lines + place * 4 + 1) * row_step
    ask = ask_of(lines, place)
    logits += tl.load(lines + place * 4) * STRIDE
    scores += place * VOCAB
    marks += place * VOCAB
    ids = token_ids + row
    prompt = tl.load(num_prompt + row)
    length = tl.load(lines + place * 4 + 2).to(tl.int32) - prompt  # of the output
    num_allowed, num_bias = tl.load(ask + AT_ALLOWED), tl.load(ask + AT_BIAS)
    num_ends, num_words = tl.load(ask + AT_ENDS), tl.load(ask + AT_WORDS)
    allowed = ask + HEAD
    bias = allowed + num_allowed
    ends = bias + 2 * num_bias
    starts = ends + num_ends
    held_back = tl.where(length < tl.load(ask + AT_MIN_TOKENS), num_ends, 0)

    for at in range(0, num_allowed, CHUNK):
        inside = at + lane < num_allowed
        token = tl.load(allowed + at + lane, mask=inside, other=VOCAB)
        inside = inside & (token < VOCAB)
        tl.store(scores + token, tl.load(logits + token, mask=inside, other=0.0).to(tl.float32), mask=inside)
    left = num_allowed == 0  # whether any id remains after the bans; if not, they are ignored
    for applied in tl.static_range(2):  # banned ids are marked, then their scores are removed
        for at in range(0, num_words, CHUNK):
            token, banned = completing(
                starts, starts + num_words + 1, at + lane, num_words, tl.load(ask + AT_LONGEST), ids + prompt, length, VOCAB
            )
            tl.store(marks + token, tl.full([CHUNK], 0 if applied else BANNED, tl.int32), mask=banned)
            if applied:
                tl.store(scores + token, tl.full([CHUNK], float("-inf"), tl.float32), mask=banned & left)
        for at in range(0, held_back, CHUNK):
            inside = at + lane < held_back
            token = tl.load(ends + at + lane, mask=inside, other=VOCAB)
            banned = inside & (token < VOCAB)
            tl.store(marks + token, tl.full([CHUNK], 0 if applied else BANNED, tl.int32), mask=banned)
            if applied:
                tl.store(scores + token, tl.full([CHUNK], float("-inf"), tl.float32), mask=banned & left)
        tl.debug_barrier()  # makes writes of other threads visible
        if not applied:
            for at in range(0, num_allowed, CHUNK):
                inside = at + lane < num_allowed
                token = tl.load(allowed + at + lane, mask=inside, other=VOCAB)
                inside = inside & (token < VOCAB)
                mark = tl.load(marks + token, mask=inside, other=BANNED)
                left = left | (tl.sum((mark != BANNED).to(tl.int32), 0) > 0)
            tl.debug_barrier()
    for at in range(0, num_bias, CHUNK):
        inside = at + lane < num_bias
        token = tl.load(bias + at + lane, mask=inside, other=VOCAB)
        inside = inside & (token < VOCAB)
        added = tl.load(bias + num_bias + at + lane, mask=inside, other=0).to(tl.float32, bitcast=True)
        tl.store(scores + token, tl.load(scores + token, mask=inside, other=0.0) + added, mask=inside)
    tl.debug_barrier()

    repetition, frequency, presence = load_float(ask + AT_REPETITION), load_float(ask + AT_FREQUENCY), load_float(ask + AT_PRESENCE)
    if (repetition != 1) | (frequency != 0) | (presence != 0):
        for at in range(0, prompt + length, CHUNK):
            inside = at + lane < prompt + length
            token = tl.load(ids + at + lane, mask=inside, other=0)
            in_prompt = at + lane < prompt
            tl.atomic_or(marks + token, tl.full([CHUNK], IN_PROMPT, tl.int32), mask=inside & in_prompt, sem="relaxed")
            tl.atomic_add(marks + token, tl.full([CHUNK], 1, tl.int32), mask=inside & (at + lane >= prompt), sem="relaxed")
        tl.debug_barrier()
        for at in range(0, prompt + length, CHUNK):
            inside = at + lane < prompt + length
            token = tl.load(ids + at + lane, mask=inside, other=0)
            mark = tl.atomic_xchg(marks + token, tl.zeros([CHUNK], tl.int32), mask=inside, sem="relaxed")
            first = inside & (mark != 0)
            count = mark & (IN_PROMPT - 1)
            score = tl.load(scores + token, mask=first, other=0.0)
            repeated = tl.where(score > 0, tl.div_rn(score, repetition), score * repetition)
            score = tl.where(repetition != 1, repeated, score)
            penalty = frequency * count.to(tl.float32) + presence
            tl.store(scores + token, tl.where(count > 0, score - penalty, score), mask=first)


def edit_logits(
    logits: Tensor,  # [S, V]
    outputs: list[int],  # which rows of logits
    rows: list[int],  # the table row of each
    positions: list[int],  # of the id to sample: only the ids before it count
    asks: list[Tensor],  # the edits of each, packed, int32
    token_ids: Tensor,  # [rows, positions]
    num_prompt: Tensor,  # [rows]
) -> Tensor:
    """Returns the adjusted logits of these outputs, [len(outputs), V] float32."""
    assert logits.stride(1) == 1 and token_ids.stride(1) == 1
    row_step = token_ids.stride(0)
    assert num_prompt.stride(0) == row_step
    count, vocab, device = len(outputs), logits.shape[1], logits.device
    scores = torch.empty(count, vocab, device=device)
    if count == 0:
        return scores
    marks = torch.empty(count, vocab, dtype=torch.int32, device=device)
    numbers = [(*line, ask.data_ptr()) for *line, ask in zip(outputs, rows, positions, asks, strict=True)]
    lines = torch.tensor(numbers, dtype=torch.int64, pin_memory=logits.is_cuda).to(device, non_blocking=True)  # [n, 4]
    shape = {"VOCAB": vocab, "STRIDE": logits.stride(0)}
    lay_out[(count, triton.cdiv(vocab, TILE))](logits, lines, scores, marks, **shape, TILE=TILE, num_warps=4)
    edit_rows[(count,)](
        logits, lines, token_ids, num_prompt, scores, marks, row_step,
        **shape, CHUNK=CHUNK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return scores
