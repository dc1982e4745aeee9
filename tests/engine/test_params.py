"""What `SamplingParams` do to a whole request: samples and seeds, logprobs, every way to stop, and what its record tells."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import RequestError
from octavo.outputs import CompletionOutput, TextDelta
from tests.support.story_folder import story_folder

PROMPT = "Once upon a time, there was a little girl named Lily. She loved to play"  # 21 tokens
STORY = " outside in the park. One day, she saw a big, red ball. She wanted to play with it, but it was too high.\nLily's mom said, \"Lily"
PERIOD = 426  # the id of "."


def greedy(
    max_tokens: int = 52, min_tokens: int = 0, stop: list[str] | None = None, stop_ids: tuple[int, ...] = (), ignore_eos: bool = False
) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, min_tokens=min_tokens, stop=tuple(stop or ()), stop_token_ids=stop_ids, ignore_eos=ignore_eos
    )


def opened(folder: str, depth: int = 1, seed: int = 0) -> LLM:
    return LLM(folder, num_gpu_blocks_override=120, max_num_seqs=8, pipeline_depth=depth, seed=seed)


@pytest.fixture(scope="module", params=[1, 2], ids=["depth1", "depth2"])
def llm(stories: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with opened(stories, request.param) as llm:
        yield llm
        stats = llm.stats()
        assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.num_blocks - 1)


def complete(llm: LLM, params: SamplingParams, prompt: str = PROMPT) -> CompletionOutput:
    return llm.generate(prompt, params)[0].outputs[0]


def samples(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(PROMPT, params)[0].outputs]


# --- samples and seeds -----------------------------------------------------------------------------------------------


# promise: samplingparams-n-1, samplingparams-seed
def test_a_seed_repeats_every_sample_and_the_first_do_not_depend_on_how_many(llm: LLM) -> None:
    four = samples(llm, SamplingParams(n=4, seed=9, max_tokens=20, ignore_eos=True))
    assert len({tuple(ids) for ids in four}) == 4
    assert samples(llm, SamplingParams(n=2, seed=9, max_tokens=20, ignore_eos=True)) == four[:2]
    assert samples(llm, SamplingParams(seed=9, max_tokens=20, ignore_eos=True)) == four[:1]
    assert samples(llm, SamplingParams(n=4, seed=10, max_tokens=20, ignore_eos=True)) != four


# promise: seed, llm-dtype-max
def test_without_a_seed_requests_differ_and_the_engine_seed_repeats_them_all(stories: str) -> None:
    def three(seed: int) -> list[list[int]]:
        with opened(stories, seed=seed) as llm:
            return [ids for _ in range(3) for ids in samples(llm, SamplingParams(n=2, max_tokens=20, ignore_eos=True))]

    first = three(1)
    assert len({tuple(ids) for ids in first}) == 6
    assert three(1) == first and three(2) != first


def test_greedy_samples_are_all_equal(llm: LLM) -> None:
    assert samples(llm, SamplingParams(n=3, temperature=0, max_tokens=10)) == samples(llm, greedy(10)) * 3


EDGES = [
    (SamplingParams(temperature=5e-324), True), (SamplingParams(temperature=1e-7), True), (SamplingParams(top_p=1e-300), True),
    (SamplingParams(top_k=1), True), (SamplingParams(min_p=1), True), (SamplingParams(temperature=3.4e38), False),
    (SamplingParams(repetition_penalty=1.2e-38), False), (SamplingParams(repetition_penalty=3.4e38), False),
    (SamplingParams(presence_penalty=-2, frequency_penalty=-2), False), (SamplingParams(top_k=2**31 - 1, min_p=1e-300), False),
    (SamplingParams(logit_bias={PERIOD: 3.4e38}), False), (SamplingParams(temperature=0, logit_bias={PERIOD: 1e-300}), True),
]  # fmt: skip


@pytest.mark.parametrize(("params", "is_greedy"), EDGES)
def test_values_at_the_edge_of_a_float_still_give_a_text(llm: LLM, params: SamplingParams, is_greedy: bool) -> None:
    completion = complete(llm, replace(params, seed=1, max_tokens=8, ignore_eos=True))
    assert completion.finish_reason == "length"
    assert (completion.token_ids == complete(llm, greedy(8)).token_ids) == is_greedy
    assert params.logit_bias != {PERIOD: 3.4e38} or completion.token_ids == [PERIOD] * 8


@pytest.mark.filterwarnings("error")  # numpy warns of what float32 does not hold
def test_the_same_values_give_a_text_out_of_the_rows_of_a_device(stories: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=device")
    asked = [greedy(3), *(replace(params, seed=1, max_tokens=3, ignore_eos=True) for params, _ in EDGES)]
    with opened(stories) as llm:
        best, *texts = [output.outputs[0].token_ids for output in llm.generate([PROMPT] * len(asked), asked, use_tqdm=False)]
    assert [ids == best for ids in texts] == [is_greedy for _, is_greedy in EDGES]
    assert texts[-2] == [PERIOD] * 3


# --- logprobs --------------------------------------------------------------------------------------------------------


# promise: samplingparams-logprobs, completionoutput-index-text
@pytest.mark.parametrize("count", [0, 1, 3])
def test_logprobs_tell_the_chosen_token_and_the_best(llm: LLM, count: int) -> None:
    completion = complete(llm, SamplingParams(seed=1, temperature=1.2, max_tokens=30, logprobs=count, ignore_eos=True))
    assert completion.logprobs is not None and completion.cumulative_logprob is not None
    assert len(completion.logprobs) == 30
    for token, choices in zip(completion.token_ids, completion.logprobs):
        chosen = choices[token]
        ranked = sorted(choices.values(), key=lambda choice: choice.rank or 0)
        assert [choice.rank for choice in ranked[:count]] == list(range(1, count + 1))
        assert len(choices) == count + (chosen.rank is None or chosen.rank > count)
        logprobs = [choice.logprob for choice in ranked]
        assert logprobs == sorted(logprobs, reverse=True) and sum(map(math.exp, logprobs)) <= 1 + 1e-6
    ranks = [choices[token].rank for token, choices in zip(completion.token_ids, completion.logprobs)]
    assert ranks.count(1) < 30, "at this temperature the best token is not always taken"
    total = sum(choices[token].logprob for token, choices in zip(completion.token_ids, completion.logprobs))
    assert math.isclose(completion.cumulative_logprob, total, rel_tol=1e-9) and total < 0
    spelled = [choices[token].decoded_token or "" for token, choices in zip(completion.token_ids, completion.logprobs)]
    assert "".join(spelled) == completion.text, "a token is spelled with the space it brings"


# promise: max-logprobs, samplingparams-temperature-1
def test_all_logprobs_together_are_a_distribution_and_greedy_takes_its_best(stories: str) -> None:
    with LLM(stories, num_gpu_blocks_override=20, max_logprobs=512) as llm:
        completion = complete(llm, SamplingParams(temperature=0, max_tokens=3, logprobs=512))
    assert completion.logprobs is not None
    for token, choices in zip(completion.token_ids, completion.logprobs):
        assert len(choices) == 512 and math.isclose(sum(math.exp(choice.logprob) for choice in choices.values()), 1, abs_tol=1e-5)
        assert choices[token].rank == 1 and choices[token].logprob == max(choice.logprob for choice in choices.values())


# promise: logprobs-mode-gpu
@pytest.mark.parametrize(("debug", "native"), [("", True), ("", False), ("runner=device", True)], ids=["native", "torch", "device"])
def test_processed_logprobs_are_a_distribution_over_what_may_be_drawn(
    stories: str, debug: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", debug)
    with LLM(stories, num_gpu_blocks_override=20, native=native, logprobs_mode="processed") as llm:
        completion = complete(llm, SamplingParams(seed=1, top_k=3, presence_penalty=1.5, max_tokens=8, logprobs=5))
    for token, choices in zip(completion.token_ids, completion.logprobs or [], strict=True):
        logprobs = sorted(choice.logprob for choice in choices.values())
        assert logprobs[:2] == [-math.inf] * 2 and logprobs[2] > -math.inf and choices[token].logprob > -math.inf
        assert sum(map(math.exp, logprobs)) == pytest.approx(1, abs=1e-5)


def test_logprobs_are_absent_unless_asked_for(llm: LLM) -> None:
    completion = complete(llm, greedy(3))
    assert completion.logprobs is None and completion.cumulative_logprob is None


# --- ways to stop ----------------------------------------------------------------------------------------------------


STOPS = [
    (["ball"], "ball"),  # "b" "all": over two tokens
    (["outside"], "outside"),  # from the first token on
    (["ay, sh"], "ay, sh"),  # in the middle of tokens at both ends
    ([".\nL"], ".\nL"),
    (["nowhere", "ball", "One"], "One"),  # the earliest, not the first named
    (["ball. S", "ball"], "ball"),  # done before the longer one can be
    (["a big, red", " big"], " big"),
    (["d ball", "red ball"], "red ball"),  # both done at once: the one that starts first
    (["big, red ballet", "wanted"], "wanted"),  # held back, and given out after all
]


@pytest.fixture(scope="module")
def stopped(llm: LLM) -> list[tuple[CompletionOutput, list[TextDelta]]]:
    """Every case of STOPS, generated and streamed."""
    params = [greedy(stop=stops) for stops, _ in STOPS]
    outputs = llm.generate([PROMPT] * len(STOPS), params)
    turns = zip_longest(*[llm.stream(PROMPT, one) for one in params])
    deltas = zip(*turns)
    return [(output.outputs[0], [one for one in mine if one is not None]) for output, mine in zip(outputs, deltas)]


# promise: samplingparams-stop, completionoutput-index-text
@pytest.mark.parametrize("case", range(len(STOPS)))
def test_a_stop_string_ends_the_text_just_before_it(llm: LLM, stopped: list[tuple[CompletionOutput, list[TextDelta]]], case: int) -> None:
    (completion, deltas), (_, matched) = stopped[case], STOPS[case]
    assert completion.text == STORY[: STORY.index(matched)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", matched)
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.encode(PROMPT)
    short, whole = (tokenizer.decode(prompt + completion.token_ids[:count]) for count in (-1, None))
    assert matched in whole[len(PROMPT) :] and matched not in short[len(PROMPT) :], "tokens count up to the one that completes the match"
    assert "".join(delta.text for delta in deltas) == completion.text
    assert [token for delta in deltas for token in delta.token_ids] == completion.token_ids
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", matched)


def test_a_sample_that_has_stopped_is_computed_no_further(llm: LLM) -> None:
    before = llm.stats().generation_tokens
    short, long = llm.generate([PROMPT, PROMPT], [greedy(stop=["park"]), greedy(ignore_eos=True)])
    needed = len(short.outputs[0].token_ids) + len(long.outputs[0].token_ids)
    assert needed < 70 and llm.stats().generation_tokens - before <= needed + 1, "one may be on the way"


def test_each_sample_stops_by_itself(llm: LLM) -> None:
    plain = llm.generate(PROMPT, SamplingParams(n=4, seed=5, max_tokens=40, ignore_eos=True))[0].outputs
    (output,) = llm.generate(PROMPT, SamplingParams(n=4, seed=5, max_tokens=40, ignore_eos=True, stop=("She", "day,")))
    ended = [min((place for stop in ("She", "day,") if (place := sample.text.find(stop)) >= 0), default=None) for sample in plain]
    assert len(set(ended)) > 1, "choose a seed whose samples end in different places"
    assert [sample.text for sample in output.outputs] == [sample.text[:place] for sample, place in zip(plain, ended)]
    assert [sample.finish_reason for sample in output.outputs] == ["length" if place is None else "stop" for place in ended]
    assert output.metrics.finished is not None


# promise: samplingparams-stop-token
def test_stop_ids_are_counted_but_are_no_text(llm: LLM) -> None:
    completion = complete(llm, greedy(stop_ids=(511, PERIOD)))
    assert completion.text == " outside in the park"
    assert completion.token_ids[-1] == PERIOD and completion.token_ids.count(PERIOD) == 1
    assert (completion.finish_reason, completion.stop_reason) == ("stop", PERIOD)


# promise: samplingparams-stop-token, samplingparams-max-tokens
def test_the_end_id_ends_a_text_and_can_be_ignored_or_held_back(tmp_path: Path) -> None:
    with opened(str(story_folder(tmp_path, end_ids=[PERIOD]))) as llm:
        ended = complete(llm, greedy())
        assert (ended.text, ended.finish_reason, ended.stop_reason) == (" outside in the park", "stop", None)
        assert ended.token_ids[-1] == PERIOD
        ignored = complete(llm, greedy(ignore_eos=True))
        assert ignored.text == STORY[: len(ignored.text)] and ignored.finish_reason == "length" and len(ignored.token_ids) == 52
        held = complete(llm, greedy(min_tokens=len(ended.token_ids)))
        assert held.token_ids[: len(ended.token_ids) - 1] == ended.token_ids[:-1]
        assert PERIOD not in held.token_ids[: len(ended.token_ids)] and len(held.token_ids) > len(ended.token_ids)
        assert complete(llm, greedy(min_tokens=len(ended.token_ids) - 1)).token_ids == ended.token_ids


def test_a_text_may_end_with_the_context(llm: LLM) -> None:
    ids = [1] * 500
    for params in (SamplingParams(max_tokens=12, ignore_eos=True), SamplingParams(max_tokens=None, ignore_eos=True)):
        (output,) = llm.generate(ids, params)
        assert len(output.outputs[0].token_ids) == 12 and output.outputs[0].finish_reason == "length"


# --- what a request's record tells -----------------------------------------------------------------------------------


# promise: reset-prefix-cache, requestoutput-request-id, why-prefix-missed, cached-tokens-always, life-record-per
def test_a_record_tells_times_in_order_and_what_came_from_the_cache(llm: LLM) -> None:
    llm.reset_prefix_cache()
    cold, warm = llm.generate(PROMPT, greedy(4))[0], llm.generate(PROMPT, greedy(4))[0]
    assert (cold.num_cached_tokens, cold.metrics.hit_reason) == (0, "cold")
    assert (warm.num_cached_tokens, warm.metrics.hit_reason) == (16, "end")
    (longer,) = llm.generate(PROMPT + " in the sun with the big red dog and his friend the cat", greedy(4))
    assert (longer.num_cached_tokens, longer.metrics.hit_reason) == (16, "differs")
    llm.reset_prefix_cache()
    again = llm.generate(PROMPT, greedy(4))[0]
    assert (again.num_cached_tokens, again.metrics.hit_reason) == (0, "cold")
    assert {output.outputs[0].text for output in (cold, warm, again)} == {cold.outputs[0].text}
    for life in (cold.metrics, warm.metrics, again.metrics):
        assert life.first_scheduled and life.first_token and life.finished
        assert life.queued <= life.first_scheduled <= life.first_token <= life.finished
        assert life.preemptions == life.recomputed_tokens == 0


# promise: enable-prefix-caching
def test_with_the_cache_off_nothing_is_found_and_texts_are_the_same(stories: str, llm: LLM) -> None:
    with LLM(stories, num_gpu_blocks_override=120, enable_prefix_caching=False) as off:
        outputs = [off.generate(PROMPT, greedy(20))[0] for _ in range(2)]
    assert [(output.num_cached_tokens, output.metrics.hit_reason) for output in outputs] == [(0, "off")] * 2
    assert {output.outputs[0].text for output in outputs} == {complete(llm, greedy(20)).text}


def test_both_depths_give_the_same_tokens(stories: str) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(seed=1, n=3, max_tokens=25, top_p=0.9, ignore_eos=True),
        SamplingParams(seed=2, max_tokens=40, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.1, min_tokens=12),
        SamplingParams(seed=3, max_tokens=40, top_k=5, min_p=0.05, stop=("She", ".")),
        SamplingParams(max_tokens=33, logprobs=2),
    ]
    seen = []
    for depth in (1, 2):
        with opened(stories, depth) as llm:
            outputs = llm.generate([PROMPT] * 5, params)
            seen.append([(sample.token_ids, sample.text, sample.stop_reason) for output in outputs for sample in output.outputs])
    assert seen[0] == seen[1]


# promise: samplingparams-logit-bias, samplingparams-allowed-token
def test_allowed_ids_and_bias_decide_what_can_be_sampled(llm: LLM) -> None:
    allowed = [300, 301, 302]
    only = complete(llm, SamplingParams(temperature=1.5, seed=4, max_tokens=40, allowed_token_ids=allowed))
    assert set(only.token_ids) <= set(allowed) and len(set(only.token_ids)) > 1
    pushed = complete(llm, SamplingParams(temperature=0, max_tokens=5, logit_bias={321: 1000.0}, logprobs=0))
    assert pushed.token_ids == [321] * 5
    assert pushed.logprobs is not None and pushed.logprobs[0][321].logprob < -1, "logprobs are those of the raw logits"
    first = complete(llm, SamplingParams(temperature=0, max_tokens=1)).token_ids[0]
    other = complete(llm, SamplingParams(temperature=0, max_tokens=1, logit_bias={first: -1000.0})).token_ids[0]
    assert other != first
    plain = complete(llm, SamplingParams(temperature=0, max_tokens=12))
    assert complete(llm, SamplingParams(temperature=0, max_tokens=12, logit_bias={}, allowed_token_ids=range(512))) == plain


def test_ids_a_request_names_must_be_in_the_vocabulary(llm: LLM) -> None:
    for field, params in {
        "allowed_token_ids": SamplingParams(allowed_token_ids=[1, 512]),
        "logit_bias": SamplingParams(logit_bias={512: 1.0}),
        "stop_token_ids": SamplingParams(stop_token_ids=[512]),
    }.items():
        with pytest.raises(RequestError, match=f"token id 512 in {field} is out of vocabulary, which has 512 ids"):
            llm.generate(PROMPT, params, use_tqdm=False)


def test_a_minimum_length_does_not_forbid_the_only_ids_allowed(llm: LLM) -> None:
    output = complete(llm, SamplingParams(temperature=0, max_tokens=8, min_tokens=4, allowed_token_ids=[7], stop_token_ids=[7]))
    assert output.token_ids == [7]
