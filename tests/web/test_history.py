"""The page's memory against a model: whatever frames came and whatever moment is asked for, it knows what a watcher was told."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.chromium import launch
from tests.support.view_frames import Frame, Known, ViewModel
from tests.support.view_host import view_host

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "octavo" / "web"
IN_NODE = f"""
import {{ History }} from {json.dumps((WEB / "history.js").as_uri())};
import {{ parseLine }} from {json.dumps((WEB / "frames.js").as_uri())};
import {{ answer }} from {json.dumps((Path(__file__).parent / "data" / "history_script.js").as_uri())};
import {{ readFileSync }} from "node:fs";
process.stdout.write(JSON.stringify(answer(History, parseLine, JSON.parse(readFileSync(0, "utf8")))));
"""
IN_BROWSER = """async (data) => {
  const [{ History }, { parseLine }, { answer }] = await Promise.all(["web/history.js", "web/frames.js", "data/history_script.js"].map(
    (name) => import(new URL(name, location))));
  return JSON.stringify(answer(History, parseLine, JSON.parse(data)));
}"""

# name -> seed, blocks, frames, limits of the memory
CASES: dict[str, tuple[int, int, int, dict[str, float]]] = {
    "small": (1, 12, 150, {}),
    "short of blocks": (2, 5, 150, {}),
    "wide": (3, 100, 80, {}),
    "forgets by age": (4, 20, 250, {"seconds": 4}),
    "forgets by weight": (5, 20, 500, {"weight": 250_000}),
    "large": (6, 100_000, 70, {"seconds": 4, "weight": 5_000_000}),
}

# line -> what is said of it, null where it is passed over
REFUSED: dict[str, str | None] = {
    "": None,
    '{"kind":"weather","at":1}': None,
    "{": "a line is not JSON",
    "[1]": "a line has no kind",
    '{"kind":"head","version":2,"num_blocks":9,"block_size":4}': "version 2",
    '{"kind":"head","version":1,"num_blocks":1e9,"block_size":4}': "num_blocks is 1000000000",
    '{"kind":"head","version":1,"num_blocks":9}': "block_size is undefined",
    '{"kind":"head","version":1,"num_blocks":9,"block_size":4,"started":1,"engines":1e9}': "engines of a head is 1000000000",
    '{"kind":"note","at":1,"scene":1,"engine":"1&key"}': "engine of a note is 1&key",
    '{"kind":"head","version":1,"num_blocks":9,"block_size":4,"started":"now"}': "started of a head is now",
    '{"kind":"delta"}': "at of a delta is undefined",
    '{"kind":"delta","at":1,"blocks":{}}': "blocks of a delta is not a list",
    '{"kind":"delta","at":1,"blocks":[[10,1,0,"",null,null]]}': "block 10 is outside 1..9",
    '{"kind":"delta","at":1,"blocks":[[1,-1,0,"",null,null]]}': "block 1 has the reference count -1",
    '{"kind":"delta","at":1,"blocks":[[1,1,0,"","text",null]]}': "tokens of block 1 are not a list",
    '{"kind":"delta","at":1,"seqs":[{"seq":1,"table":[0]}]}': "the table of sequence 1",
    '{"kind":"delta","at":1,"events":[1]}': "events of a delta are not lists",
}


@dataclass
class Case:
    """A script for a History, and beside each line of it what is known after it (None: a question)."""

    limits: dict[str, float]
    script: list[list[Any]] = field(default_factory=list)
    known: list[Known | None] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)

    def tell(self, model: ViewModel, count: int, random: Random) -> None:
        self._add(["apply", model.head()], None)
        for frame, known in model.frames(count):
            self._add(["apply", frame], known)
            for _ in range(random.choice((0, 0, 0, 3))):
                self._add([random.choice(("at", "at", "neighbour")), random.random(), random.choice((-1, 1))], None)
                self._add(["at", random.random(), 0], None)

    def _add(self, line: list[Any], known: Known | None) -> None:
        self.script.append(line)
        self.known.append(known)

    def asked(self, what: str) -> Iterator[tuple[dict[str, Any], list[tuple[Frame, Known]]]]:
        """Each answer to such a question, with the frames that had come before it."""
        told: list[tuple[Frame, Known]] = []
        for (kind, argument, *_), known, answer in zip(self.script, self.known, self.answers):
            if kind == "apply":
                told = [*told, (argument, known)] if known else told
            elif kind == what:
                yield answer, told


def answer(data: dict[str, Any]) -> Any:
    """By node where it is there, else by a browser."""
    if shutil.which("node"):
        run = subprocess.run(["node", "--input-type=module", "--eval", IN_NODE], input=json.dumps(data), capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)
    api = pytest.importorskip("playwright.sync_api", reason="the page's memory is tested by node or playwright, and neither is installed")
    with view_host() as host, api.sync_playwright() as playwright:
        page = launch(playwright).new_page()
        page.goto(host.url)
        return json.loads(page.evaluate(IN_BROWSER, json.dumps(data)))


@pytest.fixture(scope="module")
def outcome() -> tuple[dict[str, Case], list[Any]]:
    cases = {name: Case(limits) for name, (_, _, _, limits) in CASES.items()}
    models = {name: ViewModel(seed, num_blocks) for name, (seed, num_blocks, _, _) in CASES.items()}
    for name, (seed, _, count, _) in CASES.items():
        cases[name].tell(models[name], count, Random(seed))
    again = ViewModel(7, 40, before=models["small"])  # the engine is started again, with another pool
    for seed in (7, 8):  # and tells all it has twice
        cases["small"].tell(again, 50, Random(seed))
    data = {"lines": list(REFUSED), "cases": [{"limits": case.limits, "script": case.script} for case in cases.values()]}
    found = answer(data)
    for case, answers in zip(cases.values(), found["cases"]):
        case.answers = answers
    return cases, found["said"]


Outcome = tuple[dict[str, Case], list[Any]]


@pytest.mark.parametrize("name", CASES)
def test_after_every_frame_it_knows_what_was_told(outcome: Outcome, name: str) -> None:
    case = outcome[0][name]
    told = [(known, answer["known"]) for known, answer in zip(case.known, case.answers) if known]
    assert len(told) > 50
    for known, found in told:
        assert found == known


# promise: what-came-before
@pytest.mark.parametrize("name", CASES)
def test_every_moment_asked_for_is_as_it_was(outcome: Outcome, name: str) -> None:
    asked = list(outcome[0][name].asked("at"))
    assert len(asked) > 20
    for answer, told in asked:
        then = [known for _, known in told if known["at"] <= answer["time"]]
        assert answer["known"] == then[-1]


def test_a_step_leads_to_the_next_moment_something_happened(outcome: Outcome) -> None:
    for case in outcome[0].values():
        asked = [(line, answer) for line, answer in zip(case.script, case.answers) if line[0] == "neighbour"]
        for (line, answer), (_, told) in zip(asked, case.asked("neighbour")):
            eventful = [known["at"] for frame, known in told[1:] if frame["kind"] != "delta" or frame.get("steps") or frame.get("events")]
            time, first = answer["time"], answer["first"]
            after = min((at for at in eventful if at > time), default=told[-1][1]["at"])
            before = max((at for at in eventful if first <= at < time), default=first)
            assert answer["found"] == (after if line[2] > 0 else before)


def test_old_moments_are_forgotten_by_age(outcome: Outcome) -> None:
    answers = [answer for answer in outcome[0]["forgets by age"].answers if "first" in answer and "last" in answer]
    assert max(answer["last"] - answer["first"] for answer in answers) == pytest.approx(4)
    assert answers[-1]["first"] > 4


@pytest.mark.parametrize("name", ["forgets by weight", "large"])
def test_memory_stays_within_its_bound(outcome: Outcome, name: str) -> None:
    case = outcome[0][name]
    heaviest = max(answer["weight"] for answer in case.answers if "weight" in answer)
    assert 0.5 * case.limits["weight"] < heaviest <= case.limits["weight"]
    assert next(reversed([answer["first"] for answer in case.answers if "first" in answer])) > case.script[1][1]["at"]


def test_what_is_no_frame_is_refused_by_name(outcome: Outcome) -> None:
    for (line, wanted), said in zip(REFUSED.items(), outcome[1]):
        assert said is None if wanted is None else wanted in said, line
