"""Cascade (shared-prefix) groups of a step on a GPU, as int32 arrays (`step/shared_keys.py` has the tree of shared prefixes).

    nodes   rows 0 2 3 1, keys 0 to 32          groups of 2  keys 0 to 32: rows 0 2     level 0
            rows 0 2, keys 32 to 64                          keys 0 to 32: rows 3 1     level 0
                                                             keys 32 to 64: rows 0 2    level 1

A group ("team") has as many rows of a node as a program has queries, and all keys of the node, or a piece of them if there would be
too few programs. The result of a row in each of its groups is a level. The row alone reads its keys from OWN on.

    entries   OWN, LEVELS of each scheduled row
    lines     | header: the number of groups | one line each: BEGIN, END, LEVEL, COUNT, then its rows |

The number of groups and levels in a step is limited. Keys that do not fit are read by each row alone.

With a `piece` (`--deterministic`) groups begin and end at its multiples, and only those that begin with a row's first key have several.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from torch import Tensor

from octavo import layout
from octavo.step.shared_keys import SharedKeys, Words

OWN, LEVELS = range(2)  # fields of a scheduled row
ENTRY = layout.TEAM_ENTRY
BEGIN, END, LEVEL, COUNT, ROWS = range(5)  # fields of a group; its rows start at ROWS
LINE = layout.TEAM_LINE
MOST_ROWS = 64  # in a group
MOST_LEVELS = layout.TEAM_LEVELS
LEAST_PIECE = 256  # keys
LEVELS_IN_ALL, MOST_PIECES = 2048, 64  # see `most_levels`


class Teams(NamedTuple):
    """The shared-prefix groups of a step on a device, at fixed addresses."""

    entries: Tensor  # [R, ENTRY] int32
    lines: Tensor  # [1 + teams, LINE] int32


def most_teams(entries: int) -> int:
    """Returns the maximum number of groups in a step."""
    return max(entries, 16)


def most_levels(entries: int) -> int:
    """Returns the maximum number of levels of a row, if a level is one piece of keys: many while there are few rows."""
    return min(max(LEVELS_IN_ALL // entries, MOST_LEVELS), MOST_PIECES)


def team_words(keys: SharedKeys, entries: int, rows: int, wanted: int = 1, piece: int = 0) -> tuple[Words, Words]:
    """Returns the fields of the scheduled rows, and the lines of the groups.

    `rows`: the most in a group. `wanted`: groups that fill a GPU; nodes are split into pieces if there are fewer
    `piece`: keys of a piece, if these are the same for every step
    """
    of_entries, lines = np.zeros((entries, ENTRY), np.int32), np.zeros((1 + most_teams(entries), LINE), np.int32)
    levels = most_levels(entries) if piece else MOST_LEVELS
    most_pieces = _most_pieces(keys, rows, wanted, levels)
    if piece and most_pieces > 1:  # the first group reads all pieces that have no level of their own
        most_pieces = _most_pieces(keys, rows, most_teams(entries) * levels, levels)
    count = 0
    for first, size, begin, end in keys.nodes.tolist():
        places = keys.rows[first : first + size]
        alone, level = of_entries[places[0]].tolist()
        if piece:
            room = min((most_teams(entries) - count) // -(-size // rows), levels - level)
            cuts = _whole_pieces(begin // piece, end // piece, most_pieces, room, piece)
        else:
            cuts = _equal_pieces(begin, end, max(min(most_pieces, (end - begin) // LEAST_PIECE), 1))
        pieces = len(cuts) - 1
        teams = -(-size // rows) * pieces
        if alone != cuts[0] or not teams or level + pieces > levels or count + teams > most_teams(entries):
            continue  # its rows read these keys alone, and all that follow
        of_entries[places] = cuts[-1], level + pieces
        for number, (low, high) in enumerate(pairwise(cuts)):
            for start in range(0, size, rows):
                count += 1
                team = places[start : start + rows]
                lines[count, :ROWS] = low, high, level + number, len(team)
                lines[count, ROWS : ROWS + len(team)] = team
    lines[0, 0] = count
    return of_entries, lines[: 1 + count]


def _equal_pieces(begin: int, end: int, pieces: int) -> list[int]:
    return [begin + (end - begin) * piece // pieces for piece in range(pieces + 1)]


def _whole_pieces(begin: int, end: int, most: int, room: int, piece: int) -> list[int]:
    """Returns where groups begin and end, for pieces [begin, end) of `piece` keys.

    `most`, `room`: groups that may split one node. At a row's first key the first group joins the pieces that are too many; elsewhere
    a group has one piece, and the rest is read by each row alone.
    """
    groups = max(min(end - begin, room), 0)
    if begin == 0:
        groups = min(groups, most)
        return [0, *((end - after) * piece for after in reversed(range(groups)))]
    return [(begin + number) * piece for number in range(groups + 1)]


def _most_pieces(keys: SharedKeys, rows: int, wanted: int, levels: int) -> int:
    """Returns how many pieces a node may be split into: enough for `wanted` groups, limited by the levels of the row in most nodes."""
    if not len(keys.nodes):
        return 1
    teams: int = sum(-(-size // rows) for _, size, _, _ in keys.nodes.tolist())
    return max(min(-(-wanted // teams), levels // int(np.bincount(keys.rows).max())), 1)
