"""`Pace`: how long a client that finds the queue full is told to wait. It is the number of waiting requests, divided by how fast
requests have ended lately.
"""

from collections import deque

RECENT = 64  # ends that tell the rate
SHORTEST, LONGEST = 1.0, 60.0  # seconds a client is told to wait


class Pace:
    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=RECENT + 1)  # of the last ends, behind the one they are counted from

    def begin(self, now: float) -> None:
        """Starts to count anew: there was nothing to do before."""
        self._times.clear()
        self._times.append(now)

    def end(self, now: float) -> None:
        self._times.append(now)

    def retry_after(self, waiting: int, now: float) -> float:
        """Returns the seconds until as many requests have ended as wait now, or the shortest wait if none has ended yet."""
        if len(self._times) < 2:
            return SHORTEST
        each = (now - self._times[0]) / (len(self._times) - 1)  # until now: what has stalled is slow
        return min(max(waiting * each, SHORTEST), LONGEST)
