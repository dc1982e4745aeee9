"""Several engines behind one `AsyncLLM`: requests go on when an engine dies, with the text they would have had."""

import asyncio
import os
import signal
from typing import Any

import pytest

from octavo.engine.async_llm import Ask, AsyncLLM
from octavo.engine.supervisor import Serving
from octavo.outputs import TextDelta
from tests.support.engine_process import ask, engine_process, is_idle, read, run, until

THREE = Serving(engines=3, max_restarts=100, beat_timeout=1.5)


def questions() -> list[Ask]:
    """One of each kind: seeded and not, samples, penalties, stops, logprobs, of the prompt too, a long prompt, an early end."""
    kinds: list[dict[str, Any]] = [
        {}, {"seed": None}, {"temperature": 0}, {"n": 3}, {"n": 2, "seed": None, "logprobs": 2}, {"repetition_penalty": 1.3},
        {"min_tokens": 20, "stop_token_ids": [5, 6, 7]}, {"prompt_logprobs": 1}, {"bad_words": ["the"]}, {"stop": ["once", "the", "a"]},
    ]  # fmt: skip
    prompts = [[1, 2, 3], list(range(3, 120)), [7]]
    return [ask(prompts[number % 3], 40 + number, **kind) for number, kind in enumerate(kinds)]


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


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_no_stream_is_lost_when_engines_die(endless: str, how: signal.Signals) -> None:
    async def main() -> None:
        async with engine_process(endless, "forward.sleep=10", THREE, max_num_seqs=8) as llm:
            quiet = [samples(deltas) for deltas in await asyncio.gather(*(read(llm, each) for each in questions()))]
            llm._count = 0  # the same numbers again, so the same noise without a seed
            streams = [asyncio.create_task(read(llm, each)) for each in questions()]
            for victim in (0, 2):
                await asyncio.sleep(0.15)
                kill(llm, victim, how)
                await until(lambda victim=victim: llm.replicas[victim].state == "dead", 2.0)  # type: ignore[misc]
                assert llm.state == "ready"
            found = await asyncio.gather(*streams)
            assert [samples(deltas) for deltas in found] == quiet
            resumed = [max(delta.life.resumed for delta in deltas if delta.life is not None) for deltas in found]
            assert sum(map(bool, resumed)) >= 3, "hardly any request was moved"
            await until(lambda: all(replica.state == "ready" for replica in llm.replicas), 20.0)
            await until(lambda: is_idle(llm), 2.0)
            assert [replica.facts.epoch for replica in llm.replicas if replica.facts] == [2, 1, 2]

    run(main())
