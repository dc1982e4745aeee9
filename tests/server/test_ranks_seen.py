"""What an operator sees of a model that is split: its ranks in the log, in the metrics, in the view and in the trace of a real server."""

import asyncio
import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.inspector.frames import rank_lines
from octavo.messages import RankFacts
from tests.server.test_metrics import samples_of
from tests.server.test_view import Watching
from tests.support.http_server import wait_for
from tests.support.open_streams import text, while_streaming
from tests.support.server_process import ServerProcess
from tests.support.soaked import rarely
from tests.support.story_folder import story_folder

LIMITS = ("--max-model-len", "256", "--block-size", "16", "--kv-cache-memory-bytes", "8m", "--trace", "t.json")
LOG = (
    r"rank (\d): (?:stage (\d) of 2, )?(?:place (\d) of 2, )?process \d+ on \S+, cores (\S+), cpu \(.+\), "
    r"layers (\d+) to (\d+), .* MiB of weights"
)


@pytest.mark.soak
def test_a_rank_that_is_killed_ends_streams_with_an_error_and_the_group_is_started_again(tmp_path: Path) -> None:
    folder = story_folder(tmp_path / "stories", end_ids=[])
    env = {"OCTAVO_DEBUG": "forward.sleep=20"}
    with ServerProcess("octavo serve", str(folder), "-tp", "2", *LIMITS, cwd=tmp_path, env=env) as server:
        known = text(server)
        rank = int(re.findall(r"rank 1: .*process (\d+) on", server.stderr)[0])

        async def kill() -> None:
            os.kill(rank, signal.SIGKILL)

        ended = asyncio.run(while_streaming(server, 5, 100, kill))
        assert {each.error_code for each in ended} == {"engine_dead"} and max(each.seconds for each in ended) < 5
        wait_for(lambda: server.ask("GET", "/health").status == 200)
        assert text(server) == known
        assert "rank 1 was killed by signal 9" in server.stderr


# promise: ranks-watched
@pytest.mark.parametrize("how", [*rarely("-tp"), "-pp"])
def test_every_rank_is_told_with_what_it_did(how: str, tmp_path: Path) -> None:
    folder = story_folder(tmp_path / "stories", end_ids=[])
    with ServerProcess("octavo serve", str(folder), how, "2", *LIMITS, cwd=tmp_path) as server:
        found = re.findall(LOG, server.stderr)
        assert [rank for rank, *_ in found] == ["0", "1"], server.stderr
        stages = ["0", "0"] if how == "-tp" else ["0", "1"]
        places = [(stage, place) for _, stage, place, *_ in found]
        assert places == ([("", "0"), ("", "1")] if how == "-tp" else [("0", ""), ("1", "")])

        watching = Watching(server)
        head = watching.frames[0]["ranks"]
        told = [(one["rank"], one["stage"], one["layers"], one["cores"], one["device"]) for one in head]
        assert told == [(int(r), int(s or 0), [int(a), int(b) - int(a) + 1], cores, "cpu") for r, s, _, cores, a, b in found]
        body = {"prompt": "Once", "max_tokens": 100, "ignore_eos": True}

        def rows() -> list[Any]:
            return [frame["ranks"] for frame in watching.frames[1:] if "ranks" in frame]

        def both_were_seen_in_steps() -> bool:
            assert server.ask("POST", "/v1/completions", body).status == 200
            return all(max((row[rank][2] for row in rows()), default=0) > 0 for rank in (0, 1))

        wait_for(both_were_seen_in_steps)  # a second of work can fall between two lines of the view, so they work on until then

        def steps() -> list[float]:
            found = samples_of(server.ask("GET", "/metrics").body.decode())
            return [found.get(f'rank_steps_total{{rank="{rank}"}}{{stage="{stages[rank]}"}}', 0.0) for rank in (0, 1)]

        wait_for(lambda: min(steps()) >= 100 and len(set(steps())) == 1)  # every rank makes every step
        samples = samples_of(server.ask("GET", "/metrics").body.decode())
        for rank, stage in enumerate(stages):
            own = f'{{rank="{rank}"}}{{stage="{stage}"}}'
            assert samples[f"rank_up{own}"] == 1 and 0 < samples[f"rank_in_step_seconds_total{own}"] < 60

        wait_for(lambda: [row[1] for row in watching.state.ranks] == steps())
        assert all([row[0] for row in each] == [0, 1] for each in rows())
        assert all(0 <= share <= 1 and 0 <= age < 5 for each in rows() for _, _, share, age in each)
        late = Watching(server)
        wait_for(lambda: [row[1] for row in late.state.ranks] == steps())
        watching.leave()
        late.leave()
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0
    events = json.loads((tmp_path / "t.json").read_text() + "]")  # the server does not wait for its end
    made = [event for event in events if event["name"] == "rank step"]
    drawn = [sorted(event["args"]["step"] for event in made if event["tid"] == 2 + rank) for rank in (0, 1)]
    both = min(map(len, drawn))  # the last heartbeat of a rank may come after the end of the file
    assert drawn[0][:both] == drawn[1][:both] and both >= 100


def test_hosts_are_told_where_ranks_are_on_several() -> None:
    one = RankFacts(0, 0, 1, 0, 2, 5, "first", "0-3", "cpu", "torch", 0, 4, 100)
    assert [rank.get("host") for rank in rank_lines([one, replace(one, rank=1)])] == [None, None]
    assert [rank.get("host") for rank in rank_lines([one, replace(one, rank=1, host="second")])] == ["first", "second"]


def test_one_rank_is_not_told(tmp_path: Path) -> None:
    folder = story_folder(tmp_path / "stories", end_ids=[])
    with ServerProcess("octavo serve", str(folder), *LIMITS, cwd=tmp_path) as server:
        watching = Watching(server)
        assert server.ask("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 100, "ignore_eos": True}).status == 200
        wait_for(lambda: len(watching.state.steps) >= 100)
        assert not any("ranks" in frame for frame in watching.frames)
        assert "rank_" not in server.ask("GET", "/metrics").body.decode() and "rank 0" not in server.stderr
        watching.leave()
