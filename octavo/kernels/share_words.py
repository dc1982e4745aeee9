"""The shares of decode attention: its work as lines of int32, on which the kernel that makes them and the one that takes them agree.

    | header: IN_ALL shares there are | a line for each share, those of the longest row first |

A share is a run of tiles of the keys of one row and KV head: all of them, or a part of a row that is longer than a share should be.
Then its parts are of equal size but for the last, and stand in order, each KV_HEADS lines after the one before. A line says:

    TOKEN, ROW   its query, and its place in the batch       PART, PARTS   which part, of how many
    KV_HEAD                                                  ARRIVED       counts while parts are merged; 0 when nobody works
    LOW, HIGH    the keys it reads, of a row that ends at END
    DEPTH        levels of what the row has read in teams (`kernels/team_words.py`): its shares begin behind those keys

ARRIVED, which is counted, stands in the second half of a line, away from what everybody reads.
"""

from typing import NamedTuple

from torch import Tensor

from octavo.kernels.team_words import Teams

TOKEN, ROW, KV_HEAD, LOW, HIGH, END, PART, PARTS, ARRIVED, DEPTH = range(10)
IN_ALL = 0  # of the header
LINE = 16  # words


def most_shares(rows: int, kv_heads: int, programs: int, each: int) -> int:
    """Returns the most shares there can be: `each` for every program that a GPU runs at once, and one more for each row and KV head."""
    return programs * each + rows * kv_heads


def most_parts(programs: int, each: int) -> int:
    """Returns the most shares of rows that are cut. These come first. A long row is cut into less than twice as many as it would fill."""
    return 2 * programs * each


class DecodeShares(NamedTuple):
    """How decode attention is divided in a step."""

    lines: Tensor  # [1 + shares, LINE] int32
    teams: Teams | None = None  # that read some keys before
