"""`AsyncLLM` as a user of the Python API meets it: outputs of each kind, ends of every sort, and nothing left behind."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from octavo import LLM, AsyncEngineArgs, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from octavo.errors import ConfigError, EngineError, LoadError, RequestError, UnavailableError
from octavo.messages import SchedulerStats
from tests.support.engine_process import until

PROMPT = "Once upon a time, there was a little girl named Lily. She loved to play"
PARAMS = SamplingParams(n=2, seed=3, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=0)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture
def engine(endless: str, engines_and_ranks_are_forked: None) -> Iterator[AsyncLLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_DEBUG", "check=1,forward.sleep=20")
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=endless, num_gpu_blocks_override=200, max_num_seqs=4))
    yield engine
    engine.shutdown()


def stats(engine: AsyncLLM) -> SchedulerStats:
    engines = engine._thread._engines
    assert engines is not None
    return engines.stats


async def is_idle_soon(engine: AsyncLLM) -> None:
    def idle() -> bool:
        return (stats(engine).running, stats(engine).waiting) == (0, 0) and not engine._requests and not engine._thread._feeds

    await until(idle, "a request still runs")


def run(engine: AsyncLLM, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await work()
        await is_idle_soon(engine)

    asyncio.run(asyncio.wait_for(main(), 60))


async def outputs(engine: AsyncLLM, params: SamplingParams, prompt: Any = PROMPT, **rest: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, **rest)]


def with_kind(kind: RequestOutputKind, params: SamplingParams = PARAMS) -> SamplingParams:
    params = params.clone()
    params.output_kind = kind
    return params


# promise: async-llm, request-output-kind, samplingparams-output-kind
def test_each_kind_of_output_gives_the_answers_of_the_offline_engine(engine: AsyncLLM, endless: str) -> None:
    with LLM(endless, num_gpu_blocks_override=200, max_num_seqs=4) as llm:
        (expected,) = llm.generate(PROMPT, PARAMS)

    def same(got: RequestOutput) -> bool:
        logprobs = [[list(choices) for choices in sample.logprobs or []] for sample in got.outputs]
        assert logprobs == [[list(choices) for choices in sample.logprobs or []] for sample in expected.outputs]
        sums = [sample.cumulative_logprob for sample in got.outputs]
        assert sums == pytest.approx([sample.cumulative_logprob for sample in expected.outputs], abs=1e-3)
        assert (got.prompt, got.prompt_token_ids, got.finished) == (PROMPT, expected.prompt_token_ids, True)
        assert got.metrics.finished is not None
        assert len(got.prompt_logprobs or []) == len(expected.prompt_logprobs or [1])
        bare = [replace(sample, logprobs=None, cumulative_logprob=None) for sample in got.outputs]
        return bare == [replace(sample, logprobs=None, cumulative_logprob=None) for sample in expected.outputs]

    async def work() -> None:
        kinds = [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY]
        cumulative, deltas, final = await asyncio.gather(*(outputs(engine, with_kind(kind), request_id=kind.name) for kind in kinds))
        assert len(final) == 1 and same(final[0]) and final[0].request_id == "FINAL_ONLY"
        assert len(cumulative) > 3 and same(cumulative[-1]) and not cumulative[0].finished
        lengths = [[len(sample.token_ids) for sample in output.outputs] for output in cumulative]
        assert lengths == sorted(lengths) and lengths[0] != lengths[-1] and all(len(output.outputs) == 2 for output in cumulative)
        assert len(deltas) > 3 and [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
        for index, sample in enumerate(expected.outputs):
            mine = [one for output in deltas for one in output.outputs if one.index == index]
            assert "".join(one.text for one in mine) == sample.text
            assert [token for one in mine for token in one.token_ids] == sample.token_ids
            assert sum(len(one.logprobs or []) for one in mine) == 12 and mine[-1].finish_reason == "length"
        assert sum(output.prompt_logprobs is not None for output in deltas) == 1

    run(engine, work)


# promise: async-llm
def test_a_request_that_is_aborted_gives_a_last_output_that_says_so(engine: AsyncLLM) -> None:
    async def work() -> None:
        for kind in RequestOutputKind:
            found = list[RequestOutput]()

            async def read(kind: RequestOutputKind = kind, found: list[RequestOutput] = found) -> None:
                async for output in engine.generate(PROMPT, with_kind(kind, LONG), request_id="long"):
                    found.append(output)

            task = asyncio.create_task(read())
            await until(lambda: stats(engine).running == 1)
            await engine.abort(["long", "nobody's"])
            await task
            assert found[-1].finished and found[-1].outputs[0].finish_reason == "abort" and len(found[-1].outputs) == 1
            assert kind is not RequestOutputKind.FINAL_ONLY or (len(found) == 1 and len(found[0].outputs[0].token_ids) < 400)
            await is_idle_soon(engine)

    run(engine, work)


def test_leaving_a_loop_or_a_task_ends_the_request(engine: AsyncLLM) -> None:
    before = stats(engine).generation_tokens

    async def work() -> None:
        async with aclosing(engine.generate(PROMPT, LONG)) as stream:
            async for output in stream:
                assert not output.finished
                break
        task = asyncio.create_task(outputs(engine, LONG))
        await until(lambda: stats(engine).running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(engine, work)
    assert stats(engine).generation_tokens - before < 400, "they went on"


def test_what_is_wrong_with_a_request_is_said_by_name(engine: AsyncLLM) -> None:
    async def refused(kind: type[Exception], said: str, *values: Any, **names: Any) -> None:
        with pytest.raises(kind, match=said):
            async for _ in engine.generate(*values, **names):
                pass

    async def work() -> None:
        await refused(RequestError, "a prompt is a str", 5, LONG)
        await refused(RequestError, "maximum context length is 512 tokens", [1] * 600, LONG)
        await refused(RequestError, "sampling_params must be", PROMPT, {"n": 1})
        await refused(RequestError, "priority must be", PROMPT, LONG, priority="high")
        await refused(RequestError, "n is 9, but at most 4", PROMPT, SamplingParams(n=9))
        await refused(RequestError, "regex repeats", PROMPT, SamplingParams(structured_outputs={"regex": "(a*)*"}))  # type: ignore[arg-type]
        await refused(TypeError, "generate has no argument 'lora_request': there are no LoRA", PROMPT, LONG, "1", lora_request="x")
        async with aclosing(engine.generate(PROMPT, LONG, "twice", lora_request=None)) as stream:  # type: ignore[arg-type]
            await anext(stream)
            await refused(RequestError, "request_id 'twice' is that of a request that has not ended", PROMPT, LONG, "twice")

    run(engine, work)


# promise: async-llm
def test_any_event_loop_may_use_it_and_without_params_it_does_as_the_model_recommends(engine: AsyncLLM) -> None:
    found = list[RequestOutput]()

    async def work() -> None:
        found.extend([output async for output in engine.generate({"prompt": PROMPT})][-1:])

    run(engine, work)
    run(engine, work)
    assert [len(output.outputs[0].token_ids) for output in found] == [16, 16] and found[0].request_id != found[1].request_id
    assert found[1].num_cached_tokens == 16 == found[1].metrics.cached_tokens
    defaults = engine.get_default_sampling_params()
    assert defaults == SamplingParams() and defaults is not engine.get_default_sampling_params()


# promise: async-llm
def test_shutdown_ends_what_is_open_and_the_process_and_later_calls_say_so(endless: str) -> None:
    engine = AsyncLLM(AsyncEngineArgs(model=endless, num_gpu_blocks_override=200))

    async def main() -> None:
        task = asyncio.create_task(outputs(engine, with_kind(RequestOutputKind.FINAL_ONLY, LONG)))
        await until(lambda: stats(engine).running == 1)
        engine.shutdown()
        with pytest.raises(UnavailableError, match="shutting down"):
            await task
        with pytest.raises(EngineError, match="this AsyncLLM is shut down"):
            await outputs(engine, LONG)

    asyncio.run(main())
    engine.shutdown()
    assert engine._thread._engines is not None and engine._thread._engines.engine_pid is None
    assert not engine._thread.is_alive


def test_what_keeps_it_from_starting_is_raised_where_it_is_opened(endless: str) -> None:
    with pytest.raises(LoadError, match="no-such-folder"):
        AsyncLLM.from_engine_args(AsyncEngineArgs(model="/no-such-folder"))
    with pytest.raises(ConfigError, match="room for 0 blocks"):  # found out in the engine process
        AsyncLLM.from_engine_args(AsyncEngineArgs(model=endless, kv_cache_memory_bytes=1000))
    with pytest.raises(TypeError, match="no field 'speculative_config': there is no speculative decoding"):
        AsyncEngineArgs(model=endless, speculative_config={})  # type: ignore[call-arg]
