"""Planted faults in a real model's steps: they end whom they hit, change nobody else's tokens, and leave the engine whole."""

import pytest

from octavo import LLM, RequestOutput, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [
    "Once upon a time, there was a little girl named Lily. She loved to play",
    "One day, a cat and a dog went to the park to play with a big red ball",
    "Tim and Sam",
    "Once upon a time, there was a little girl named Lily. She loved to eat",
]
STEP = 4


def opened(folder: str, depth: int, rows: int = 2, blocks: int = 60) -> LLM:
    return LLM(folder, num_gpu_blocks_override=blocks, max_num_seqs=rows, pipeline_depth=depth)


@pytest.fixture(scope="module")
def clean(stories: str) -> list[list[int]]:
    with opened(stories, 1) as llm:
        return tokens(llm.generate(PROMPTS, PARAMS))


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("fault", "hit", "said"),
    [
        ("forward.raise", [0, 1], f"the engine failed in this step: fault point forward.raise at step {STEP}"),
        ("forward.nan", [0], "numerical_error"),
        ("sample.bad_id", [0], "numerical_error"),
    ],
)
def test_a_fault_ends_the_requests_it_hits_and_no_others(
    stories: str, clean: list[list[int]], fault: str, hit: list[int], said: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", f"check=1,{fault}@{STEP}")
    with opened(stories, depth) as llm:  # two rows: requests 0 and 1 run at that step, 2 and 3 wait
        outputs = llm.generate(PROMPTS, PARAMS)
        for number, (output, whole) in enumerate(zip(outputs, clean)):
            (completion,) = output.outputs
            if number in hit:
                assert (completion.finish_reason, completion.token_ids) == ("error", whole[: STEP - 1])
                assert said in str(completion.stop_reason) and output.finished and output.metrics.finished is not None
            else:
                assert (completion.finish_reason, completion.token_ids) == ("length", whole)
        stats = llm.stats()
        assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.num_blocks - 1)
        again = llm.generate(PROMPTS, PARAMS)
        assert tokens(again) == clean, "what the fault left behind was found in the cache"
        assert any(output.num_cached_tokens for output in again)


def test_a_stream_tells_of_a_fault_and_ends(stories: str, clean: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", f"forward.raise@{STEP}")
    with opened(stories, 1) as llm:
        deltas = list(llm.stream(PROMPTS[0], PARAMS))
    assert [token for delta in deltas for token in delta.token_ids] == clean[0][: STEP - 1]
    assert deltas[-1].finish_reason == "error" and "forward.raise" in str(deltas[-1].stop_reason)


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_full_of_nan_until_they_are_written_change_nothing(stories: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(n=3, seed=number, max_tokens=16, ignore_eos=True) for number in range(4)]

    def run() -> tuple[list[list[int]], bool]:
        with opened(stories, depth, rows=8, blocks=13) as llm:
            outputs = llm.generate(PROMPTS, params) + llm.generate(PROMPTS, params)
            assert llm.stats().preemptions > 0 and llm.stats().prefix_hits > 0
            store = llm._core.executor.store  # type: ignore[attr-defined]
            return tokens(outputs), all(bool(cache["v"].isnan().any()) for cache in store.caches)

    plain, _ = run()
    monkeypatch.setenv("OCTAVO_DEBUG", "check=1")
    checked, poisoned = run()
    assert poisoned, "the check filled no block"
    assert checked == plain


@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_and_forced_misses_change_no_token(
    stories: str, clean: list[list[int]], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "check=1,preempt.every=3,cache.force_miss=1")
    with opened(stories, depth) as llm:
        outputs = llm.generate(PROMPTS, PARAMS) + llm.generate(PROMPTS, PARAMS)
        assert llm.stats().preemptions > 4 and llm.stats().prefix_hits == 0
    assert tokens(outputs) == clean * 2


@pytest.mark.parametrize("depth", [1, 2])
def test_penalties_and_minimum_lengths_count_alike_after_a_preemption(stories: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read a row's own ids: what was prompt and what was output before must still be when it comes back."""
    penalties = [{"presence_penalty": 1.5}, {"frequency_penalty": 0.7}, {"repetition_penalty": 1.3}, {"min_tokens": 25}]
    params = [SamplingParams(temperature=0, max_tokens=30, stop_token_ids=(426,), **penalty) for penalty in penalties]  # type: ignore[arg-type]

    def run() -> tuple[list[list[int]], int]:
        with opened(stories, depth, rows=4) as llm:
            return tokens(llm.generate(PROMPTS, params)), llm.stats().preemptions

    plain, _ = run()
    monkeypatch.setenv("OCTAVO_DEBUG", "check=1,preempt.every=2")
    disturbed, preemptions = run()
    assert preemptions > 8 and disturbed == plain
    assert len(plain[3]) > 25, "its end was held back"
