"""A loop that does not turn is reported once, with what it was busy with; a machine that is busy with something else is not."""

import asyncio
import logging
import re
import threading
import time

import pytest
import uvloop

from octavo.engine.stall_watch import LOOK_SECONDS, OTHERS, SAID, StallWatch
from tests.cli.processes import FAKE
from tests.support.busy import compute
from tests.support.server_process import STAND_IN, ServerProcess

MOST = 100  # milliseconds


def keep_the_interpreter(seconds: float) -> None:
    """In a call that does not let go of it, much longer than that; then it waits, so that whoever comes late still sees it here."""
    start = time.thread_time()
    sum(range(2_000_000))
    a_second = 2_000_000 / (time.thread_time() - start)
    sum(range(int(3 * seconds * a_second)))
    time.sleep(1.0)


async def watched(*steps: str) -> None:
    loop = asyncio.get_running_loop()
    StallWatch("the event loop", MOST).start(loop)
    for step in steps:
        await asyncio.sleep(5 * LOOK_SECONDS)
        if step == "compute":
            loop.call_soon(compute, 0.3)
        elif step == "thread":
            await asyncio.to_thread(keep_the_interpreter, OTHERS * MOST / 1000)
        else:
            loop.call_soon(time.sleep, 0.3)
    await asyncio.sleep(0.5)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if SAID in record.getMessage()]


def run(*steps: str) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(watched(*steps))


@pytest.mark.timed("the reported duration of a stall")
def test_a_callback_that_computes_is_reported_once_with_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    run("compute", "wait", "compute")
    first, second = said(caplog)
    assert int(re.search(rf"{SAID} (\d+) ms", first)[1]) >= 0.8 * 300  # type: ignore[index]
    assert "in compute" in first and "in compute" in second and caplog.records[0].levelno == logging.ERROR


@pytest.mark.timed("a stall of a known duration is noticed")
def test_a_thread_that_keeps_the_interpreter_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    run("thread")
    assert said(caplog) and all("another thread had the interpreter" in line for line in said(caplog))
    assert "in keep_the_interpreter" in said(caplog)[0]


@pytest.mark.timed("a wait of a known duration is no stall")
def test_a_loop_that_merely_waits_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    busy = threading.Thread(target=compute, args=(0.5,))  # in this process, but it lets go of the interpreter
    busy.start()
    run("wait")
    busy.join()
    assert said(caplog) == []


@pytest.mark.timed("the reported duration of a turn")
def test_a_turn_that_somebody_else_names_is_measured_from_its_begin_to_its_end(caplog: pytest.LogCaptureFixture) -> None:
    watch = StallWatch("the engine's loop", MOST).start()
    for seconds in (0.03, 0.03, 0.03, 0.03, 0.03, 0.3, 0.03):
        watch.begin()
        compute(seconds)
        watch.end()
    (line,) = said(caplog)
    assert 300 <= int(re.match(rf"the engine's loop {SAID} (\d+) ms", line)[1]) < 1000 and "in compute" in line  # type: ignore[index]


def test_a_test_whose_server_has_a_slow_event_loop_fails() -> None:
    with (
        pytest.raises(AssertionError, match=rf"a loop {SAID} (?:[4-9]\d\d|\d{{4}}) ms of CPU time, at most 200 are allowed(.|\n)*in spin"),
        ServerProcess(STAND_IN) as server,
    ):
        assert server.ask("GET", "/spin").status == 200


def test_a_test_whose_engine_has_a_slow_step_fails() -> None:
    with (
        pytest.raises(AssertionError, match=rf"a loop {SAID} \d+ ms of CPU time, at most 1 are allowed"),
        ServerProcess("octavo serve", env=FAKE, watch="step.slow=1") as server,
    ):
        assert server.ask("POST", "/v1/completions", {"prompt": "a" * 4000, "n": 128, "max_tokens": 4}).status == 200
