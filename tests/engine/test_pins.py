"""Pinned prefixes in engine processes: every engine has them, also one that was started again, and none stays behind."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import patch

import pytest

from octavo import LLM, child
from octavo.engine import pins
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.pins import MOST_LOSSES, MOST_PINS, PinEntry, PinReconciler, PinRegistry
from octavo.engine.supervisor import Serving
from octavo.errors import DeadlineError, OctavoError, RequestError, UnavailableError
from octavo.messages import AddRequest, LifeRecord
from octavo.sampling_params import SamplingParams
from tests.support.engine_process import ask, engine_process, is_idle, read, run, until
from tests.support.http_server import wait_for

PREFIX = [5 + at % 90 for at in range(50)]  # 3 blocks of 16, and two tokens
PAIR = Serving(engines=2, max_restarts=100, beat_timeout=1.5, routing="turns")
SHORT = {"max_model_len": 256, "num_gpu_blocks_override": 100}


async def life(llm: AsyncLLM, question: AddRequest) -> LifeRecord:
    found = (await read(llm, question))[-1].life
    assert found is not None
    return found


def longer(tail: int, salt: str = "", count: int = 2) -> AddRequest:
    return replace(ask([*PREFIX, tail], count), cache_salt=salt)


def kill(llm: AsyncLLM, engine: int) -> None:
    pid = llm.replicas[engine].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


# promise: pinned-prefix
def test_a_pin_comes_back_with_its_engine_and_ends_in_the_middle_of_its_use(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, "forward.sleep=20", Serving(max_restarts=9), **SHORT) as llm:
            made = await llm.pins.pin("one", PREFIX, "salt")
            assert (made.prompt_tokens, made.num_tokens, made.num_blocks, made.held) == (50, 48, 3, True)
            lives = [await life(llm, longer(tail, salt)) for tail, salt in ((1, "salt"), (2, ""), (3, "other"))]
            assert [one.pinned_tokens for one in lives] == [48, 0, 0]
            kill(llm, 0)
            await until(lambda: llm.replicas[0].state == "dead")
            with pytest.raises(UnavailableError):
                await llm.pins.pin("two", PREFIX)
            await until(lambda: llm.state == "ready" and llm.pins.list()[0].held)
            assert (await life(llm, longer(4, "salt"))).cached_tokens == 48
            (found,) = llm.pins.list()
            assert (found.name, found.hits, found.tokens_saved) == ("one", 2, 96), "an engine that was started again goes on counting"

            timed = await llm.pins.pin("timed", PREFIX[::-1], seconds=1.0)
            assert timed.seconds_left is not None and 0 < timed.seconds_left < 1
            using = [asyncio.create_task(life(llm, question)) for question in (longer(5, "salt", 100), ask([*PREFIX[::-1], 1], 100))]
            await until(lambda: llm.stats.pin_hits == 4)
            assert llm.pins.release("one") and not llm.pins.release("one")
            await until(lambda: llm.stats.pinned_blocks == 0, "a pin did not end while it was used")
            assert llm.stats.running == 2 and not llm.pins.list()
            assert [one.pinned_tokens for one in await asyncio.gather(*using)] == [48, 48]
            await llm.pins.pin("idle", PREFIX, seconds=0.2)
            await until(lambda: is_idle(llm) and llm.stats.pinned_blocks == 0, "a pin did not end while nothing happened")

    run(main())


# promise: pinned-prefix-everywhere
@pytest.mark.soak
def test_every_engine_holds_it_after_deaths_and_a_rolling_restart(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, "", PAIR, max_pinned_blocks=5, **SHORT) as llm:
            await llm.pins.pin("one", PREFIX)
            assert llm.stats.pinned_blocks == 6 and [(await life(llm, longer(tail))).pinned_tokens for tail in (1, 2)] == [48, 48]
            with pytest.raises(RequestError, match=r"needs 3 blocks and 3 are pinned, but at most 5 may be \(--max-pinned-blocks\)"):
                await llm.pins.pin("large", PREFIX[::-1])
            with pytest.raises(RequestError, match="there is a prefix with the name 'one'"):
                await llm.pins.pin("one", PREFIX)
            kill(llm, 1)
            await until(lambda: not llm.replicas[1].is_ready)
            assert (await life(llm, longer(3))).pinned_tokens == 48
            await until(lambda: llm.replicas[1].is_ready and llm.pins.list()[0].held)
            await llm.restart(5.0)
            await until(lambda: llm.pins.list()[0].held)
            assert [(await life(llm, longer(tail))).pinned_tokens for tail in (4, 5)] == [48, 48]
            assert llm.pins.list()[0].hits == 5
            assert llm.pins.release("one")
            await until(lambda: is_idle(llm))

    run(main())


def test_who_gives_up_an_order_and_what_nobody_wants_is_released(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, "forward.sleep=200", Serving(), max_num_batched_tokens=16, max_num_seqs=4, **SHORT) as llm:
            order = asyncio.create_task(llm.pins.pin("one", PREFIX))
            await until(lambda: llm.stats.running == 1)
            assert not llm.pins.list()[0].held
            order.cancel()
            await until(lambda: is_idle(llm) and not llm.pins.list() and not llm.replicas[0].pins)
            order = asyncio.create_task(llm.pins.pin("two", PREFIX[::-1]))
            await until(lambda: llm.stats.running == 1)
            llm.pins.release("two")
            with pytest.raises(RequestError, match="the prefix was released"):
                await order
            stray = await llm.pins.pin("stray", PREFIX)
            (entry,) = llm.pins._registry.entries()
            llm.pins._registry.remove(entry.pin_id)  # as if its release had not reached the engine
            await until(lambda: is_idle(llm) and llm.stats.pinned_blocks == 0)
            assert stray.held

    run(main())


def test_an_idle_engine_wakes_by_itself_when_the_time_of_a_pin_is_over(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, "", Serving(), **SHORT) as llm:
            llm.pins.check = lambda: None  # type: ignore[method-assign]  # it would tell the engine what has ended
            await llm.pins.pin("brief", PREFIX, seconds=1.0)
            await until(lambda: llm.replicas[0].pins == {}, "the engine slept on")
            await until(lambda: is_idle(llm) and llm.stats.pinned_blocks == 0)

    run(main())


def test_a_prefix_that_engines_die_over_one_after_the_other_is_released(
    endless: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(pins, "AGAIN_SECONDS", 0.0)

    async def main() -> None:
        async with engine_process(endless, "", Serving(max_restarts=9), **SHORT) as llm:
            await llm.pins.pin("one", PREFIX)
            with patch.dict(os.environ, OCTAVO_DEBUG=os.environ["OCTAVO_DEBUG"] + ",exit.sigkill=1"):  # none survives its first step
                kill(llm, 0)
                await until(lambda: not llm.pins.list())
            await until(lambda: llm.state == "ready" and is_idle(llm) and llm.replicas[0].pins == {})

    run(main())
    assert sum("could not compute a pinned prefix again" in message for message in caplog.messages) == MOST_LOSSES
    assert f"A pinned prefix is released: {MOST_LOSSES} engines died one after the other while they computed it" in caplog.messages


def test_deaths_of_engines_count_only_where_none_has_computed_the_prefix_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "AGAIN_SECONDS", 0.0)
    dead, slow = UnavailableError("the engine died", 1, "engine_dead"), DeadlineError("it took too long")
    fates: list[OctavoError | None] = [dead, dead, None, dead, slow, dead, None, dead, dead, dead]
    replica: Any = SimpleNamespace(number=0, is_ready=True, pins={}, pins_before={}, send=lambda message: None)
    book = PinRegistry()

    async def compute(*_: object) -> None:
        if (fate := fates.pop(0)) is not None:
            raise fate

    async def main() -> None:
        book.add(entry("one"))
        book.confirm("id-one")
        keeper = PinReconciler(book, [replica], compute, leads=True)
        while book.entries():
            keeper.check()
            await asyncio.sleep(0)

    run(main())
    assert fates == [], "it was released too early"


def test_pins_that_were_released_leave_nothing_behind() -> None:
    replica: Any = SimpleNamespace(number=0, is_ready=True, pins={}, pins_before={}, send=lambda message: None)

    async def compute(*_: object) -> None:
        raise UnavailableError("the engine died", 1, "engine_dead")

    def size(keeper: PinReconciler) -> int:
        return sum(len(each) for each in vars(keeper).values() if isinstance(each, dict | set))

    async def main() -> None:
        keeper = PinReconciler(PinRegistry(), [replica], compute, leads=True)
        for number in range(9):
            with pytest.raises(UnavailableError):
                await keeper.pin("failed", PREFIX)
            keeper._registry.add(entry(str(number)))
            keeper._registry.confirm(f"id-{number}")
            keeper.check()
            await asyncio.sleep(0)
            assert keeper._not_before and keeper._losses, "its repair did not fail"
            assert keeper.release(str(number))
            await asyncio.sleep(0)
        keeper.check()
        assert size(keeper) == 0

    run(main())


def entry(name: str, seconds: float | None = None, maker: int = 0) -> PinEntry:
    return PinEntry(f"id-{name}", name, [1, 2, 3], "", maker or os.getpid(), None if seconds is None else time.monotonic() + seconds)


def test_processes_share_a_book() -> None:
    with tempfile.TemporaryFile() as file:
        first, second = PinRegistry(file.fileno()), PinRegistry(file.fileno())
        first.add(entry("one"))
        with pytest.raises(RequestError, match="there is a prefix with the name 'one'"):
            second.add(entry("one"))
        second.add(entry("brief", seconds=1))
        assert [each.name for each in first.entries()] == ["one", "brief"] and first.confirm("id-one")
        assert [each.confirmed for each in second.entries()] == [True, False]
        wait_for(lambda: [each.name for each in second.entries()] == ["one"])
        assert not second.confirm("id-brief")
        code = f"from octavo.engine.pins import PinRegistry; PinRegistry({file.fileno()}).remove('id-one')"
        subprocess.run([sys.executable, "-c", code], pass_fds=[file.fileno()], check=True)
        assert first.entries() == []
        for number in range(MOST_PINS):
            first.add(entry(str(number)))
        with pytest.raises(RequestError, match=f"{MOST_PINS} prefixes are pinned, which is the maximum"):
            second.add(entry("more"))


@contextmanager
def locked(file: IO[bytes]) -> Iterator[None]:
    """Another process has the lock, as one that was stopped would."""
    code = f"import fcntl; fcntl.lockf({file.fileno()}, fcntl.LOCK_EX); print(flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[file.fileno()])
    with holder:
        assert holder.stdout is not None and holder.stdout.readline()
        yield
        holder.kill()


def test_who_keeps_the_book_locked_stops_no_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    replica: Any = SimpleNamespace(number=0, is_ready=True, pins={}, pins_before={}, send=lambda message: None)
    tries: list[float] = []
    monkeypatch.setattr(pins, "time", SimpleNamespace(monotonic=time.monotonic, sleep=tries.append))

    async def main(file: IO[bytes]) -> None:
        async def compute(*_: object) -> None:
            held.enter_context(locked(file))

        book = PinRegistry(file.fileno())
        keeper = PinReconciler(book, [replica], compute, leads=False)
        with ExitStack() as held, pytest.raises(UnavailableError, match="another API process keeps the list of pinned prefixes locked"):
            await keeper.pin("one", PREFIX)  # locked while it is computed, so it can neither be confirmed nor removed
        tries.clear()
        with locked(file):
            for call in (keeper.list, lambda: keeper.release("one"), keeper.list):
                with pytest.raises(UnavailableError):
                    call()
            assert not tries, "every call waits"
            keeper.check()
        assert [each.name for each in keeper.list()] == ["one"]
        keeper.check()
        assert keeper.list() == [] and not keeper._unwanted
        book.add(entry("two"))
        assert keeper.release("two") and not keeper.release("two")

    with tempfile.TemporaryFile() as file:
        run(main(file))


def test_an_order_whose_process_has_died_is_dropped(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, "", Serving(), **SHORT) as llm:
            gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
            llm.pins._registry.add(entry("orphan", maker=int(gone.stdout)))
            await until(lambda: not llm.pins.list())

    run(main())


# promise: pin-prefix, pinned-prefixes, unpin-prefix
def test_the_python_api_pins_lists_and_releases(stories: str) -> None:
    with LLM(stories, max_model_len=128, num_gpu_blocks_override=40, block_size=8) as llm:
        free = llm.stats().free_blocks
        made = llm.pin_prefix("story", "Once upon a time, there was a little girl named Lily. She loved to play outside.")
        assert made.num_tokens == made.num_blocks * 8 and 0 <= made.prompt_tokens - made.num_tokens < 8
        with pytest.raises(RequestError, match="there is a prefix with the name 'story'"):
            llm.pin_prefix("story", "Once")
        with pytest.raises(RequestError, match="give either prompt or messages"):
            llm.pin_prefix("other")
        llm.reset_prefix_cache()
        text = "Once upon a time, there was a little girl named Lily. She loved to play outside. One day"
        output = llm.generate(text, SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)[0]
        assert output.num_cached_tokens == output.metrics.pinned_tokens == made.num_tokens
        (found,) = llm.pinned_prefixes()
        assert (found.hits, found.tokens_saved) == (1, made.num_tokens)
        llm.unpin_prefix("story")
        with pytest.raises(RequestError, match="there is no pinned prefix with the name 'story'"):
            llm.unpin_prefix("story")
        assert output.outputs[0].text == llm.generate(text, SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)[0].outputs[0].text
        llm.pin_prefix("brief", list(range(3, 40)), ttl=0.05)
        wait_for(lambda: llm.pinned_prefixes() == [])
        assert llm.stats().free_blocks == free
