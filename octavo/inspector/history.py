"""What an engine keeps for the view, whether anybody watches or not.

    Contents    the tokens of sealed blocks: nothing else knows the content of a cached block
    StepLog     the steps of the last ten minutes, so that a timeline does not begin when it is opened
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from octavo.inspector.frames import StepNumbers
from octavo.policy.block_pool import BlockPool
from octavo.policy.request import Sequence

KEPT_SECONDS = 600
ROWS_A_SECOND = 4  # of older steps
LATEST_STEPS = 600


class StepLog:
    """| older: one row for the steps of each quarter of a second | the latest 600 steps, one row each |

    It has at most 3,000 rows, some 700 KiB, however fast the steps are. A row of several steps has the form of a step's row: the number,
    the end and the gauges of the last one, and sums of what they did.
    """

    def __init__(self, rows: Iterable[StepNumbers] = ()) -> None:
        """`rows`: those of another log."""
        self._older: deque[list[Any]] = deque(maxlen=KEPT_SECONDS * ROWS_A_SECOND)
        self._end_of_last = 0.0  # when the quarter of a second of the last of them ends
        self._latest: deque[StepNumbers] = deque()
        for row in rows:
            self.add(row)

    def add(self, row: StepNumbers) -> None:
        self._latest.append(row)
        if len(self._latest) > LATEST_STEPS:
            self._add_older(self._latest.popleft())

    def rows(self, now: float) -> list[StepNumbers]:
        """Returns the rows of the last ten minutes, the oldest first."""
        first = now - KEPT_SECONDS
        older = [(*row[:2], round(row[2], 3), *row[3:]) for row in self._older if row[1] >= first]
        return [*older, *(row for row in self._latest if row[1] >= first)]

    def _add_older(self, row: StepNumbers) -> None:
        if row[1] >= self._end_of_last:
            self._older.append(list(row))
            self._end_of_last = (int(row[1] * ROWS_A_SECOND) + 1) / ROWS_A_SECOND
            return
        last = self._older[-1]  # changed in place: this is a part of every step
        last[0], last[1] = row[0], row[1]
        last[2] += row[2]
        last[3] += row[3]
        last[4] += row[4]
        last[5:9] = row[5:9]
        last[9] += row[9]
        last[10] += row[10]
        last[11] += row[11]


class Contents:
    """The tokens of sealed blocks, and since when."""

    def __init__(self, pool: BlockPool, spans: list[int], clock: Callable[[], float]) -> None:
        """`spans`: tokens in a block of each cache group."""
        self.spans = spans
        self.since = array("d", [0.0]) * pool.num_blocks  # by the clock
        self._room = max(spans)
        self._ids = array("i", [0]) * (pool.num_blocks * self._room)
        self._key_of = pool.key_of
        self._clock = clock

    def remember(self, seq: Sequence, group: int, first: int, end: int) -> None:
        span, now = self.spans[group], self._clock()
        for index in range(first, end):
            block = seq.tables[group][index]
            if self._key_of[block] is not None:  # otherwise it is a duplicate that stays with its sequence
                start = block * self._room
                self._ids[start : start + span] = seq.token_ids[index * span : (index + 1) * span]
                self.since[block] = now

    def of(self, block: int) -> list[int]:
        """Returns the tokens of a sealed block."""
        key = self._key_of[block]
        assert key is not None
        return self._ids[block * self._room : block * self._room + self.spans[key[0]]].tolist()
