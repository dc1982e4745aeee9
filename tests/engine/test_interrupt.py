"""Ctrl-C: between steps, never inside one; it aborts what it hits, leaves the rest alone and the engine usable."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from octavo import LLM, SamplingParams
from octavo.engine.batch import DeferredInterrupt
from octavo.outputs import TextDelta
from octavo.policy import scheduler

PROMPT = "Once upon a time"
GREEDY = SamplingParams(temperature=0, max_tokens=24)
LONG = SamplingParams(max_tokens=500, ignore_eos=True)


@pytest.fixture(autouse=True)
def python_handles_ctrl_c() -> Iterator[None]:
    """As in a program of a user, whatever the test runner did."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(params=[1, 2], ids=["depth1", "depth2"])
def llm(stories: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(stories, num_gpu_blocks_override=400, max_num_seqs=8, pipeline_depth=request.param) as llm:
        yield llm


def assert_usable(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.num_blocks - 1)
    assert not llm._outputs._requests
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].text.startswith(", there was a little girl named Lily.")


class CtrlC:
    """Presses Ctrl-C in the middle of the `count`th call of a function: before its work, or after it."""

    def __init__(self, function: Callable[..., object], count: int, after: bool = False) -> None:
        self.function, self.count, self.after = function, count, after
        self.calls = 0

    def __call__(self, *arguments: object, **options: object) -> object:
        self.calls += 1
        if self.calls == self.count and not self.after:
            signal.raise_signal(signal.SIGINT)
        result = self.function(*arguments, **options)
        if self.calls == self.count and self.after:
            signal.raise_signal(signal.SIGINT)
        return result


def start_stream(llm: LLM) -> tuple[Iterator[TextDelta], str]:
    """A stream that rests after its first token."""
    stream = llm.stream(PROMPT, GREEDY)
    return stream, next(stream).text


# promise: ctrl-c-any
def test_ctrl_c_from_outside_stops_a_long_generate(llm: LLM) -> None:
    timer = threading.Timer(0.15, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(50):  # far longer than the timer waits
            llm.generate([PROMPT] * 8, LONG)
    timer.join()
    assert_usable(llm)


# promise: ctrl-c-any
@pytest.mark.parametrize("stream_it", [False, True], ids=["generate", "stream"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_ctrl_c_in_a_step_ends_the_call_at_once_and_takes_nothing_from_others(
    llm: LLM, count: int, after: bool, stream_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    resting, shown = start_stream(llm)
    with monkeypatch.context() as patch:
        step = CtrlC(llm._core.step, count, after)
        patch.setattr(llm._core, "step", step)
        with pytest.raises(KeyboardInterrupt):
            list(llm.stream(PROMPT, LONG)) if stream_it else llm.generate([PROMPT, "One day", "Tim"], LONG)
    assert step.calls == count, "it worked on"
    shown += "".join(delta.text for delta in resting)
    assert shown == llm.generate(PROMPT, GREEDY)[0].outputs[0].text, "the stream that rested meanwhile lost or gained something"
    assert_usable(llm)


@pytest.mark.parametrize("stream_it", [False, True], ids=["generate", "stream"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_ctrl_c_while_a_request_is_added_leaves_no_part_of_it(
    llm: LLM, after: bool, stream_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    resting, shown = start_stream(llm)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "insort", CtrlC(scheduler.insort, 1, after))  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            list(llm.stream(PROMPT, LONG)) if stream_it else llm.generate([PROMPT, "One day", "Tim"], LONG)
    shown += "".join(delta.text for delta in resting)
    assert shown == llm.generate(PROMPT, GREEDY)[0].outputs[0].text
    assert_usable(llm)


def test_ctrl_c_after_the_last_step_is_not_lost(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm._outputs, "drop", CtrlC(llm._outputs.drop, 1))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, SamplingParams(max_tokens=1))
    assert_usable(llm)


def test_a_second_ctrl_c_cuts_a_step_short_and_a_resting_stream_ends_instead_of_waiting_for_ever(llm: LLM) -> None:
    runner = llm._core.executor  # type: ignore[attr-defined]
    run, calls = runner.program.run, 0

    def impatient(*step: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 4:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return run(*step)

    stream, _ = start_stream(llm)
    runner.program.run = impatient
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT], LONG)
    assert list(stream)[-1].finish_reason == "error"
    assert_usable(llm)


# --- the handler itself ----------------------------------------------------------------------------------------------


def test_an_interrupt_waits_for_a_check_or_for_the_end() -> None:
    with DeferredInterrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()
        interrupt.check()
    reached = False
    with pytest.raises(KeyboardInterrupt):  # noqa: SIM117
        with DeferredInterrupt():
            signal.raise_signal(signal.SIGINT)
            reached = True
    assert reached


def test_an_error_inside_is_not_hidden_by_an_interrupt() -> None:
    with pytest.raises(ZeroDivisionError), DeferredInterrupt():
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError


def test_a_handler_of_the_user_and_other_threads_are_left_alone() -> None:
    seen: list[int] = []

    def mine(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    signal.signal(signal.SIGINT, mine)
    with DeferredInterrupt():
        assert signal.getsignal(signal.SIGINT) is mine
        signal.raise_signal(signal.SIGINT)
    assert seen == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is mine
    signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers: list[object] = []

    def elsewhere() -> None:
        with DeferredInterrupt():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
