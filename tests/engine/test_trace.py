"""The step trace: what is drawn is what was done, a killed process leaves a file that loads, and no trace can fail a step."""

import json
import logging
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.engine import trace
from octavo.engine.trace import StepTrace, numbered
from octavo.errors import ConfigError
from tests.cli.processes import ROOT, environment
from tests.support.fake import FakeEngine, sampling
from tests.support.models import tiny_model
from tests.support.soaked import rarely
from tests.support.story_folder import story_folder
from tests.support.watching import view_of


def events_of(path: Path, cut: bool = False) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text.endswith("\n]\n") != cut
    events: list[dict[str, Any]] = json.loads(text + "]" if cut else text)
    return events


def traced(path: Path, **settings: Any) -> FakeEngine:
    engine = FakeEngine(**settings)
    engine.core.traces = [StepTrace(str(path))]
    return engine


# promise: trace-file-every
@pytest.mark.parametrize("depth", [1, 2])
def test_every_step_is_a_slice_of_what_was_planned_with_what_was_done_inside(tmp_path: Path, depth: int) -> None:
    engine = traced(tmp_path / "t.json", num_blocks=24, rows=6, budget=16, depth=depth)
    for name in "abcdefgh":
        engine.add(name, [*range(ord(name) % 20 + 10)], sampling(20))
    engine.run()
    engine.core.close()
    engine.assert_exact()
    events = events_of(tmp_path / "t.json")
    slices = [event for event in events if event["ph"] == "X"]
    steps = [event for event in slices if event["name"] == "step"]
    drawn = [step["args"] for step in steps if step["args"]["rows"]]
    plans = engine.executor.plans
    assert [(args["step"], args["rows"], args["tokens"]) for args in drawn] == [(p.step, len(p.row), sum(p.num_query)) for p in plans]
    assert all(args["prefill_tokens"] + args["decode_rows"] == args["tokens"] for args in drawn)
    assert {args["decode_rows"] > 0 < args["prefill_tokens"] for args in drawn} == {True, False}, "mixed steps and others"
    assert drawn[0]["decode_rows"] == 0 and drawn[-1]["decode_rows"] == drawn[-1]["rows"] > 0
    inner = [event for event in slices if event["name"] != "step"]
    for step in steps:
        start, end = step["ts"], step["ts"] + step["dur"]
        inside = [event for event in inner if start <= event["ts"] <= end]
        assert all(one["ts"] + one["dur"] <= other["ts"] + 0.01 for one, other in pairwise(inside)), "one after the other"
        assert inside[-1]["ts"] + inside[-1]["dur"] <= end + 0.01
        kinds = [event["name"] for event in inside]
        assert kinds[0] == "schedule" and ("forward" in kinds) == bool(step["args"]["rows"])
        inner = [event for event in inner if event not in inside]
    assert not inner
    assert sum(event["args"]["sequences"] for event in events if event["ph"] == "i") == engine.scheduler.stats.preemptions > 0
    last = {event["name"]: event["args"] for event in events if event["ph"] == "C"}
    assert last == {"requests": {"running": 0, "waiting": 0}, "KV blocks": {"in use": 0}}
    assert max(event["args"]["running"] for event in events if event["name"] == "requests") > 1
    counted = engine.scheduler.stats
    assert (sum(counted.steps), counted.step_tokens) == (len(plans), sum(sum(plan.num_query) for plan in plans))


def test_an_engine_that_died_and_its_successor_share_a_file(tmp_path: Path) -> None:
    for epoch in (1, 2):
        engine = FakeEngine()
        engine.core.traces = [StepTrace(str(tmp_path / "t.json"), goes_on=epoch > 1)]
        engine.add("a", [1, 2, 3])
        engine.run()  # never closed: whatever is left to do has been written
    names = [event["name"] for event in events_of(tmp_path / "t.json", cut=True)]
    assert names.count("process_name") == 2 and names.count("step") == 2 * engine.scheduler.step


@pytest.mark.parametrize("watched", [False, True])
def test_what_was_done_is_written_when_the_last_client_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: bool) -> None:
    monkeypatch.setattr(trace, "FLUSH_NS", 10**18)
    engine = traced(tmp_path / "t.json")
    view_of(engine.core).request("watcher", "full" if watched else "none")
    for name in "ab":
        engine.add(name, [1, 2, 3], sampling(50))
    for _ in range(5):
        engine.step()
    engine.core.abort("a")
    assert len(events_of(tmp_path / "t.json", cut=True)) == 1, "somebody is left: no need to write yet"
    engine.core.abort("b")
    events = events_of(tmp_path / "t.json", cut=True)
    assert sum(event["name"] == "step" for event in events) == 5
    assert [event["args"] for event in events[-2:]] == [{"running": 0, "waiting": 0}, {"in use": 0}]


# promise: trace-file-every
def test_a_process_that_is_killed_leaves_a_file_that_loads(tmp_path: Path) -> None:
    code = f"""
from octavo import LLM, SamplingParams
llm = LLM({str(story_folder(tmp_path / "stories"))!r}, trace="t.json", max_model_len=256)
llm.generate("Once", SamplingParams(max_tokens=200), use_tqdm=False)"""
    env = environment({"OCTAVO_DEBUG": "runner=fake,forward.sleep=20,exit.sigkill@60", "PYTHONPATH": str(ROOT)})
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == -9, run.stderr
    steps = [event for event in events_of(tmp_path / "t.json", cut=True) if event["name"] == "step"]
    assert 20 < len(steps) < 60 and all(step["dur"] >= 20_000 for step in steps)


# promise: trace-file-every
@pytest.mark.parametrize("full", [False, True], ids=["at its limit", "disk full"])
def test_a_trace_that_cannot_grow_ends_and_the_engine_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture, full: bool) -> None:
    path = Path("/dev/full") if full else tmp_path / "t.json"
    engine = FakeEngine()
    with caplog.at_level(logging.WARNING, "octavo"):
        engine.core.traces = [StepTrace(str(path), most_bytes=5000)]
        for turn in range(20):
            engine.add(f"r{turn}", [1, 2, turn], sampling(4))
            engine.run()
        engine.core.close()
    engine.assert_exact()
    assert len(caplog.records) == 1 and str(path) in caplog.text
    assert full or (1000 < path.stat().st_size <= 5000 and len(events_of(path, cut=True)) > 10)


def test_a_file_that_cannot_be_written_or_is_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace .*no/t\.json: No such file or directory"):
        StepTrace(str(tmp_path / "no/t.json"))
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"GGUF...")
    with pytest.raises(ConfigError, match=r"trace .*model\.gguf: there is a file that is no trace; choose another name"):
        StepTrace(str(weights))
    assert weights.read_bytes() == b"GGUF..."


# promise: ranks-watched
@pytest.mark.parametrize("how", ["tensor_parallel_size", *rarely("pipeline_parallel_size")])
def test_every_step_is_on_the_track_of_every_rank(tmp_path: Path, how: str) -> None:
    settings: dict[str, Any] = {how: 2, "skip_tokenizer_init": True, "max_model_len": 256, "num_gpu_blocks_override": 40}
    folder, path = tiny_model(tmp_path, "LlamaForCausalLM", seed=3), tmp_path / "t.json"
    with LLM(str(folder), trace=str(path), **settings) as llm:
        asks = SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False)
        llm.generate([[1, 2, 3], [4, 5]], asks, use_tqdm=False)
    events = events_of(path)
    stages = [0, 0] if how == "tensor_parallel_size" else [0, 1]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {1: "engine", **({2: "rank 0, stage 0", 3: "rank 1, stage 1"} if any(stages) else {2: "rank 0", 3: "rank 1"})}
    made = {event["args"]["step"]: event for event in events if event["name"] == "step" and event["args"]["rows"]}
    assert len(made) >= 20
    for rank in range(2):
        own = {event["args"]["step"]: event for event in events if event["name"] == "rank step" and event["tid"] == 2 + rank}
        assert own.keys() == made.keys()
        for one, other in pairwise([own[step] for step in sorted(own)]):
            assert one["ts"] + one["dur"] <= other["ts"] + 0.01
        if not any(stages):  # all compute while the engine waits; the stages of a pipeline go on after its step
            assert all(made[step]["ts"] <= event["ts"] for step, event in own.items())
            assert all(event["ts"] + event["dur"] <= made[step]["ts"] + made[step]["dur"] + 50_000 for step, event in own.items())


def test_each_of_several_engines_has_a_file_of_its_own() -> None:
    assert [numbered(path, 2) for path in ("steps.json", "/tmp/a.b/steps", "a/steps.trace.json")] == [
        "steps-2.json", "/tmp/a.b/steps-2", "a/steps.trace-2.json",
    ]  # fmt: skip
