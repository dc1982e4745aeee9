"""`Pace`: the `Retry-After` of a full queue: the number of waiting requests divided by the rate at which requests ended recently."""

from collections import deque

RECENT = 64  # ends from which the rate is computed
SHORTEST, LONGEST = 1.0, 60.0  # bounds of `Retry-After` in seconds


class Pace:
    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=RECENT + 1)  # the recent ends, after the one from which time is counted

    def begin(self, now: float) -> None:
        """Starts to count again, because the engine was idle before."""
        self._times.clear()
        self._times.append(now)

    def end(self, now: float) -> None:
        self._times.append(now)

    def retry_after(self, waiting: int, now: float) -> float:
        """Returns the seconds until as many requests have ended as wait now, or the shortest wait if none has ended yet."""
        if len(self._times) < 2:
            return SHORTEST
        each = (now - self._times[0]) / (len(self._times) - 1)  # up to now, so that a stall counts as slow
        return min(max(waiting * each, SHORTEST), LONGEST)
