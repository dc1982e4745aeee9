"""The split-KV work items of decode attention, as int32 arrays: the layout for the kernel that makes them and the one that reads them.

    | header: IN_ALL, the number of items | one line per item, those of the longest row first |

A work item is a run of tiles of the keys of one row and KV head: all of them, or a part of a row that is longer than an item should be.
In that case its parts have equal size, except the last, and are in order, each KV_HEADS lines after the previous one. The fields are:

    TOKEN, ROW   its query, and its row in the batch         PART, PARTS   which part, of how many
    KV_HEAD                                                  ARRIVED       counter for merging parts; 0 when idle
    LOW, HIGH    the keys it reads, of a row that ends at END
    DEPTH        levels of shared-prefix groups of the row (`step/team_words.py`): its items start after those keys

ARRIVED is modified, so it is in the second half of a line, away from the fields that all programs read.
"""

from typing import NamedTuple

from torch import Tensor

from octavo import layout
from octavo.step.team_words import Teams

TOKEN, ROW, KV_HEAD, LOW, HIGH, END, PART, PARTS, ARRIVED, DEPTH = range(10)
IN_ALL = 0  # field of the header
LINE = layout.SHARE_LINE


def most_shares(rows: int, kv_heads: int, programs: int, each: int) -> int:
    """Returns the maximum number of work items: `each` for every program that a GPU runs at once, and one more per row and KV head."""
    return programs * each + rows * kv_heads


def most_parts(programs: int, each: int) -> int:
    """Returns the maximum number of items of split rows, which come first. A long row has less than twice as many as it would fill."""
    return 2 * programs * each


class DecodeShares(NamedTuple):
    """How decode attention is divided in a step."""

    lines: Tensor  # [1 + shares, LINE] int32
    teams: Teams | None = None  # shared-prefix groups whose keys were read before
