"""The order in which lines and words are loaded, so that each thread has the data for its part of tl.dot in its registers.

The left side of a dot is distributed like this: of sixteen lines a thread has one and the eighth after it, of eight columns two
neighbours, and four threads share a line. A thread loads sixteen bytes of words (`device_codes.py` lists their columns), and
warps take lines in turn; the functions below only rename registers. Any other order is correct, too, but slower: Triton
then moves numbers between threads through shared memory.
"""

import triton
import triton.language as tl


@triton.jit
def spread(LINES: tl.constexpr, WARPS: tl.constexpr):
    """The lines [threads, turns] to load, in the order in which the warps of a dot read its left side."""
    HELD: tl.constexpr = min(WARPS, LINES // 16)
    low, high = tl.arange(0, 8 * HELD)[:, None], tl.arange(0, LINES // (8 * HELD))[None, :]
    return high // 2 * (16 * HELD) + low // 8 * 16 + high % 2 * 8 + low % 8


@triton.jit
def gathered(words, LINES: tl.constexpr, WARPS: tl.constexpr, BY_FOURS: tl.constexpr):
    """[threads, turns, span] -> [LINES, span]: puts spread lines and words in order without moving data between threads.

    A thread holds two neighbouring columns of a dot's left side, and words are in the order of their columns. For tensor cores
    that are not asynchronous, Triton uses four as soon as spans are joined: then the order of `by_fours` applies.
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
    """Joins one, two or four of [n, span]."""
    N: tl.constexpr = spans[0].shape[0]
    SPAN: tl.constexpr = spans[0].shape[1]
    if len(spans) == 1:
        return spans[0]
    elif len(spans) == 2:
        return tl.reshape(tl.permute(tl.join(spans[0], spans[1]), (0, 2, 1)), [N, 2 * SPAN])
    else:
        both = tl.join(tl.join(spans[0], spans[1]), tl.join(spans[2], spans[3]))
        return tl.reshape(tl.permute(both, (0, 3, 2, 1)), [N, 4 * SPAN])
