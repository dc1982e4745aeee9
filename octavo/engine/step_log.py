"""`StepLog` keeps the steps of the last ten minutes, whether anybody watches or not, so that a timeline does not begin when it is opened.

    | older: one row for the steps of each quarter of a second | the latest 600 steps, one row each |

It has at most 3,000 rows, some 700 KiB, however fast the steps are. A row of several steps has the form of a step's row: the number, the
end and the gauges of the last one, and sums of what they did.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

from octavo.engine.wire import StepNumbers

KEPT_SECONDS = 600
ROWS_A_SECOND = 4  # of older steps
LATEST_STEPS = 600


class StepLog:
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
