"""Requests as heavy as the server takes them keep nobody else waiting: what a new field, or a new route, can be filled with included."""

from collections.abc import Callable

from tests.support.heavy_requests import hard_forms, large_answers, places
from tests.support.heavy_storm import Asker, Storm
from tests.support.server_process import ServerProcess

FLAGS = ("--scheduling-policy", "priority", "--max-model-len", "512")


def test_heavy_requests_keep_nobody_waiting(endless: str) -> None:
    log: Callable[[str], None] = print
    with ServerProcess("octavo serve", endless, *FLAGS, env={"OCTAVO_LOG_LEVEL": "ERROR"}) as server, Asker(server) as asker:
        storm = Storm(server, asker, 2**20, 2.0, log)
        multiples = ((1, 128), (256, 1))
        for place in places(server.ask("GET", "/openapi.json").json):
            storm.judge(f"{place.path} {place.field}", lambda place=place: storm.try_place(place, multiples))
        storm.judge("all fields at once", lambda: storm.try_all_at_once(multiples))
        for name, requests in [*hard_forms(((1, 1), (1, 128))), *large_answers(100, 16)]:
            storm.judge(name, lambda requests=requests: storm.send(requests))
        storm.check()
