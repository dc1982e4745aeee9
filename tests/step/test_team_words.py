"""Teams of rows that read keys together on a GPU, as words: nobody reads a key twice, or one that is not its own, and none is left out."""

from random import Random

import numpy as np
import pytest

from octavo.attention.spec import TEAM_LEVELS
from octavo.step import team_words as words_of_teams
from octavo.step.shared_keys import FREE, SharedKeys, SharedReads, Words
from octavo.step.team_words import LEVELS, MOST_LEVELS, most_levels, most_teams, team_words

SIZE = 16  # tokens of a block


def drawn(draw: Random) -> tuple[int, Words, SharedKeys]:
    """Rows of 129 keys, their tables, and what they share."""
    rows = draw.randrange(2, 40)
    tables = np.zeros((rows, 8), np.int32)
    for row in range(rows):  # each goes on like a row before it, for a while
        like, count = draw.randrange(row) if row else 0, draw.randrange(9)
        tables[row] = [*tables[like, :count], *(1 + 8 * row + index for index in range(count, 8))]
    every, context = np.arange(rows, dtype=np.int32), np.full(rows, 129, np.int32)
    return rows, tables, SharedReads(tables, SIZE, FREE).nodes(every, context, np.zeros(rows, np.int64))


# promise: shared-reads
def test_every_key_of_every_row_is_read_once_and_what_does_not_fit_is_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words_of_teams, "LEAST_PIECE", 1)
    deepest = 0
    for seed in range(60):
        draw = Random(seed)
        rows, tables, keys = drawn(draw)
        size = draw.choice((2, 3, 16))
        entries, lines = team_words(keys, rows, size, draw.choice((1, 9, 99)))
        read = [[*range(own, 129)] for own, _ in entries.tolist()]
        for begin, end, level, count, *members in lines[1:].tolist():
            assert 0 <= level < MOST_LEVELS and 1 <= count <= size
            for row in members[:count]:
                read[row] += range(begin, end)
                assert np.array_equal(tables[row, begin // SIZE : end // SIZE], tables[members[0], begin // SIZE : end // SIZE])
            deepest = max(deepest, level)
        assert all(sorted(one) == [*range(129)] for one in read) and len(lines) - 1 <= most_teams(rows)
        met = [sum(row in line[4 : 4 + line[3]] for line in lines[1:].tolist()) for row in range(rows)]
        assert met == entries[:, LEVELS].tolist()
    assert deepest == MOST_LEVELS - 1 == TEAM_LEVELS - 1


# promise: deterministic
def test_groups_of_whole_pieces_are_joined_from_the_first_key_on() -> None:
    """A row's levels are one piece each, in their order, but the first, which may have several; its own keys begin with a piece."""
    deepest = longest = 0
    for seed in range(60):
        draw = Random(seed)
        rows, tables, keys = drawn(draw)
        size, piece = draw.choice((2, 3, 16)), draw.choice((16, 32, 48))
        entries, lines = team_words(keys, rows, size, draw.choice((1, 9, 99)), piece)
        read: list[list[tuple[int, int, int]]] = [[] for _ in range(rows)]
        for begin, end, level, count, *members in lines[1:].tolist():
            for row in members[:count]:
                read[row].append((level, begin, end))
                assert np.array_equal(tables[row, begin // SIZE : end // SIZE], tables[members[0], begin // SIZE : end // SIZE])
        for (own, depth), levels in zip(entries.tolist(), map(sorted, read)):
            assert [level for level, _, _ in levels] == [*range(depth)] and depth <= most_levels(rows)
            assert [begin for _, begin, _ in levels] + [own] == [0, *(end for _, _, end in levels)]
            assert own % piece == 0 and all(end - begin == piece for _, begin, end in levels[1:])
            deepest = max(deepest, depth)
            longest = max(longest, *(end - begin for _, begin, end in levels), 0)
        assert len(lines) - 1 <= most_teams(rows)
    assert deepest > 4 and longest > 64
