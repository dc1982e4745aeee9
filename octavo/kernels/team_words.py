"""Teams: which rows of a step read keys together on a GPU, as words of int32 (`kernels/shared_keys.py` has the tree of what rows share).

    nodes   rows 0 2 3 1, keys 0 to 32          teams of 2   keys 0 to 32: rows 0 2     level 0
            rows 0 2, keys 32 to 64                          keys 0 to 32: rows 3 1     level 0
                                                             keys 32 to 64: rows 0 2    level 1

A team has as many rows of a node as a program has queries for, and all keys of the node, or a piece of them where there would be too few
programs. What a row gets of each of its teams is a level. Keys from OWN on it reads alone.

    entries   OWN, LEVELS of each entry of the step
    lines     | header: how many teams there are | a line for each: BEGIN, END, LEVEL, COUNT, then the entries of its rows |

A step has room for so many teams and levels. What does not fit is read by each row alone.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from octavo.kernels.shared_keys import SharedKeys, Words

OWN, LEVELS = range(2)  # of an entry
ENTRY = 2  # words
BEGIN, END, LEVEL, COUNT, ROWS = range(5)  # of a team; the entries of its rows begin at ROWS
LINE = 128  # words
MOST_ROWS = 64  # of a team
MOST_LEVELS = 8
LEAST_PIECE = 256  # keys


class Teams(NamedTuple):
    """The teams of a step on a device, at fixed addresses."""

    entries: Tensor  # [R, ENTRY] int32
    lines: Tensor  # [1 + teams, LINE] int32


def most_teams(entries: int) -> int:
    """Returns how many teams a step has room for."""
    return max(entries, 16)


def team_words(keys: SharedKeys, entries: int, rows: int, wanted: int = 1) -> tuple[Words, Words]:
    """Returns the words of the entries, and the lines of the teams.

    `rows`: of a team, at most. `wanted`: teams that fill a GPU, so that nodes are cut into pieces if there are fewer
    """
    of_entries, lines = np.zeros((entries, ENTRY), np.int32), np.zeros((1 + most_teams(entries), LINE), np.int32)
    most_pieces = _most_pieces(keys, rows, wanted)
    count = 0
    for first, size, begin, end in keys.nodes.tolist():
        places = keys.rows[first : first + size]
        alone, level = of_entries[places[0]].tolist()
        pieces = max(min(most_pieces, (end - begin) // LEAST_PIECE), 1)
        teams = -(-size // rows) * pieces
        if alone != begin or level + pieces > MOST_LEVELS or count + teams > most_teams(entries):
            continue  # its rows read these keys alone, and then all that follow
        of_entries[places] = end, level + pieces
        cuts = [begin + (end - begin) * piece // pieces for piece in range(pieces + 1)]
        for piece in range(pieces):
            for start in range(0, size, rows):
                count += 1
                team = places[start : start + rows]
                lines[count, :ROWS] = cuts[piece], cuts[piece + 1], level + piece, len(team)
                lines[count, ROWS : ROWS + len(team)] = team
    lines[0, 0] = count
    return of_entries, lines[: 1 + count]


def _most_pieces(keys: SharedKeys, rows: int, wanted: int) -> int:
    """Returns into how many pieces a node may be cut: as many as make `wanted` teams, if the levels of the row in most nodes suffice."""
    if not len(keys.nodes):
        return 1
    teams: int = sum(-(-size // rows) for _, size, _, _ in keys.nodes.tolist())
    return max(min(-(-wanted // teams), MOST_LEVELS // int(np.bincount(keys.rows).max())), 1)
