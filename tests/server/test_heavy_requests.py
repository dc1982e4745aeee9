"""Requests as heavy as the server takes them keep nobody else waiting: what a new field, or a new route, can be filled with included.

The whole of it is in `make soak`; here bodies are smaller, and there are fewer of each kind.
"""

from tests.support.heavy_storm import Storm

FORMS = ("regex that opens classes", "regex that counts", "grammar of empty lines", "schema with a pattern")
ANSWERS = ("logprobs, streamed", "stop strings", "streams that nobody reads")


def test_no_field_of_any_route_can_be_filled_so_that_others_wait(endless: str) -> None:
    with Storm(endless, full=2**20, patience=1.5, shapes=3) as storm:
        storm.try_fields(((1, 128), (256, 1)))
        storm.check()


def test_no_answer_is_so_hard_or_large_that_others_wait() -> None:
    with Storm(None, full=2**20, patience=1.5) as storm:
        storm.try_forms(FORMS, ((1, 1), (1, 128), (16, 1)))
        storm.try_answers(ANSWERS, tokens=200, streams=16)
        storm.check()
