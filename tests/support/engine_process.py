"""An `AsyncLLM` over a real engine process for tests: FakeKV unless told otherwise, invariants checked after every step.

    with OCTAVO_DEBUG set for it, and for every engine started after it:
    async with engine_process(folder, "forward.sleep=20", Serving(max_queue=1), max_num_seqs=1) as llm: ...
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from unittest.mock import patch

from octavo.config import EngineConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.supervisor import Serving
from octavo.errors import OctavoError
from octavo.messages import AddRequest
from octavo.outputs import TextDelta
from octavo.sampling_params import SamplingParams

Result = TypeVar("Result")
BLOCKS = 400
SECONDS = 240  # no test takes so long, on a busy machine either
PATIENCE = 60  # seconds until something must have happened; whoever passes does not wait


def run(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(asyncio.wait_for(work, SECONDS))


@asynccontextmanager
async def engine_process(
    folder: str,
    debug: str = "",
    serving: Serving | None = None,
    on_dead: Callable[[OctavoError], None] | None = None,
    runner: str = "fake",
    **settings: Any,
) -> AsyncIterator[AsyncLLM]:
    """Ready, and ended for certain. `settings`: of EngineConfig."""
    config = EngineConfig(model=folder, **{"num_gpu_blocks_override": BLOCKS, **settings})
    with patch.dict(os.environ, OCTAVO_DEBUG=f"runner={runner},check=1,{debug}", OCTAVO_LOG_LEVEL="ERROR"):
        llm = AsyncLLM(config, serving, on_dead)
        try:
            await llm.start()
            yield llm
        finally:
            await llm.close()


def ask(prompt: list[int], count: int = 8, **params: Any) -> AddRequest:
    return AddRequest("", prompt, SamplingParams(**{"max_tokens": count, "ignore_eos": True, "seed": 1, **params}))


async def read(llm: AsyncLLM, question: AddRequest, timeout: float | None = None) -> list[TextDelta]:
    return [delta for updates in [updates async for updates in llm.generate(question, timeout)] for delta in updates]


async def tokens(llm: AsyncLLM, question: AddRequest) -> list[int]:
    return [token for delta in await read(llm, question) for token in delta.token_ids]


async def until(holds: Callable[[], bool], what: str = "", seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not so after {seconds} s: {what}"
        await asyncio.sleep(0.005)


def is_idle(llm: AsyncLLM) -> bool:
    stats = llm.stats
    return (stats.running, stats.waiting, stats.free_blocks, llm.num_open) == (0, 0, stats.num_blocks - len(llm.replicas), 0)


def exists(pid: int) -> bool:
    """Also where nobody has waited for it yet: one that has ended is not there."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
