"""What the kernels of a draw tell each other of a row: KNOWN words of 64 bits, zeros at first.

    TOTAL    the mass of the row that min-p lets pass
    COUNT    how many members there are; more than CAPACITY: not all of them were written
    HIGH     the bits up to which top-k has members
    STATE    of the id
    BEFORE   [PICKS] the mass before each pick
    PICK     [PICKS] tokens as bits and id: each has the best score of those before the one in front of it; -1 where there is none

So the first pick with less mass before it than top-p allows is the id drawn: all that beat it have too much before them.
"""

import triton
import triton.language as tl

PICKS, AT_ONCE = tl.constexpr(8), tl.constexpr(4)  # all, and those weighed in one pass
TOTAL, COUNT, HIGH, STATE, BEFORE, PICK = map(tl.constexpr, (0, 1, 2, 3, 8, 16))
KNOWN = tl.constexpr(24)
SETTLED, RACED = map(tl.constexpr, (1, 2))  # the id is known; it is among the picks, perhaps. 0: it is to be searched


@triton.jit
def fitting(known, goal, weighed):
    """The first of the weighed picks with less than `goal` before it; PICKS if there is none."""
    place = tl.arange(0, PICKS)
    fits = (place < weighed) & (tl.load(known + BEFORE + place) < goal)
    return tl.min(tl.where(fits, place, PICKS), 0)


@triton.jit
def winning_pick(known, goal):
    """The id of the pick that is drawn; -1 if it is none of them."""
    winner = tl.full([], -1, tl.int64)
    if tl.load(known + STATE) == RACED:
        place = fitting(known, goal, PICKS)
        winner = tl.load(known + PICK + place, mask=place < PICKS, other=-1)
    return tl.where(winner < 0, -1, winner & 0xFFFFFFFF).to(tl.int32)
