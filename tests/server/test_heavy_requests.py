"""Requests as heavy as the server takes them keep nobody else waiting: what a new field, or a new route, can be filled with included.

The whole of it is in `make soak`; here bodies are smaller, there are fewer of each kind, and a field is tried in one route.
"""


import pytest

from octavo.server.body import takes
from octavo.server.fields import Body
from tests.support.heavy_requests import places
from tests.support.heavy_storm import Storm

FORMS = ("regex that opens classes", "regex that counts", "grammar of empty lines", "schema with a pattern")
ANSWERS = ("logprobs, streamed", "stop strings", "streams that nobody reads")


@pytest.mark.timed("how long other clients wait next to heavy requests")
def test_no_field_can_be_filled_so_that_others_wait(endless: str) -> None:
    with Storm(endless, full=2**20, patience=1.5, shapes=1) as storm:
        storm.try_fields(((1, 128), (256, 1)), once=True)
        storm.check()


@pytest.mark.timed("how long other clients wait next to heavy answers")
def test_no_answer_is_so_hard_or_large_that_others_wait() -> None:
    with Storm(None, full=2**20, patience=1.5) as storm:
        storm.try_forms(FORMS, ((1, 128), (16, 1)))
        storm.try_answers(ANSWERS, tokens=200, streams=4)  # more rows at once are the model's work, and not what is judged
        storm.check()


class Inside(Body):
    words: list[str]


class New(Body):
    number: int
    text: str | None = None
    inside: Inside | None = None


def test_a_route_that_is_new_is_tried_in_all_its_fields() -> None:
    operation = takes(New)
    shared = operation["requestBody"]["content"]["application/json"]["schema"].pop("$defs")
    found = places({"paths": {"/new": {"post": operation}}, "components": {"schemas": shared}})
    assert [place.field for place in found] == ["number", "text", "inside", "inside.words"]
    bodies = [place.heavy(place.shapes[0], 10).body for place in found if place.shapes]
    assert bodies[:2] == [b'{"number":9999999999}', b'{"text":"aaaaaaaaaa","number": 1}']
    assert bodies[-1] == b'{"inside":{"words":["ab","ab"]},"number": 1}'
