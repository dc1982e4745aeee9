"""Several engines behind one `AsyncLLM`: requests go on when an engine dies, with the text they would have had."""

import asyncio
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.async_llm import AsyncLLM
from octavo.engine.replica import Replica
from octavo.engine.supervisor import Serving
from octavo.errors import DeadlineError, EngineError, OverloadError
from octavo.messages import AddRequest, Beams
from octavo.outputs import TextDelta
from octavo.structured_outputs import StructuredOutputsParams
from tests.support.engine_process import ask, engine_process, is_idle, read, run, tokens, until
from tests.support.hybrids import hybrid_story_folder

THREE = Serving(engines=3, max_restarts=100, beat_timeout=1.5)


def questions() -> list[AddRequest]:
    """Two of each kind: seeded and not, samples, penalties, stops, logprobs, of the prompt too, a long prompt, an early end."""
    kinds: list[dict[str, Any]] = [
        {}, {"seed": None}, {"temperature": 0}, {"n": 3}, {"n": 2, "seed": None, "logprobs": 2}, {"repetition_penalty": 1.3},
        {"min_tokens": 20, "stop_token_ids": [5, 6, 7]}, {"prompt_logprobs": 1}, {"bad_words": ["the"]}, {"stop": ["once", "the", "a"]},
    ]  # fmt: skip
    prompts = [[1, 2, 3], list(range(3, 120)), [7]]
    return [ask(prompts[number % 3], 40 + number, **kind) for number, kind in enumerate(kinds * 2)]


def samples(deltas: list[TextDelta]) -> dict[int, tuple[str, list[int], str | None, int]]:
    """Of each sample: text, ids, how it ended, and how many logprobs came."""
    found: dict[int, tuple[str, list[int], str | None, int]] = {}
    for delta in deltas:
        text, ids, _, logprobs = found.get(delta.index, ("", [], None, 0))
        found[delta.index] = text + delta.text, ids + delta.token_ids, delta.finish_reason, logprobs + len(delta.logprobs or [])
    return found


def kill(llm: AsyncLLM, engine: int, how: signal.Signals = signal.SIGKILL) -> None:
    pid = llm.replicas[engine].pid
    assert pid is not None
    os.kill(pid, how)


# promise: data-parallel-size
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_no_stream_is_lost_when_engines_die(endless: str, how: signal.Signals) -> None:
    async def main() -> None:
        async with engine_process(endless, "forward.sleep=10", THREE, max_num_seqs=32) as llm:
            quiet = [samples(deltas) for deltas in await asyncio.gather(*(read(llm, each) for each in questions()))]
            llm._num_seeds, counted = 0, llm.stats.generation_tokens  # requests get the same seeds again
            streams = [asyncio.create_task(read(llm, each)) for each in questions()]
            for victim in (0, 2):
                await asyncio.sleep(0.15)
                kill(llm, victim, how)
                await until(lambda victim=victim: llm.replicas[victim].state == "dead")  # type: ignore[misc]
                assert llm.state == "ready"
            found = await asyncio.gather(*streams)
            assert [samples(deltas) for deltas in found] == quiet
            resumed = [max(delta.life.resumed for delta in deltas if delta.life is not None) for deltas in found]
            assert sum(map(bool, resumed)) >= 3, "hardly any request was moved"
            await until(lambda: all(replica.state == "ready" for replica in llm.replicas))
            await until(lambda: is_idle(llm))
            assert [replica.facts.epoch for replica in llm.replicas if replica.facts] == [2, 1, 2]
            assert llm.stats.generation_tokens >= 1.8 * counted, "a new engine begins to count at 0"

    run(main())


# promise: data-parallel-size
def test_a_stream_of_a_recurrent_model_goes_on_in_an_engine_without_its_states(tmp_path: Path) -> None:
    folder = str(hybrid_story_folder(tmp_path / "model"))
    asked = [ask(list(range(3, 3 + length)), 200, temperature=1.0, n=1 + length % 2) for length in (33, 70, 101)]

    async def main() -> None:
        serving, settings = Serving(engines=2, max_restarts=100), {"load_format": "dummy", "dtype": "float32", "max_num_seqs": 8}
        async with engine_process(folder, "", serving, runner="model", num_gpu_blocks_override=400, **settings) as llm:
            quiet = [samples(deltas) for deltas in await asyncio.gather(*(read(llm, each) for each in asked))]
            counted = llm.stats.generation_tokens
            streams = [asyncio.create_task(read(llm, each)) for each in asked]
            await until(lambda: llm.stats.generation_tokens > counted + 60)
            kill(llm, 0)
            found = await asyncio.gather(*streams)
            assert [samples(deltas) for deltas in found] == quiet
            assert any(delta.life.resumed for deltas in found for delta in deltas if delta.life is not None), "no request was moved"

    run(main())


def busy(each: Replica) -> bool:
    return each.stats is not None and each.stats.running > 0


def test_a_beam_search_begins_again_in_another_engine(endless: str) -> None:
    """Its client has no token yet, and it comes to the same answers."""

    async def main() -> None:
        async with engine_process(endless, "forward.sleep=10", THREE, max_num_seqs=8) as llm:
            question = replace(ask([1, 2, 3], 120, temperature=0, n=2), beams=Beams(3))
            quiet = samples(await read(llm, question))
            await until(lambda: not any(busy(each) for each in llm.replicas))
            stream = asyncio.create_task(read(llm, question))
            await until(lambda: any(busy(each) for each in llm.replicas))
            kill(llm, next(number for number, each in enumerate(llm.replicas) if busy(each)))
            found = await stream
            assert samples(found) == quiet and len(quiet) == 2
            assert max(delta.life.resumed for delta in found if delta.life is not None) == 1

    run(main())


def test_a_grammar_goes_on_where_its_text_was(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, "forward.sleep=10", THREE, max_num_seqs=8) as llm:
            question = ask([1, 2], 300, n=2, structured_outputs=StructuredOutputsParams(regex="[a-z]{150}"))
            quiet, found = samples(await read(llm, question)), list[TextDelta]()
            async for news in llm.generate(question):
                found += news
                if sum(len(delta.token_ids) for delta in found) >= 20 and len(llm.replicas) == sum(each.is_ready for each in llm.replicas):
                    kill(llm, next(delta.life.engine for delta in found if delta.life is not None))
                    await until(lambda: not all(each.is_ready for each in llm.replicas))
            assert samples(found) == quiet and [len(text) for text, *_ in quiet.values()] == [150, 150]
            assert found[-1].life is not None and found[-1].life.resumed == 1

    run(main())


@pytest.mark.soak
def test_whoever_was_served_is_not_refused_where_the_queue_is_full(endless: str) -> None:
    async def main() -> None:
        serving = Serving(engines=2, max_restarts=0, max_queue=0)
        async with engine_process(endless, "forward.sleep=10", serving, max_num_seqs=2) as llm:
            wanted = [await tokens(llm, ask([number], 60)) for number in range(4)]
            streams = [asyncio.create_task(tokens(llm, ask([number], 60))) for number in range(4)]
            await until(lambda: all(replica.stats.running == 2 for replica in llm.replicas))
            kill(llm, 0)
            assert await asyncio.gather(*streams) == wanted

    run(main())


def test_a_full_queue_sends_a_request_to_another_engine_and_the_last_one_refuses_it(endless: str) -> None:
    async def main() -> None:
        serving = Serving(engines=2, max_queue=0, routing="turns")
        async with engine_process(endless, "forward.sleep=10", serving, max_num_seqs=1) as llm:
            first = asyncio.create_task(tokens(llm, ask([1], 80)))
            await until(lambda: llm.stats.running == 1)
            short = await read(llm, ask([2], 4))
            assert short[-1].life is not None and short[-1].life.engine == 1
            second = asyncio.create_task(tokens(llm, ask([3], 80)))  # its turn is the engine that is busy
            await until(lambda: llm.stats.running == 2)
            with pytest.raises(OverloadError, match="the queue is full"):
                await read(llm, ask([4], 4))
            assert [len(await first), len(await second)] == [80, 80]

    run(main())


def test_a_request_that_kills_its_engines_is_failed_by_name_and_harms_nobody_else(endless: str) -> None:
    """Every engine dies in its third step. Whoever had no token by then twice in a row ends, and the server goes on."""

    async def main() -> None:
        async with engine_process(endless, "exit.sigkill@3", THREE, max_num_batched_tokens=8, max_num_seqs=2) as llm:
            with pytest.raises(EngineError, match="lost 2 engines in a row, and no token came between") as error:
                await read(llm, ask(list(range(100)), 4))  # its prompt takes thirteen steps
            assert error.value.code == "engine_lost"
            assert len(await tokens(llm, ask([1], 2))) == 2 and llm.num_open == 0

    run(main())


def test_requests_wait_for_an_engine_where_none_is_left_and_deadlines_run_on(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, "forward.sleep=10", Serving(engines=2, max_restarts=100), max_num_seqs=8) as llm:
            whole = await tokens(llm, ask([1, 2, 3], 60))
            stream, late = asyncio.create_task(tokens(llm, ask([1, 2, 3], 60))), asyncio.create_task(read(llm, ask([4], 400), 0.8))
            for engine in (0, 1):
                before = llm.stats.generation_tokens
                await until(lambda before=before: llm.stats.generation_tokens > before + 5)  # type: ignore[misc]
                kill(llm, engine)
                await until(lambda engine=engine: llm.replicas[engine].state == "dead")  # type: ignore[misc]
            assert llm.state == "dead"
            with pytest.raises(DeadlineError):
                await late
            assert await stream == whole
            await until(lambda: is_idle(llm))

    run(main())


@pytest.mark.soak
def test_all_engines_are_replaced_under_load_without_an_error(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, "forward.sleep=5", THREE, max_num_seqs=8) as llm:
            wanted = [await tokens(llm, ask([number], 30)) for number in range(4)]
            long = await tokens(llm, ask([9], 300))
            replacing = asyncio.create_task(llm.restart(0.5))
            slow = asyncio.create_task(tokens(llm, ask([9], 300)))  # longer than an engine waits: it moves
            while not replacing.done():
                draining = {replica.number for replica in llm.replicas if replica.state == "draining"}
                found = await asyncio.gather(*(read(llm, ask([number], 30)) for number in range(4)))
                assert [samples(deltas)[0][1] for deltas in found] == wanted
                assert not draining & {delta.life.engine for deltas in found for delta in deltas if delta.life is not None}
                assert sum(replica.is_ready for replica in llm.replicas) >= 2
            await replacing
            assert await slow == long
            assert [replica.facts.epoch for replica in llm.replicas if replica.facts] == [2, 2, 2]
            await until(lambda: is_idle(llm))

    run(main())


# promise: data-parallel-size
def test_requests_of_one_prefix_meet_in_one_engine_and_say_so(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, "", THREE) as llm:
            prefixes = [[start + (7 * place) % 97 for place in range(64)] for start in (0, 100, 200)]
            lives = []
            for turn in range(4):
                for prefix in prefixes:
                    deltas = await read(llm, ask([*prefix, turn], 2))
                    lives.append(deltas[-1].life)
            first, later = lives[:3], lives[3:]
            assert {life.engine for life in first if life} == {0, 1, 2} and {life.routing for life in first if life} == {"load"}
            for number, life in enumerate(later):
                assert life is not None and (life.routing, life.engine, life.cached_tokens) == ("prefix", first[number % 3].engine, 64)  # type: ignore[union-attr]
            salted = await read(llm, AddRequest("", [*prefixes[0], 9], ask([1], 2).params, cache_salt="other"))
            assert salted[-1].life is not None and (salted[-1].life.cached_tokens, salted[-1].life.routing) == (0, "load")

    run(main())


async def storm(llm: AsyncLLM, streams: int, steps: int, pause: tuple[float, float]) -> list[float]:
    """Kills and stops engines at random, until they have made so many steps. Returns the longest pause of each request that moved."""
    rng = random.Random(7)
    asked = [ask([start, *range(start % 40)], 60 + start, n=1 + start % 2, logprobs=1 if start % 5 == 0 else None) for start in range(24)]
    wanted = [samples(deltas) for deltas in await asyncio.gather(*(read(llm, each) for each in asked))]
    pauses, over = list[float](), False

    async def client(number: int) -> None:
        while not over:
            number = (number + 7) % len(asked)
            last, longest, found = time.monotonic(), 0.0, list[TextDelta]()
            async for news in llm.generate(asked[number]):
                last, longest = time.monotonic(), max(longest, time.monotonic() - last)
                found += news
            assert samples(found) == wanted[number], f"question {number}"
            if max(delta.life.resumed for delta in found if delta.life is not None):
                pauses.append(longest)

    clients = [asyncio.create_task(client(number)) for number in range(streams)]
    while sum(llm.stats.steps) < steps and not any(task.done() for task in clients):
        await asyncio.sleep(rng.uniform(*pause))
        await until(lambda: not any(stream.losses for stream in llm._streams.values()))  # one that loses two engines is failed
        ready = [replica.number for replica in llm.replicas if replica.state == "ready" and replica.pid is not None]
        if len(ready) > 1:
            kill(llm, rng.choice(ready), rng.choice([signal.SIGKILL, signal.SIGSTOP]))
    over = True
    await asyncio.gather(*clients)
    return sorted(pauses)


@pytest.mark.soak
def test_a_storm_of_deaths_changes_no_text(endless: str) -> None:
    async def main() -> None:
        async with engine_process(endless, "forward.sleep=2", THREE, max_num_seqs=16) as llm:
            pauses = await storm(llm, streams=16, steps=1500, pause=(0.3, 0.8))
            assert len(pauses) > 10, "hardly any request was moved"
            await until(lambda: all(replica.state == "ready" for replica in llm.replicas))
            await until(lambda: is_idle(llm))

    run(main())


@pytest.mark.soak
def test_a_long_storm_of_deaths_changes_no_text(endless: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with engine_process(endless, "", THREE, max_num_seqs=16) as llm:
            pauses = await storm(llm, streams=24, steps=100_000, pause=(0.5, 3.0))
            await until(lambda: all(replica.state == "ready" for replica in llm.replicas))
            await until(lambda: is_idle(llm))
            deaths = sum(replica.facts.epoch - 1 for replica in llm.replicas if replica.facts)
            median = pauses[len(pauses) // 2]
            with capsys.disabled():
                print(f"\n{deaths} deaths, {len(pauses)} requests moved; their pause: median {median:.2f} s, worst {pauses[-1]:.2f} s")

    asyncio.run(main())
