"""The roster: beats become numbers that only grow, shares of a second, and steps by this process's clock."""

import platform

from octavo.worker.rank_process import Beat, Ready
from octavo.worker.roster import Roster, Step


def ready(rank: int, host: str) -> Ready:
    return Ready(rank, 100 + rank, host, [2 * rank, 2 * rank + 1], "cpu", "torch", 3 * (rank // 2), 3, 2**20)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


# promise: ranks-watched
def test_the_share_in_steps_and_the_clock_of_another_host() -> None:
    clock, heard = Clock(), list[tuple[int, list[Step]]]()
    roster = Roster([ready(0, platform.node()), ready(1, "elsewhere"), ready(2, platform.node()), ready(3, platform.node())], 2, clock)
    roster.on_steps = lambda rank, steps: heard.append((rank, steps))
    assert [(one.stage, one.place, one.cores) for one in roster.facts] == [(0, 0, "0-1"), (0, 1, "2-3"), (1, 0, "4-5"), (1, 1, "6-7")]

    clock.now = 1001.0  # rank 0 is in a step that takes 2.5 s, and then rests
    roster.hear(0, Beat([], 1001.0, began=1000.5))
    assert (roster.numbers()[0].steps, roster.numbers()[0].seconds, roster.numbers()[0].share) == (0, 0.5, 0.5)
    clock.now = 1002.0
    roster.hear(0, Beat([], 1002.0, began=1000.5))
    assert (roster.numbers()[0].seconds, roster.numbers()[0].share) == (1.5, 1.0)
    clock.now = 1004.0
    roster.hear(0, Beat([(7, 1000.5, 1003.0)], 1004.0))
    assert (roster.numbers()[0].steps, roster.numbers()[0].seconds, roster.numbers()[0].share) == (1, 2.5, 0.5)
    clock.now = 1004.1
    roster.hear(0, Beat([], 1004.1))
    assert roster.numbers()[0].share == 0.5, "too soon to say"

    roster.hear(1, Beat([(7, 50.0, 50.2)], 54.0))  # its clock began 950 s later; this beat took 0.1 s
    clock.now = 1005.0
    roster.hear(1, Beat([(8, 54.5, 54.7)], 55.0))
    clock.now = 1006.5
    roster.hear(1, Beat([(9, 55.5, 55.7)], 56.0))  # and this one 0.5 s
    starts = {step: round(began, 6) for _, steps in heard for step, began, _ in steps if _ != 0}
    assert [rank for rank, _ in heard] == [0, 1, 1, 1]
    assert starts == {7: 1000.1, 8: 1004.5, 9: 1005.5}
    assert [round(one.age, 6) for one in roster.numbers()] == [2.4, 0.0, 6.5, 6.5]
