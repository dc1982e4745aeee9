"""docs/demo is the page as it is now, with a lesson as it is now: `python docs/demo/make.py` makes it so again."""

import json
from pathlib import Path

from octavo.server.lesson_scenes import SCENES
from octavo.server.web import FOLDER
from tests.cli.processes import ROOT

DEMO = ROOT / "docs" / "demo"


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_demo_is_the_page_file_by_file() -> None:
    page = files(FOLDER)
    index = page.pop("index.html")
    assert (DEMO / "index.html").read_bytes() == index
    demo = files(DEMO / "web")
    assert sorted(demo) == sorted(page)
    assert [name for name in page if demo[name] != page[name]] == []


def test_the_recorded_lesson_has_the_scenes_that_there_are() -> None:
    frames = [json.loads(text) for text in (FOLDER / "lesson.ndjson").read_text().splitlines()]
    told = [(frame["scene"], frame["of"], frame["title"], frame["text"]) for frame in frames if frame["kind"] == "note"]
    assert told == [(number, len(SCENES), scene.title, scene.text) for number, scene in enumerate(SCENES, 1)]
