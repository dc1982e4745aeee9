"""The shares of decode attention: its work as lines of int32, on which the kernels that make, follow and merge them agree.

    | header: tiles of a share, tiles in all | a line for each program | a line for each row with one query, in order |

All tiles of keys stand in one list, by row, then KV head, then position; program p takes a share of it, from tile p * share on. Its
line is a copy of the row's in which that begins, so that nobody has to look for it. A line says:

    START   the row's first tile in the list      TOKEN, ROW   its query, and its place in the batch       NEXT   the line after it
    TILES   of one KV head, at least one          FIRST, END   the keys it sees
"""

START, TILES, TOKEN, ROW, FIRST, END, NEXT = range(7)
LINE = 8  # words
PER_SHARE, IN_ALL = 0, 1  # words of the header


def num_lines(programs: int, rows: int) -> int:
    """The last line is never written: the last row's NEXT may be read, and not used."""
    return 1 + programs + rows + 1
