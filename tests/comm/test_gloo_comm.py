"""Ranks that meet through connections: exact sums on every rank, messages between two, and nobody waits for one that does not come."""

import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from octavo.comm.comm import Comm
from octavo.comm.gloo import GlooComm
from octavo.errors import RankLost
from tests.support.rank_processes import HOST, Ranks, joined_shapes

ROUNDS = 150
LIMIT = 1.0  # seconds that ranks wait, where one does not come
LATE = 2.5  # what may be added to that on a busy machine


def job(name: str) -> str:
    return f"tests.support.rank_processes:{name}"


def test_every_rank_gets_the_sum_in_rank_order_and_all_that_was_shown() -> None:
    with Ranks(3, job("exchanges"), {"rounds": ROUNDS, "seed": 3, "most": 3000}, gloo=True) as ranks:
        assert ranks.results() == [{"right": ROUNDS}] * 3


def test_gathers_join_the_last_dimension_and_sums_take_any_strides() -> None:
    with Ranks(2, job("shapes"), gloo=True) as ranks:
        assert ranks.results() == joined_shapes()


def test_messages_arrive_in_order_and_both_ways_at_once() -> None:
    with Ranks(2, job("messages"), gloo=True) as ranks:
        assert ranks.results() == [[*[True] * 6, [11]], [[10]]]


def test_parts_of_a_group_meet_by_themselves() -> None:
    with Ranks(4, job("parts"), gloo=True) as ranks:
        assert ranks.results() == [[0, 2, 101, 1111], [0, 2, 1010, 1111], [1, 2, 101, 1111], [1, 2, 1010, 1111]]


@pytest.mark.parametrize(("name", "least", "words"), [
    ("SIGKILL", 0, "rank 0 lost the others: "),
    ("SIGSTOP", 0.5 * LIMIT, "rank 0 did not meet the others within 1 s"),
])  # fmt: skip
@pytest.mark.timed("how soon a lost rank is reported")
def test_a_rank_that_was_killed_or_stopped_ends_the_waiting_in_time(name: str, least: float, words: str) -> None:
    with Ranks(2, job("until_the_end"), {"late": None}, seconds=LIMIT, gloo=True) as ranks:
        assert [ranks.line(rank) for rank in range(2)] == ["joined"] * 2
        time.sleep(0.2)
        ranks.processes[1].send_signal(getattr(signal, name))
        result = ranks.line(0)
        assert result["error"].startswith(words)
        assert least <= result["seconds"] < LIMIT + LATE


class EndsWhileLookedAt:
    """Work that ends right after a piece of waiting for it was over: well, or with an error."""

    def __init__(self, error: str = "") -> None:
        self._waits, self._error = 0, error

    def is_completed(self) -> bool:
        return self._waits > 0

    def wait(self, _: object) -> None:
        self._waits += 1
        if self._waits == 1 or self._error:
            raise RuntimeError("Operation timed out!" if self._waits == 1 else self._error)


def test_work_that_ends_as_its_waiting_does_is_not_lost() -> None:
    comm = GlooComm.create(HOST, 2, 60)
    comm._finish(EndsWhileLookedAt())
    with pytest.raises(RankLost, match="rank 0 lost the others: closed by peer"):
        comm._finish(EndsWhileLookedAt("closed by peer"))


@pytest.mark.timed("how soon a waiting rank ends")
def test_a_rank_that_nobody_joins_stops_waiting_at_its_limit_or_when_told() -> None:
    comm: Comm = GlooComm.create(HOST, 3, 0.3)
    with pytest.raises(RankLost, match=re.escape("rank 0 did not meet rank 1, 2 within 0.3 s")):
        comm.all_reduce(torch.ones(1))
    told = GlooComm.create(HOST, 2, 60)
    threading.Timer(0.2, told.abort).start()
    started = time.monotonic()
    with pytest.raises(RankLost, match="rank 0 gave up"):
        told.all_reduce(torch.ones(1))
    assert time.monotonic() - started < LATE


def test_an_address_where_nobody_listens_is_named() -> None:
    with pytest.raises(RankLost, match=re.escape(f"rank 1 on {HOST} does not reach rank 0 at {HOST}:1")):
        GlooComm.join(f"{HOST}:1", HOST, 1, 2, 0.5)


def test_it_listens_at_the_given_address_alone() -> None:
    comm = GlooComm.create(HOST, 2, 1)
    port = int(comm.address.rpartition(":")[2])
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    listening = [where for _, where, _, state, *_ in lines if state == "0A"]
    assert [where for where in listening if where.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


def test_ids_are_not_added() -> None:
    with pytest.raises(ValueError, match=re.escape("not torch.int64")):
        GlooComm.create(HOST, 1, 1).all_reduce(torch.ones(3, dtype=torch.int64))


def test_how_long_a_sum_takes() -> None:
    with Ranks(2, job("speed"), {"counts": [576, 4096], "times": 300}, gloo=True) as ranks:
        medians = ranks.results()[0]
    print("microseconds of a sum over two ranks, by floats:", medians)
    assert list(medians) == ["576", "4096"]
