"""docs/demo is the page as it is now, with a lesson as it is now: `python docs/demo/make.py` makes it so again."""

import json
from itertools import pairwise
from pathlib import Path

from octavo.server.lesson import SCENES
from octavo.server.web import FOLDER
from tests.cli.processes import ROOT

DEMO = ROOT / "docs" / "demo"


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_demo_is_the_page_file_by_file_with_a_start_of_its_own() -> None:
    page = files(FOLDER)
    index = page.pop("index.html")
    assert (DEMO / "index.html").read_bytes() == index.replace(b"/main.js", b"/demo.js")
    demo = files(DEMO / "web")
    assert sorted(demo) == sorted(page)
    assert [name for name in page if demo[name] != page[name]] == []


def test_the_recorded_lesson_has_the_scenes_that_there_are() -> None:
    frames = [json.loads(text) for text in (FOLDER / "lesson.ndjson").read_text().splitlines()]
    notes = [index for index, frame in enumerate(frames) if frame["kind"] == "note"]
    starts = [index for before, index in pairwise([None, *notes]) if before is None or frames[before]["scene"] != frames[index]["scene"]]
    told = [{name: frames[start][name] for name in ("scene", "of", "title", "text", "marks")} for start in starts]
    assert told == [{"scene": number, "of": len(SCENES), **json.loads(json.dumps(scene.caption))} for number, scene in enumerate(SCENES, 1)]
    for scene, start, end in zip(SCENES, starts, [*starts[1:], None], strict=True):
        seen = [event[2] for frame in frames[start:end] for event in frame.get("events", [])]
        assert scene.shows <= set(seen) and seen[0] == "admit", f"{scene.title}: {seen}"  # the cache was emptied before
    assert [frame["engine"] for frame in frames if frame["kind"] == "head"] == [0, 1], "the last scene shows where the stream goes on"
    steps = [len(frame["steps"]) for frame in frames[starts[0] :] if frame.get("steps")]
    assert sum(steps) < 1.5 * len(steps), "most steps have a frame of their own"
