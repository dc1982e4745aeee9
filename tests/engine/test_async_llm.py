"""An engine in a process of its own: the same text as in this one, and an end for every request, whatever becomes of it."""

import asyncio
import os
import signal
import time
from contextlib import aclosing, suppress
from unittest.mock import Mock, patch

import pytest

from octavo import LLM, SamplingParams
from octavo.child import Restarts
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.replica import Link
from octavo.engine.supervisor import Serving, Supervisor
from octavo.engine.wire import Add, Refused
from octavo.errors import DeadlineError, EngineError, OverloadError, RequestError, UnavailableError
from octavo.messages import AddRequest
from octavo.outputs import CompletionOutput, TextDelta
from tests.support.engine_process import ask, engine_process, exists, is_idle, read, run, tokens, until
from tests.support.fair_clock import FairClock

PROMPTS = ["Once upon a time, there was a little girl named Lily. She loved to play", "Tim and Sam", "One day, a cat"]
MIXED = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(n=3, seed=5, max_tokens=12),
    SamplingParams(seed=6, max_tokens=40, stop=[" the", "was"]),
    SamplingParams(seed=7, max_tokens=20, stop=["."], include_stop_str_in_output=True, min_tokens=3),
    SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2),
    SamplingParams(seed=8, n=2, max_tokens=5, logprobs=0, bad_words=["time"], repetition_penalty=1.2),
    SamplingParams(seed=9, max_tokens=5, detokenize=False),
]


def put_together(deltas: list[TextDelta], count: int) -> list[CompletionOutput]:
    samples = [CompletionOutput(index) for index in range(count)]
    for delta in deltas:
        sample = samples[delta.index]
        sample.text += delta.text
        sample.token_ids += delta.token_ids
        sample.finish_reason, sample.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.logprobs is not None:
            sample.logprobs = (sample.logprobs or []) + delta.logprobs
    return samples


def test_text_is_that_of_the_offline_engine(stories: str) -> None:
    cases = [(PROMPTS[number % 3], params) for number, params in enumerate(MIXED)]
    with LLM(stories, num_gpu_blocks_override=200) as offline:
        wanted = offline.generate([prompt for prompt, _ in cases], [params for _, params in cases], use_tqdm=False)

    async def streamed() -> list[list[TextDelta]]:
        async with engine_process(stories, runner="model", num_gpu_blocks_override=200) as llm:
            asks = [AddRequest("", llm.encoder.encode(prompt)[1], params) for prompt, params in cases]
            return await asyncio.gather(*(read(llm, each) for each in asks))

    for output, deltas, (_, params) in zip(wanted, run(streamed()), cases):
        for got, sample in zip(put_together(deltas, params.n), output.outputs, strict=True):
            assert (got.text, got.token_ids) == (sample.text, sample.token_ids)
            assert (got.finish_reason, got.stop_reason) == (sample.finish_reason, sample.stop_reason)
            assert (got.logprobs is None) == (sample.logprobs is None)
            for one, other in zip(got.logprobs or [], sample.logprobs or [], strict=True):
                assert list(one) == list(other)
                assert [each.logprob for each in one.values()] == pytest.approx([each.logprob for each in other.values()], abs=1e-4)
        prompts = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
        assert [[choices and list(choices) for choices in each] for each in prompts] == (
            [] if output.prompt_logprobs is None else [[choices and list(choices) for choices in output.prompt_logprobs]]
        )
        lives = [delta.life for delta in deltas if delta.life is not None]
        assert lives[0].first_token is not None and lives[-1].finished is not None


def test_requests_that_are_left_in_any_state_leave_nothing_behind(endless: str) -> None:
    """Before the first step, in the queue, in a prompt of many chunks, while it decodes, by one sample, at the end, by a task's end."""

    async def main() -> None:
        async with engine_process(endless, "forward.sleep=5", max_num_seqs=2, max_num_batched_tokens=8, max_model_len=300) as llm:
            alone = await tokens(llm, ask([7, 8, 9], 20))
            long, short = ask(list(range(200)), 90, n=2), ask([1, 2], 90)
            never = llm.generate(short)
            await never.aclose()
            for question in (long, short):
                for seconds in (0.0, 0.02, 0.1, 0.25):
                    task = asyncio.create_task(read(llm, question))
                    queued = asyncio.create_task(read(llm, short))
                    canary = asyncio.create_task(tokens(llm, ask([7, 8, 9], 20)))
                    await asyncio.sleep(seconds)
                    task.cancel()
                    queued.cancel()
                    assert await canary == alone
                    for each in (task, queued):
                        with suppress(asyncio.CancelledError):
                            await each
            async with aclosing(llm.generate(short)) as news:
                async for _ in news:
                    break
            async for _ in llm.generate(short):
                break
            await until(lambda: is_idle(llm), f"idle, but {llm.stats}")
            assert llm.stats.generation_tokens < 1000, "they went on"

    run(main())


@pytest.mark.parametrize(
    ("how", "verdict", "most"),
    [(signal.SIGKILL, "SIGKILL", 1.0), (signal.SIGSTOP, "it was stopped", 1.0), (signal.SIGSTOP, "no sign of life for 1.5 s", 3.0)],
)
@pytest.mark.timed("how soon a dead or silent engine is noticed")
def test_an_engine_that_dies_or_hangs_ends_every_request_and_another_serves(
    endless: str, how: signal.Signals, verdict: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "life" in verdict:  # it hangs in a way that only its silence tells
        monkeypatch.setattr(Supervisor, "is_stopped", False)

    async def main() -> None:
        serving = Serving(beat_timeout=1.5)
        async with engine_process(endless, "forward.sleep=10", serving, max_num_seqs=4) as llm:
            whole = await tokens(llm, ask([1, 2, 3], 20))
            first = llm.engine_pid
            assert first is not None and llm.facts.epoch == 1
            streams = [asyncio.create_task(read(llm, ask([1, 2, number], 400))) for number in range(6)]
            await asyncio.sleep(0.2)
            clock = FairClock()
            os.kill(first, how)
            await until(lambda: llm.state == "dead")
            assert clock.seconds() < most
            with pytest.raises(UnavailableError, match="the engine is dead"):
                await read(llm, ask([1]))
            for result in await asyncio.gather(*streams, return_exceptions=True):
                assert isinstance(result, UnavailableError) and result.code == "engine_dead" and verdict in str(result)
            assert clock.seconds() < most + 1
            assert not exists(first)
            await until(lambda: llm.state == "ready")
            assert llm.facts.epoch == 2 and llm.engine_pid != first
            assert await tokens(llm, ask([1, 2, 3], 20)) == whole
            await until(lambda: is_idle(llm))

    run(main())


def test_an_engine_that_dies_too_often_stays_dead(endless: str) -> None:
    async def main() -> None:
        deaths = list[Exception]()
        async with engine_process(endless, "exit.sigkill@3", Serving(max_restarts=1), deaths.append) as llm:
            for epoch in (1, 2):
                await until(lambda: llm.state == "ready")
                assert llm.facts.epoch == epoch and not deaths
                with pytest.raises(UnavailableError, match="SIGKILL"):
                    await read(llm, ask([1]))
            await until(lambda: bool(deaths))
            assert llm.state == "dead" and llm.engine_pid is None and "SIGKILL" in str(deaths)
            with pytest.raises(UnavailableError):
                await read(llm, ask([1]))

    run(main())


@pytest.mark.parametrize("broken", [(Link, "ping"), (Restarts, "pause")])
def test_what_breaks_a_watchman_is_told_and_ends_it(
    endless: str, broken: tuple[type, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A task that ended by a mistake of ours would leave an engine that nobody watches, or starts again."""

    async def main() -> None:
        deaths = list[Exception]()
        async with engine_process(endless, on_dead=deaths.append) as llm:
            monkeypatch.setattr(*broken, Mock(side_effect=RuntimeError("a bug")))
            assert llm.engine_pid is not None
            if broken[0] is Restarts:
                os.kill(llm.engine_pid, signal.SIGKILL)
            await until(lambda: bool(deaths))
            assert llm.state == "dead" and isinstance(deaths[0], EngineError) and str(deaths[0]) == "RuntimeError: a bug"
        assert "Traceback" in caplog.text

    run(main())


def test_a_loop_that_does_not_turn_is_dead(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, "forward.sleep=30000", Serving(hang_timeout=0.4)) as llm:
            with pytest.raises(UnavailableError, match=r"a step took more than 0\.4 s"):
                await read(llm, ask([1]))

    run(main())


@pytest.mark.timed("a refusal comes before the running step ends")
def test_who_comes_when_the_queue_is_full_hears_so_while_a_step_runs(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, "forward.sleep=2000", Serving(max_queue=1), max_num_seqs=1) as llm:
            running, waiting = (asyncio.create_task(read(llm, ask([1, 2], 2))) for _ in range(2))
            await asyncio.sleep(0.3)
            took = []
            for _ in range(5):
                start = time.monotonic()
                with pytest.raises(OverloadError, match="max_queue is 1") as refused:
                    await read(llm, ask([3]))
                took.append(time.monotonic() - start)
                assert refused.value.retry_after > 0
            assert min(took) < 0.5 and not running.done()  # a step takes two seconds
            assert llm.num_open == 2
            waiting.cancel()
            running.cancel()

    run(main())


# promise: retry-after
@pytest.mark.timed("the estimate of the waiting time")
def test_a_refusal_says_how_long_the_queue_will_take(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, "forward.sleep=20", Serving(max_queue=8), max_num_seqs=1) as llm:
            tasks = [asyncio.create_task(read(llm, ask([1, 2, number], 20))) for number in range(9)]  # 0.4 s each, and more
            await asyncio.gather(*tasks[:2])
            tasks += [asyncio.create_task(read(llm, ask([1, 2, number], 20))) for number in range(2)]
            await asyncio.sleep(0.05)
            with pytest.raises(OverloadError) as refused:
                await read(llm, ask([3]))
            assert 8 * 0.4 <= refused.value.retry_after < 30
            for task in tasks:
                task.cancel()

    run(main())


@pytest.mark.timed("requests end when their time limits are over, not later")
def test_who_waits_too_long_is_told_and_so_is_who_takes_too_long(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, "forward.sleep=20", Serving(queue_timeout=0.3), max_num_seqs=1) as llm:
            running = asyncio.create_task(tokens(llm, ask([1, 2], 60)))
            await asyncio.sleep(0.1)
            with pytest.raises(UnavailableError, match=r"queue_timeout is 0\.3 s") as late:
                await read(llm, ask([3]))
            assert late.value.code == "queue_timeout" and late.value.retry_after > 0
            assert len(await running) == 60
            news, start, clock = list[TextDelta](), time.monotonic(), FairClock()
            with pytest.raises(DeadlineError, match=r"after 0\.5 s") as deadline:
                async for each in llm.generate(ask([1, 2], 400), timeout=0.5):
                    news += each
            assert deadline.value.code == "deadline_exceeded"
            assert 0.45 < time.monotonic() - start and clock.seconds() < 2
            assert [token for delta in news for token in delta.token_ids], "what was there was read"
            await until(lambda: is_idle(llm))

    run(main())


def test_a_slow_reader_gets_one_delta_for_each_sample_and_the_whole_text(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless) as llm:
            whole = await read(llm, ask([4, 5], 60, n=2))
            items, before = list[list[TextDelta]](), llm.stats.generation_tokens
            async for news in llm.generate(ask([4, 5], 60, n=2)):
                items.append(news)
                await until(lambda: llm.stats.generation_tokens == before + 120 and not llm.stats.running)
            assert all(len({delta.index for delta in news}) == len(news) for news in items) and len(items) <= 2
            slow = [delta for news in items for delta in news]
            assert [sample.text for sample in put_together(slow, 2)] == [sample.text for sample in put_together(whole, 2)]
            assert {delta.index: delta.finish_reason for delta in slow} == {0: "length", 1: "length"}
            lives = [delta.life for delta in slow if delta.finish_reason]
            assert all(life is not None and life.finished is not None for life in lives[-1:])

    run(main())


def test_what_can_never_be_served_is_refused_before_anything_is_sent(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, max_model_len=64) as llm:
            cases: list[tuple[AddRequest, str | None]] = [
                (ask([1] * 70, 1), "prompt"),
                (ask([99999]), "prompt"),
                (ask([]), "prompt"),
                (ask([1], n=1000), "n"),
                (ask([1], n=2**70), "n"),
                (ask([1], logprobs=21), "logprobs"),
                (ask([1], stop=["x" * 2_000_000]), None),
            ]
            for question, param in cases:
                with pytest.raises(RequestError) as refused:
                    await read(llm, question)
                assert refused.value.param == param
            assert llm.num_open == 0 and len(await tokens(llm, ask([1], 5))) == 5

    run(main())


def test_an_answer_that_comes_while_the_request_is_sent_is_read_and_a_request_that_cannot_be_sent_leaves_nothing(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless) as llm:
            (replica,) = llm.replicas

            def refuse(body: Add) -> None:
                llm.on_refused(Refused(body.request.request_id, "request", "too late", "prompt"))

            def break_down(body: Add) -> None:
                raise OSError("no memory")

            for send, error in ((refuse, RequestError), (break_down, OSError)):
                with patch.object(replica, "send", send), pytest.raises(error):
                    await asyncio.wait_for(read(llm, ask([1]), timeout=99), 9)
            with patch.object(llm._outputs, "add", side_effect=OSError), pytest.raises(OSError):
                await read(llm, ask([1], 99))
            await until(lambda: is_idle(llm))
            assert not (llm._streams or llm._outputs._requests)

    run(main())


def test_drained_streams_end_whole_and_newcomers_are_turned_away(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, "forward.sleep=5") as llm:
            streams = [asyncio.create_task(tokens(llm, ask([1, number], 50))) for number in range(20)]
            await asyncio.sleep(0.1)
            drained = asyncio.create_task(llm.drain(60))
            await asyncio.sleep(0)
            assert llm.state == "draining"
            with pytest.raises(UnavailableError, match="draining"):
                await read(llm, ask([1]))
            assert await drained == 0
            assert [len(result) for result in await asyncio.gather(*streams)] == [50] * 20
        async with engine_process(endless, "forward.sleep=50") as llm:
            stuck = asyncio.create_task(read(llm, ask([1], 400)))
            await asyncio.sleep(0.1)
            pid = llm.engine_pid
            assert await llm.drain(0.1) == 1 and pid is not None
            await llm.close()
            with pytest.raises(UnavailableError, match="shutting down"):
                await stuck
            assert not exists(pid)

    run(main())


def test_two_processes_share_an_engine(endless: str) -> None:
    """Here two clients in one; one of them leaves in the middle, and its requests with it."""

    async def main() -> None:
        async with engine_process(endless, "forward.sleep=5", max_num_seqs=4) as llm:
            other = AsyncLLM(llm.config, Serving(beat_timeout=1.5), address=llm.address)
            await other.start()
            assert other.facts == llm.facts and other.engine_pid is None
            mine, theirs = ([asyncio.create_task(tokens(each, ask([number], 12))) for number in range(6)] for each in (llm, other))
            assert await asyncio.gather(*mine) == await asyncio.gather(*theirs)
            gone = asyncio.create_task(read(other, ask([1], 400)))
            await asyncio.sleep(0.1)
            await other.close()
            with pytest.raises(UnavailableError):
                await gone
            await until(lambda: is_idle(llm), f"{llm.stats}")
            assert llm.stats.generation_tokens < 12 * 12 + 390, "it went on for nobody"

            third = AsyncLLM(llm.config, Serving(beat_timeout=1.5), address=llm.address)
            await third.start()
            open_there = asyncio.create_task(read(third, ask([1], 400)))
            await asyncio.sleep(0.1)
            assert llm.engine_pid is not None
            os.kill(llm.engine_pid, signal.SIGKILL)
            with pytest.raises(UnavailableError, match="the engine died"):  # by silence, or the next one says hello before
                await open_there
            await until(lambda: llm.state == third.state == "ready" and third.facts.epoch == 2)
            assert await tokens(third, ask([1], 5)) == await tokens(llm, ask([1], 5))
            await third.close()

    run(main())


@pytest.mark.parametrize("fault", ["ipc.drop@5", "ipc.truncate@5", "ipc.garbage@5"])
def test_a_frame_that_is_lost_ends_what_was_open_with_an_error_and_nothing_else(endless: str, fault: str) -> None:
    async def main() -> None:
        async with engine_process(endless, f"forward.sleep=5,{fault}") as llm:
            streams = [asyncio.create_task(tokens(llm, ask([1, number], 100))) for number in range(3)]
            for result in await asyncio.gather(*streams, return_exceptions=True):
                assert isinstance(result, EngineError) and "lost" in str(result)
            await until(lambda: is_idle(llm))
            assert llm.facts.epoch == 1 and len(await tokens(llm, ask([1], 30))) == 30

    run(main())


def test_an_error_of_the_engine_has_its_code(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, "forward.nan@4") as llm:
            news = list[TextDelta]()
            with pytest.raises(EngineError, match="numerical_error") as failed:
                async for each in llm.generate(ask([1], 20)):
                    news += each
            assert failed.value.code == "numerical_error" and sum(len(delta.token_ids) for delta in news) == 3

    run(main())


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_readers_of_many_streams_leave_half_of_the_time_to_new_requests(endless: str) -> None:
    """A turn of all readers takes 10 ms of CPU, and that of who comes new 1 ms: one after the other, it would get an eleventh."""

    async def slow_reader(llm: AsyncLLM, number: int) -> None:
        while True:
            async for _ in llm.generate(ask([number], 400)):
                spin(0.00025)

    async def main() -> None:
        async with engine_process(endless) as llm:
            streams = [asyncio.create_task(slow_reader(llm, number)) for number in range(40)]
            await asyncio.sleep(0.5)
            turns, end = 0, time.thread_time() + 1
            while time.thread_time() < end:
                spin(0.001)
                await asyncio.sleep(0)
                turns += 1
            num_open = llm.num_open
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            assert num_open == 40 and turns > 250

    run(main())


@pytest.mark.timed("output is read every 50 ms while requests are sent")
def test_news_wait_while_requests_keep_coming_but_not_for_long(endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[Link]()
    look = Link._take
    monkeypatch.setattr(Link, "_take", lambda link: (looks.append(link), look(link)))

    async def main() -> None:
        async with engine_process(endless, "", Serving(max_queue=100_000)) as llm:  # more than any machine sends in that time
            stream = asyncio.create_task(tokens(llm, ask([1], 400)))
            await asyncio.sleep(0.1)
            looks.clear()
            start, others = time.monotonic(), []
            while time.monotonic() < start + 0.3:
                others.append(asyncio.create_task(tokens(llm, ask([2], 1))))
                await asyncio.sleep(0)  # it is sent
            assert 1 <= len(looks) < 50  # one after 50 ms at least; without waiting it would be hundreds
            assert len(await stream) == 400 and all(await asyncio.gather(*others))

    run(main())


def test_however_much_is_sent_what_came_is_looked_at_once_so_that_others_get_their_turn(
    endless: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[Link]()
    look = Link._take
    monkeypatch.setattr(Link, "_take", lambda link: (looks.append(link), look(link)))

    async def main() -> None:
        async with engine_process(endless) as llm:
            streams = [asyncio.create_task(tokens(llm, ask([number], 5))) for number in range(50)]
            await asyncio.sleep(0)
            looks.clear()
            while not looks:
                await asyncio.sleep(0)
            assert llm.num_open == 50 and len(looks) == 1
            assert [len(found) for found in await asyncio.gather(*streams)] == [5] * 50

    run(main())
