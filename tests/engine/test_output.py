"""From tokens to text, with the default model's tokenizer: whatever the text, the stop strings and the deltas, nothing leaks."""

import asyncio
import codecs
import time
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.output import OutputProcessor, UnspelledDelta
from octavo.engine.streams import TURN_LOGPROBS, Stream
from octavo.messages import AddRequest, Delta, FinishReason, LifeRecord, TokenLogprobs
from octavo.outputs import RequestOutput, TextDelta
from octavo.sampling_params import SamplingParams
from octavo.text.detokenizer import StopSearch, StopStrings, shown_tail
from octavo.text.tokenizer import Tokenizer
from tests.support.tokenizers import smollm2_metadata

WORDS = ["a", "b", "ab", " ", "\n", "User", "\nUser:", "é", "e\u0301", "日本", "🙂", "👩‍👩‍👧", "\ufffd", "the end"]
REASONS: list[FinishReason] = ["length", "stop", "abort"]
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=25).map("".join)


@dataclass
class Processed:
    """What became of some deltas."""

    deltas: list[TextDelta] = field(default_factory=list)
    finished: list[RequestOutput] = field(default_factory=list)
    aborts: list[tuple[str, int]] = field(default_factory=list)


class Processor:
    """An `OutputProcessor` with one reader of all requests."""

    def __init__(self, tokenizer: Tokenizer | None, keep_logprobs: bool = True) -> None:
        self._read = Processed()
        self.outputs = OutputProcessor(tokenizer, lambda *sample: self._read.aborts.append(sample), keep_logprobs)

    def add(self, request: AddRequest) -> None:
        self.outputs.add(request, None, self)

    def push(self, delta: TextDelta) -> None:
        self._read.deltas.append(delta)

    def finish(self, output: RequestOutput) -> None:
        self._read.finished.append(output)

    def process(self, deltas: list[Delta]) -> Processed:
        self._read = Processed()
        self.outputs.process(deltas)
        return self._read


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata(), "SmolLM2")


def certain_texts(ids: list[int]) -> list[str]:
    """After each token, all text that no later token can change; at last the whole."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    shown = [""]
    for token in ids:
        data = b"" if token in tokenizer().special_ids else tokenizer().token_bytes(token)
        shown.append(shown[-1] + decoder.decode(data))
    return [*shown[1:], shown[-1] + decoder.decode(b"", final=True)]


def expected(ids: list[int], stops: list[str]) -> tuple[str, int, str | None]:
    """Text, tokens counted and stop string: by looking at the whole beginning again after each token, and at the end."""
    text = ""
    for count, text in enumerate(certain_texts(ids), start=1):
        found = [(text.find(stop), stop) for stop in stops if stop in text]
        if found:
            place, stop = min(found)
            return text[:place], count, stop
    return text, len(ids) + 1, None


def check(ids: list[int], stops: list[str], cuts: list[int], reason: FinishReason) -> None:
    """Feed ids, cut into deltas, to a processor; `reason` is how the engine ends them."""
    text, count, matched = expected(ids, stops)
    end_ids = [tokenizer().eos_token_ids[0]] if reason == "stop" else []
    processor = Processor(tokenizer())
    processor.add(AddRequest("r", [504], SamplingParams(max_tokens=None, stop=tuple(stops))))
    bounds = sorted({0, len(ids), *cuts})
    shown, tokens = "", list[int]()
    finished, aborts = list[RequestOutput](), list[tuple[str, int]]()
    for start, end in pairwise(bounds):
        last = end == len(ids)
        part = ids[start:end] + (end_ids if last else [])
        news = processor.process([Delta("r", 0, part, finish_reason=reason if last else None, life=LifeRecord(1.0))])
        assert len(news.deltas) == (not finished), "one piece of news for each delta, and none after the end"
        finished += news.finished
        aborts += news.aborts
        shown += "".join(delta.text for delta in news.deltas)
        tokens += [token for delta in news.deltas for token in delta.token_ids]
        assert text.startswith(shown), "something was shown that does not belong to the text"
        longest = max(map(len, stops), default=1)
        if not finished:
            assert len(certain_texts(ids[:end])[-2]) - len(shown) < longest, "more was held back than may become a stop string"
    (output,) = finished
    completion = output.outputs[0]
    assert shown == completion.text == text
    assert tokens == completion.token_ids == (ids + end_ids)[:count]
    assert (completion.finish_reason, completion.stop_reason) == (("stop", matched) if matched is not None else (reason, None))
    known = count > bounds[-2]  # the last delta told how the engine ended it
    assert aborts == ([] if known else [("r", 0)]), "the engine is told to abort what it does not know has ended"
    assert not processor.outputs._requests


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[str], list[int]]:
    """Ids of a text (or any ids at all), stop strings mostly cut out of it, and where to split it into deltas."""
    any_ids = st.lists(st.integers(0, tokenizer().vocab_size - 1), min_size=1, max_size=20)
    ids = draw(st.one_of(texts.map(tokenizer().encode), any_ids))
    whole = tokenizer().decode(ids) or "x"
    cut = st.tuples(st.integers(0, len(whole) - 1), st.integers(1, 8)).map(lambda at: whole[at[0] : at[0] + at[1]])
    stops = draw(st.lists(st.one_of(cut, cut.map(lambda stop: stop + "#"), st.sampled_from(WORDS)), max_size=3))
    return ids, stops, draw(st.lists(st.integers(1, len(ids)), max_size=len(ids)))


# promise: samplingparams-stop
@given(cases(), st.sampled_from(REASONS))
def test_text_is_cut_before_the_earliest_stop_string_and_no_part_of_one_is_ever_shown(
    case: tuple[list[int], list[str], list[int]], reason: FinishReason
) -> None:
    check(*case, reason)


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("the end\nUser: hi", ["\nUser"]),
        ("the end\nUs", ["\nUser"]),  # held back to the last, then shown
        ("🙂🙂🙂", ["🙂🙂"]),  # characters of several tokens
        ("aabaabaaab", ["aaab", "baaa"]),
        ("abcabd", ["abd", "cabd"]),
        ("plain", []),
    ],
)
def test_known_texts_token_by_token_and_all_at_once(text: str, stops: list[str], reason: FinishReason) -> None:
    ids = tokenizer().encode(text)
    check(ids, stops, list(range(len(ids))), reason)
    check(ids, stops, [], reason)


@given(st.lists(st.text("ab", min_size=1, max_size=7), max_size=4), st.lists(st.text("abc", max_size=5), max_size=12), st.integers(0, 4))
def test_a_search_in_pieces_finds_what_a_look_at_the_whole_text_does(stops: list[str], pieces: list[str], skipped: int) -> None:
    """Of two letters, so that heads of stop strings overlap; no stop string begins in the first pieces, which are skipped."""
    search = StopSearch(StopStrings(stops))
    text, begin = "", 0
    for number, piece in enumerate(pieces):
        text += piece
        if number < skipped:
            search.skip(piece)
            begin = len(text)
        found = None if number < skipped else search.push(piece)
        assert found == min([(text.index(stop, begin), stop) for stop in stops if stop in text[begin:]], default=None)
        if found is not None:
            return
        tails = [text[place:] for place in range(begin, len(text) + 1)]
        assert search.held_back == max([len(tail) for tail in tails if any(stop.startswith(tail) for stop in stops)], default=0)


@pytest.mark.parametrize("text", ["the end of it, ", "a" * 15], ids=["nothing fits", "all but the last character fits"])
@pytest.mark.timed("the CPU time of long stop strings against short ones")
def test_long_stop_strings_cost_no_more_than_short_ones(text: str) -> None:
    """Every character is looked at once or twice, not once for each length that a head of a stop string may have."""

    def seconds(length: int) -> float:
        params = SamplingParams(max_tokens=None, stop=tuple("a" * length + end for end in "bcde"))
        processor = Processor(tokenizer())
        processor.add(AddRequest("r", [504], params))
        ids = tokenizer().encode(text * 300)
        start = time.process_time()
        for token in ids:
            processor.process([Delta("r", 0, [token])])
        return time.process_time() - start

    assert seconds(1000) < 8 * seconds(4) + 0.05


def test_what_samples_share_of_a_prompt_is_looked_at_once() -> None:
    """128 samples of a prompt of a million ids: only its end decides how the text goes on."""
    prompt = tokenizer().encode("the end") * 500_000
    processor = Processor(tokenizer())
    start = time.process_time()
    processor.add(AddRequest("r", prompt, SamplingParams(n=128)))
    assert time.process_time() - start < 0.5
    special = [tokenizer().eos_token_ids[0]] * 200_000
    assert shown_tail(tokenizer(), prompt + special) == prompt[-3:]


def test_news_of_a_sample_that_has_stopped_are_ignored_while_another_goes_on() -> None:
    """At depth 2 a token may be on the way when a stop string is found."""
    ids = tokenizer().encode("the end")
    processor = Processor(tokenizer())
    processor.add(AddRequest("r", [504], SamplingParams(n=2, stop=(" end",))))
    first = processor.process([Delta("r", 0, ids), Delta("r", 1, ids[:1])])
    assert [delta.text for delta in first.deltas] == ["the", "the"] and first.aborts == [("r", 0)]
    late = processor.process([Delta("r", 0, ids), Delta("r", 0, [], finish_reason="abort")])
    assert not (late.deltas or late.finished or late.aborts)
    last = processor.process([Delta("r", 1, ids[:1], finish_reason="length")])
    assert [(sample.text, sample.stop_reason, len(sample.token_ids)) for sample in last.finished[0].outputs] == [
        ("the", " end", len(ids)),
        ("thethe", None, 2),
    ]


def test_a_dropped_or_unknown_request_is_ignored() -> None:
    processor = Processor(None)
    processor.add(AddRequest("r", [1], SamplingParams()))
    processor.outputs.drop("r")
    processor.outputs.drop("r")
    news = processor.process([Delta("r", 0, [5]), Delta("never", 0, [5])])
    assert not (news.deltas or news.finished or news.aborts)


def test_a_stop_string_counts_only_after_min_tokens() -> None:
    ids = tokenizer().encode("a stop b stop c")
    processor = Processor(tokenizer())
    processor.add(AddRequest("r", [504], SamplingParams(max_tokens=None, min_tokens=2, stop=" stop")))
    news = [processor.process([Delta("r", 0, [token])]) for token in ids]
    (output,) = [finished for one in news for finished in one.finished]
    assert output.outputs[0].text == "a stop b" == "".join(delta.text for one in news for delta in one.deltas)
    assert len(output.outputs[0].token_ids) == 4


# promise: samplingparams-include-stop
@pytest.mark.parametrize(("include", "text"), [(False, "the"), (True, "the end")])
def test_a_stop_string_stays_in_the_text_where_asked_for(include: bool, text: str) -> None:
    ids = tokenizer().encode("the end of it")
    processor = Processor(tokenizer())
    params = SamplingParams(stop=" end", include_stop_str_in_output=include, max_tokens=None)
    processor.add(AddRequest("r", [504], params))
    news = [processor.process([Delta("r", 0, [token])]) for token in ids]
    assert "".join(delta.text for one in news for delta in one.deltas) == text
    (output,) = [finished.outputs[0] for one in news for finished in one.finished]
    assert (output.text, output.stop_reason) == (text, " end")


# promise: samplingparams-detokenize-skip
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "Hi"),
        ({"skip_special_tokens": False}, "<|im_start|>Hi"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "<|im_start|>Hi<|im_end|>"),
        ({"detokenize": False}, ""),
    ],
)
def test_special_tokens_and_ends_are_text_only_where_asked_for(settings: dict[str, bool], text: str) -> None:
    ids = tokenizer().encode("<|im_start|>Hi<|im_end|>")
    processor = Processor(tokenizer())
    processor.add(AddRequest("r", [504], SamplingParams(max_tokens=None, **settings)))  # type: ignore[arg-type]
    news = processor.process([Delta("r", 0, ids, finish_reason="stop", life=LifeRecord(1.0))])
    assert news.deltas[0].text == news.finished[0].outputs[0].text == text
    assert news.finished[0].outputs[0].token_ids == ids


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "not kept"])
def test_deltas_carry_the_logprobs_of_their_tokens_and_the_first_those_of_the_prompt(keep: bool) -> None:
    found = [TokenLogprobs(-float(rank), rank, (7, 8), (-1.0, -2.0)) for rank in range(1, 6)]
    processor = Processor(tokenizer(), keep_logprobs=keep)
    processor.add(AddRequest("r", [504, 505], SamplingParams(n=2, logprobs=2, prompt_logprobs=2)))
    assert not processor.process([Delta("r", 0, [], prompt_logprobs=(1, found[:1]))]).deltas, "a piece of the prompt alone is no news"
    first = processor.process([Delta("r", 0, [5, 6], found[1:3]), Delta("r", 1, [7], found[3:4])]).deltas
    later = processor.process([Delta("r", 0, [9], found[4:], finish_reason="length"), Delta("r", 1, [], finish_reason="abort")])
    for delta in first + later.deltas:
        assert isinstance(delta, UnspelledDelta) is not keep
        if isinstance(delta, UnspelledDelta):
            delta.spell(tokenizer())
    ids = [[list(choices) for choices in delta.logprobs or []] for delta in first + later.deltas]
    assert ids == [[[5, 7, 8], [6, 7, 8]], [[7, 8]], [[9, 7, 8]], []]
    assert [len(sample.logprobs or ()) for sample in later.finished[0].outputs] == ([3, 1] if keep else [0, 0])
    assert [delta.prompt_logprobs for delta in first + later.deltas] == [later.finished[0].prompt_logprobs, None, None, None]
    assert first[0].prompt_logprobs is not None and [choices and choices[505].rank for choices in first[0].prompt_logprobs] == [None, 1]


def test_readers_who_are_far_behind_spell_a_few_logprobs_one_after_another_and_others_have_their_turn() -> None:
    passed = 0
    found = TokenLogprobs(-1.0, 1, (7,), (-1.0,))

    async def others() -> None:
        nonlocal passed
        while True:
            passed += 1
            await asyncio.sleep(0)

    async def read(spelling: asyncio.Lock) -> list[int]:
        stream = Stream(AddRequest("r", [1], SamplingParams()), tokenizer(), spelling)
        for token in range(3 * TURN_LOGPROBS):
            stream.push(UnspelledDelta("r", 0, "", [token], found=[found]))
        stream.finish(RequestOutput("r", None, [], None, [], True, 0, LifeRecord(1.0)))
        turns = []
        while news := await stream.take():
            ids = news[0].token_ids
            assert [list(choices) for choices in news[0].logprobs or ()] == [[*dict.fromkeys([token, 7])] for token in ids]
            assert len(ids) == TURN_LOGPROBS
            turns.append(passed)
        return turns

    async def read_all() -> list[list[int]]:
        running, spelling = asyncio.create_task(others()), asyncio.Lock()
        turns = await asyncio.gather(*[read(spelling) for _ in range(4)])
        running.cancel()
        return turns

    turns = asyncio.run(read_all())
    in_order = [turn for rounds in zip(*turns, strict=True) for turn in rounds]
    assert all(before < now for before, now in pairwise(in_order)), f"two were spelled in one turn of the loop: {turns}"


def test_an_error_is_told_with_its_code() -> None:
    processor = Processor(tokenizer())
    processor.add(AddRequest("r", [504], SamplingParams()))
    assert processor.process([Delta("r", 0, [5])]).deltas[0].error is None
    (delta,) = processor.process([Delta("r", 0, [], finish_reason="error", error="it broke", code="numerical_error")]).deltas
    assert (delta.error, delta.code, delta.stop_reason, delta.logprobs) == ("it broke", "numerical_error", "it broke", None)
