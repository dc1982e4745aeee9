"""The demo is the page with a start of its own, and its recorded lesson is the lesson as it is now (`docs/demo/make.py --record`)."""

import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from octavo.server.app import FOLDER
from octavo.server.lesson import SCENES
from tests.cli.processes import ROOT


# promise: lesson-page-itself
def test_the_demo_is_built_in_a_fresh_clone_by_a_python_without_packages(tmp_path: Path) -> None:
    """A later build removes what the one before left."""
    shutil.copytree(FOLDER, tmp_path / "octavo/web")
    shutil.copytree(ROOT / "docs/demo", tmp_path / "docs/demo")
    left = tmp_path / "build/demo/web/left.js"
    left.parent.mkdir(parents=True)
    left.touch()
    subprocess.run([sys.executable, "-I", "-S", "docs/demo/make.py"], cwd=tmp_path, check=True, timeout=60)
    demo = tmp_path / "build/demo"
    start = (demo / "index.html").read_text()
    asked = set(re.findall(r'(?:src|href)="\./([^"]+)"', start))
    assert "web/demo.js" in asked and "web/main.js" not in asked
    assert [name for name in asked if not (demo / name).is_file()] == []
    assert (demo / "web/lesson.ndjson").is_file() and not left.exists()


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
