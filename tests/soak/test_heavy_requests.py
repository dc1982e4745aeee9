"""The storm of heavy requests at length: bodies as large as they may be, every kind of form and answer, and all of them mixed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.heavy_requests import ANSWERS, HARD_FORMS
from tests.support.heavy_storm import Storm
from tests.support.story_folder import story_folder

FULL = 8 * 2**20 - 4096
KEPT = 200 * 2**20  # a plateau after bodies of 8 MB in every field: Python keeps what is not free as a whole
MULTIPLES = ((1, 128), (8, 128), (1024, 1))


@pytest.mark.soak
def test_no_field_of_any_route_can_be_filled_so_that_others_wait_at_length(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with Storm(str(story_folder(tmp_path / "endless", end_ids=[])), FULL, patience=10, kept=KEPT) as storm:
        storm.try_fields(MULTIPLES)
        storm.try_mixed(clients=16, seconds=120)
        record_property("storm", "\n".join(storm.log))
        storm.check()


@pytest.mark.soak
def test_no_answer_is_so_hard_or_large_that_others_wait_at_length(record_property: Callable[[str, object], None]) -> None:
    with Storm(None, FULL, patience=10, kept=KEPT) as storm:
        storm.try_forms(HARD_FORMS, MULTIPLES)
        storm.try_answers(ANSWERS, tokens=480, streams=16)  # 128 samples: half of the rows
        record_property("storm", "\n".join(storm.log))
        storm.check()
