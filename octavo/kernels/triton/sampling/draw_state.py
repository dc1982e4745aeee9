"""The state of a row during a draw: KNOWN fields of 64 bits. Floats are stored as their bits.

    K ... REACH   the parameters, by the names in `survey`, and the largest logit
    HIGH          the largest bits of members with top-k
    LOWEST        the smallest logit of any member: infinitely far tokens are excluded, since they cannot win
    SHARE         without top-k, members are those that may score -log(SHARE) or more
    COUNT         the number of members; more than CAPACITY: not all of them were written
    STATE         of the id
    TOTAL         the total probability that passes min-p, if top-p needs it
    PICK          [PICKS] tokens as bits and id: each has the best score among those before the previous pick; -1 if there is none
    BEFORE        [PICKS] the total before each of the first AT_ONCE picks

So the sampled id is the first pick with less probability before it than top-p allows: all better-scoring tokens have too much before them.
"""

import triton
import triton.language as tl

PICKS = tl.constexpr(8)
AT_ONCE = tl.constexpr(2)  # picks whose totals all tiles compute: at a top-p of 0.9, one of them is sampled in 199 of 200 rows
NOISE = tl.constexpr(0)  # [4], followed by the position
POSITION, K, TOP_P, HEAT, MOST, REACH, HIGH, LOWEST, SHARE, COUNT, STATE, TOTAL = map(tl.constexpr, range(4, 16))
BEFORE, PICK, KNOWN = map(tl.constexpr, (16, 24, 32))
SETTLED, RACED = map(tl.constexpr, (1, 2))  # the id is known; it may be among the picks. 0: it must be searched


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
    """The first of the evaluated picks with less than `goal` before it; AT_ONCE if there is none."""
    place = tl.arange(0, PICKS)
    fits = (place < AT_ONCE) & (tl.load(known + BEFORE + place) < goal)
    return tl.min(tl.where(fits, place, AT_ONCE), 0)
