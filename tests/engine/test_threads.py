"""One `LLM` in several threads: the texts of each call alone, nobody waits for a whole call, closing and forking are told."""

import gc
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import EngineError
from tests.engine.test_llm import assert_idle, text_of
from tests.support.soaked import rarely

PROMPTS = ["Once upon a time", "Tim and Sam", "One day, Lily", "The dog was", "There was a big red"]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SECONDS = 60  # far more than any of this takes


def opened(stories: str, native: bool = True) -> LLM:
    return LLM(stories, native=native, num_gpu_blocks_override=400, max_num_seqs=8, pipeline_depth=2)


@pytest.fixture
def llm(stories: str) -> Iterator[LLM]:
    with opened(stories) as llm:
        yield llm


def generated(llm: LLM, prompt: str) -> list[str]:
    return [text_of(output) for output in llm.generate([prompt, prompt + " day"], GREEDY, use_tqdm=False)]


def streamed(llm: LLM, prompt: str) -> list[str]:
    return ["".join(delta.text for delta in llm.stream(prompt, GREEDY))]


def chatted(llm: LLM, prompt: str) -> list[str]:
    return [text_of(output) for output in llm.chat([{"role": "user", "content": prompt}], GREEDY, use_tqdm=False)]


def left_early(llm: LLM, prompt: str) -> list[str]:
    stream = llm.stream(prompt, LONG)
    text = next(stream).text + next(stream).text
    stream.close()
    return [text]


CALLS = [(call, prompt) for call in (generated, streamed, chatted, left_early) for prompt in PROMPTS[:3]]


class InThread:
    """A call in a thread of its own, and what came of it."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.result: object = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            self.result = call()
        except BaseException as error:
            self.error = error

    def join(self) -> "InThread":
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "it did not end"
        return self

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_calls_from_many_threads_give_the_texts_that_each_gives_alone(stories: str, native: bool) -> None:
    calls = CALLS if native else CALLS[::3]
    with opened(stories, native) as llm:
        alone = [call(llm, prompt) for call, prompt in calls]

        def rotated(start: int) -> list[list[str]]:
            return [call(llm, prompt) for call, prompt in calls[start:] + calls[:start]]

        threads = [InThread(partial(rotated, start)) for start in range(4)]
        for start, thread in enumerate(threads):
            assert thread.join().error is None
            assert thread.result == alone[start:] + alone[:start]
        assert_idle(llm)


@pytest.mark.parametrize("cores", [*rarely(1), 2])
def test_two_in_threads_of_one_process_give_the_texts_that_each_gives_alone(
    stories: str, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native library has its threads and its memory once in a process."""
    monkeypatch.setattr("octavo.worker.facts.num_threads", lambda: cores)
    prompts = [" ".join(PROMPTS[i:]) for i in range(len(PROMPTS))]
    with opened(stories) as one, opened(stories) as other:
        alone = [generated(one, prompt) for prompt in prompts]

        def all_of(llm: LLM) -> list[list[str]]:
            return [generated(llm, prompt) for prompt in prompts for _ in range(3)]

        threads = [InThread(partial(all_of, llm)) for llm in (one, other)]
        for thread in threads:
            assert thread.join().error is None
            assert thread.result == [text for text in alone for _ in range(3)]


def test_a_short_call_does_not_wait_for_the_long_one_of_another_thread(llm: LLM) -> None:
    long = InThread(lambda: llm.generate(["Once upon a time"] * 4, [LONG] * 4, use_tqdm=False))
    while llm.stats().running == 0:
        time.sleep(0.001)
    assert llm.generate("Tim", SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].text
    assert long.runs, "the short call came second"
    assert long.join().error is None
    assert_idle(llm)


def test_closing_in_one_thread_ends_the_calls_of_others_with_an_error(llm: LLM) -> None:
    stream = llm.stream("Tim", LONG)
    next(stream)  # it is under way
    threads = [InThread(lambda: llm.generate(PROMPTS * 20, LONG, use_tqdm=False)), InThread(lambda: list(stream))]
    while llm.stats().running < 3:
        time.sleep(0.001)
    llm.close()
    for thread in threads:
        assert isinstance(thread.join().error, EngineError)
        assert str(thread.error) == "this LLM is closed: that happened while this call was under way"
    with pytest.raises(EngineError, match="this LLM is closed"):
        llm.stats()


def test_a_stream_dropped_in_the_middle_of_a_step_ends_after_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the garbage collector may, which runs anywhere; the same for `close` in a signal handler."""
    streams = [llm.stream("Tim", LONG)]
    next(streams[0])
    step, running = llm._core.step, []

    def collecting() -> object:
        if streams:
            streams.clear()
            gc.collect()
            running.append(len(llm._core.scheduler.requests))  # type: ignore[attr-defined]
            with pytest.raises(EngineError, match="in the middle of a step"):
                llm.stats()
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm._core, "step", collecting)
        assert InThread(lambda: llm.generate("Once", GREEDY, use_tqdm=False)).join().error is None
    assert running == [2], "it was aborted inside the step"
    assert_idle(llm)


def test_a_forked_process_is_told_whose_llm_it_is(llm: LLM) -> None:
    stream = llm.stream("Tim", GREEDY)
    next(stream)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of forks while threads run
        child = os.fork()
    if child == 0:
        said = []
        for use in (lambda: llm.generate("Tim", GREEDY), lambda: next(stream), llm.stats, lambda: llm.max_model_len):
            try:
                use()
            except EngineError as error:
                said.append(str(error))
        stream.close()
        llm.close()
        os.write(writing, "\n".join(said).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    assert len(said) == 4
    assert all(f"belongs to process {os.getpid()}, and process {child} was forked from it" in line for line in said)
    assert "".join(delta.text for delta in stream)
    assert_idle(llm)


def test_the_progress_of_a_call_counts_its_own_requests_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: dict[int, list[int]] = {}

    def count(progress: object, done: int, tokens_in: int, tokens_out: int) -> None:
        total = counted.setdefault(id(progress), [0, 0])
        total[0] += done
        total[1] += tokens_out

    monkeypatch.setattr("octavo.progress.GenerateProgress.count", count)
    threads = [InThread(partial(llm.generate, PROMPTS[:n], GREEDY)) for n in (1, 3)]
    for thread in threads:
        assert thread.join().error is None
    assert sorted(counted.values()) == [[1, 40], [3, 120]]
