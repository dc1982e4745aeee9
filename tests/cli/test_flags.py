"""From the words of a command line to a running engine: each flag arrives where it acts."""

import importlib.metadata

import pytest

from octavo.cli.args import Parser, add_engine_flags, engine_config
from octavo.config import Debug
from octavo.engine.build import build_engine
from octavo.engine.core import EngineCore
from octavo.loading.resolve import load_model_config, resolve_model
from octavo.messages import AddRequest, StepPlan
from octavo.sampling_params import SamplingParams


def client(*words: str) -> EngineCore:
    parser = Parser(prog="octavo try", allow_abbrev=False)
    add_engine_flags(parser)
    source = resolve_model(None)
    return build_engine(engine_config(parser.parse(words)), source, load_model_config(source), Debug(runner="fake", check=True))


def finished(engine: EngineCore, priorities: list[int]) -> list[str]:
    """Requests in the order in which they end; their names are their priorities."""
    for number, priority in enumerate(priorities):
        engine.add(AddRequest(str(priority), [number, 9, 9], SamplingParams(max_tokens=3, ignore_eos=True), priority))
    ended = []
    while engine.has_work:
        ended += [delta.request_id for delta in engine.step() if delta.finish_reason is not None]
    return ended


# promise: scheduling-policy-fcfs
def test_scheduling_policy_orders_requests() -> None:
    assert finished(client("--max-num-seqs", "1"), [5, 0, -3]) == ["5", "0", "-3"]
    assert finished(client("--max-num-seqs", "1", "--scheduling-policy", "fcfs"), [5, 0, -3]) == ["5", "0", "-3"]
    assert finished(client("--max-num-seqs", "1", "--scheduling-policy", "priority"), [5, 0, -3]) == ["-3", "0", "5"]


# promise: block-size, num-gpu-blocks, max-num-seqs, max-num-batched
def test_limits_of_a_step_hold_in_every_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = client("--max-num-seqs", "3", "--max-num-batched-tokens", "7", "--num-gpu-blocks-override", "40", "--block-size", "4")
    plans: list[StepPlan] = []
    forward = engine.executor.forward

    def noted(plan: StepPlan) -> None:
        plans.append(plan)
        forward(plan)

    monkeypatch.setattr(engine.executor, "forward", noted)
    for number in range(5):
        engine.add(AddRequest(str(number), [number] * 20, SamplingParams(max_tokens=4, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    assert max(len(plan.row) for plan in plans) == 3 and {row for plan in plans for row in plan.row} == {0, 1, 2}
    assert max(sum(plan.num_query) for plan in plans) == 7
    assert (engine.scheduler.limits.block_size, engine.scheduler.limits.num_blocks, engine.scheduler.snapshot().num_blocks) == (4, 40, 40)
    assert engine.scheduler.snapshot().generation_tokens == 20


# promise: python-m-octavo
def test_the_command_is_the_module() -> None:
    from octavo.cli.main import main

    (command,) = importlib.metadata.entry_points(group="console_scripts", name="octavo")
    assert command.load() is main  # and `python -m octavo`, which the other tests run, calls it too
