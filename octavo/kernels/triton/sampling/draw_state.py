"""What the kernels of a draw know of a row: a line of KNOWN words of 64 bits. Floats are kept as their bits.

    K ... REACH   what was asked for, by the names of `survey`, and the largest logit
    HIGH          the bits up to which top-k has members
    LOWEST        the logit down to which any has: what lies infinitely far is none, it cannot win
    SHARE         without top-k, members are those that may score -log(SHARE) or more
    COUNT         how many members there are; more than CAPACITY: not all of them were written
    STATE         of the id
    TOTAL         the mass of the row that min-p lets pass, where top-p asks for it
    PICK          [PICKS] tokens as bits and id: each has the best score of those before the one in front of it; -1 where there is none
    BEFORE        [PICKS] the mass before each of the first AT_ONCE picks

So the first pick with less mass before it than top-p allows is the id drawn: all that beat it have too much before them.
"""

import triton
import triton.language as tl

PICKS = tl.constexpr(8)
AT_ONCE = tl.constexpr(2)  # of those, what all tiles weigh: at a top-p of 0.9, of 199 rows in 200 one of them is drawn
NOISE = tl.constexpr(0)  # [4], and the position behind them
POSITION, K, TOP_P, HEAT, MOST, REACH, HIGH, LOWEST, SHARE, COUNT, STATE, TOTAL = map(tl.constexpr, range(4, 16))
BEFORE, PICK, KNOWN = map(tl.constexpr, (16, 24, 32))
SETTLED, RACED = map(tl.constexpr, (1, 2))  # the id is known; it is among the picks, perhaps. 0: it is to be searched


@triton.jit
def keep(at, number):
    tl.store(at, number.to(tl.int32, bitcast=True).to(tl.int64))


@triton.jit
def number(at):
    return tl.load(at).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def integer(at):
    return tl.load(at).to(tl.int32)


@triton.jit
def fitting(known, goal):
    """The first of the weighed picks with less than `goal` before it; AT_ONCE if there is none."""
    place = tl.arange(0, PICKS)
    fits = (place < AT_ONCE) & (tl.load(known + BEFORE + place) < goal)
    return tl.min(tl.where(fits, place, AT_ONCE), 0)
