"""Numbers that pages state about the project are counted here."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.bench.loads import QWEN3_06B, QWEN3_8B
from octavo.server.lesson import SCENES
from tests.docs.sources import ROOT
from tests.docs.test_references import NUMBER, rows
from tests.support.hostile_files import all_cases

README = (ROOT / "README.md").read_text()
RELIABILITY = (ROOT / "docs/reliability.md").read_text()
PATCHES = [path.read_text() for path in (ROOT / "tests/faults").glob("*.patch")]
SHAPES = {
    "Qwen3-0.6B": QWEN3_06B,
    "Qwen3-4B": dict(QWEN3_06B, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
    "Qwen3-8B": QWEN3_8B,
}


def stated(pattern: str, page: str) -> set[int]:
    found = re.findall(pattern, (ROOT / page).read_text())
    assert found, f"{page} does not say it"
    return {int(number) for number in found}


# promise: docs-checked-against
@pytest.mark.parametrize(
    ("page", "pattern", "count"),
    [
        ("docs/exercises.md", r"^# Exercises\n\n(\d+) bugs", len(PATCHES)),
        ("docs/exercises.md", r"The first (\d+) bugs show in", sum("Shown-by: examples/fake_kv.py" in patch for patch in PATCHES)),
        ("docs/reliability.md", r"(\d+) of \d+ (?:bugs|do)", len(PATCHES)),
        ("docs/reliability.md", r"\d+ of (\d+) (?:bugs|do)", len(PATCHES)),
        ("docs/reliability.md", r"`tests/faults/` has (\d+) mistakes", len(PATCHES)),
        ("docs/reliability.md", r"(\d+) failure modes", len(re.findall(r"^\| \d+ \|.*::test_", RELIABILITY, re.MULTILINE))),
        ("docs/reliability.md", r"are (\d+) GGUF, safetensors", len(all_cases())),
        ("docs/models.md", r"(\d+) spoiled files", len(all_cases())),
    ],
    ids=str,
)
def test_what_pages_count_is_there(page: str, pattern: str, count: int) -> None:
    assert stated(pattern, page) == {count}


def test_the_lesson_has_as_many_scenes_as_pages_say() -> None:
    pages = [(ROOT / page).read_text() for page in ("README.md", "docs/page.md", "octavo/web/demo.js")]
    assert all(re.search(r"\bin ten (short )?scenes", page) for page in pages) and len(SCENES) == 10


# promise: docs-checked-against
def test_the_models_to_try_next_take_the_memory_that_the_readme_states(tmp_path: Path) -> None:
    table = README[README.index("## A better model") : README.index("## How fast it is")]
    seen = set()
    for memory, command, total, cache in rows(table):
        found = re.search(r"Qwen/(Qwen3-[\d.]+B)-GGUF:Q(\d)_", command)
        assert found is not None
        seen.add(found[1])
        config = tmp_path / f"{found[1]}.json"
        config.write_text(json.dumps(SHAPES[found[1]]))
        flags = ["--device", "cpu", "-q", f"int{found[2]}", "--memory", memory.replace(" ", ""), "--json"]
        plan = json.loads(subprocess.check_output([sys.executable, "-m", "octavo", "plan", str(config), *flags], timeout=60))
        planned = [plan["total_bytes"] / 2**30, plan["kv_cache_bytes"] / 2**30, plan["max_model_len"]]
        assert [float(number.replace(",", "")) for number in NUMBER.findall(f"{total} {cache}")] == pytest.approx(planned, rel=0.06)
    assert seen == SHAPES.keys()
