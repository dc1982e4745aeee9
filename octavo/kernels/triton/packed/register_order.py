"""The order in which lines and words are loaded, so that each thread has in its registers what the matrix units want of it.

A dot's left side lies in registers like this: of sixteen lines a thread has one and the eighth after it, of eight columns two
neighbours, and four threads share a line. Words come in sixteen bytes for each thread (`device_codes.py` says of which columns),
lines in the turn of warps; what follows only gives registers other names. Any other order is right too, and slower: Triton
then moves numbers between threads by way of shared memory.
"""

import triton
import triton.language as tl


@triton.jit
def spread(LINES: tl.constexpr, WARPS: tl.constexpr):
    """Numbers of lines [threads, turns], to load them in the order in which the warps of a dot take its left side."""
    HELD: tl.constexpr = min(WARPS, LINES // 16)
    low, high = tl.arange(0, 8 * HELD)[:, None], tl.arange(0, LINES // (8 * HELD))[None, :]
    return high // 2 * (16 * HELD) + low // 8 * 16 + high % 2 * 8 + low % 8


@triton.jit
def gathered(words, LINES: tl.constexpr, WARPS: tl.constexpr, BY_FOURS: tl.constexpr):
    """[threads, turns, span] -> [LINES, span]: lines that were spread, and words, so that nothing leaves its thread.

    A thread holds two neighbouring columns of a dot's left side, and words come to stand as their columns do. Of the matrix
    units that are not asynchronous Triton has it hold four as soon as spans stand side by side: then as `by_fours` has them.
    """
    HELD: tl.constexpr = min(WARPS, LINES // 16)
    SPAN: tl.constexpr = words.shape[2]
    apart = tl.reshape(words, [HELD, 8, LINES // (16 * HELD), 2, 4, 2, SPAN // 16, 2])
    if BY_FOURS:
        return tl.reshape(tl.permute(apart, (2, 0, 3, 1, 5, 4, 6, 7)), [LINES, SPAN])
    else:
        return tl.reshape(tl.permute(apart, (2, 0, 3, 1, 6, 5, 4, 7)), [LINES, SPAN])


@triton.jit
def by_fours(x):
    """[n, columns]; of 32, 0 1 16 17, 2 3 18 19, ... 6 7 22 23, 8 9 24 25, ..."""
    apart = tl.reshape(x, [x.shape[0], x.shape[1] // 32, 2, 2, 4, 2])
    return tl.reshape(tl.permute(apart, (0, 1, 3, 4, 2, 5)), [x.shape[0], x.shape[1]])


@triton.jit
def side_by_side(spans):
    """One, two or four of [n, span] as one."""
    N: tl.constexpr = spans[0].shape[0]
    SPAN: tl.constexpr = spans[0].shape[1]
    if len(spans) == 1:
        return spans[0]
    elif len(spans) == 2:
        return tl.reshape(tl.permute(tl.join(spans[0], spans[1]), (0, 2, 1)), [N, 2 * SPAN])
    else:
        both = tl.join(tl.join(spans[0], spans[1]), tl.join(spans[2], spans[3]))
        return tl.reshape(tl.permute(both, (0, 3, 2, 1)), [N, 4 * SPAN])
