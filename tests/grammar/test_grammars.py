"""Answers under a grammar: a model that knows nothing must still say what was asked for, and nobody beside it may notice.

FakeKV draws at random among what a mask allows; its vocabulary here is the 50 ids below, which can spell JSON.
"""

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import RequestError
from octavo.grammar import grammars as grammar
from octavo.grammar import guidance
from octavo.grammar import text as limits
from octavo.grammar.grammars import Grammars
from octavo.messages import AddRequest, Delta, FinishReason, StepPlan, TokenLogprobs
from octavo.policy.request import Sequence
from octavo.sampling_params import SamplingParams
from tests.support.fake import VOCAB, FakeEngine

END = VOCAB - 1
CHARS = '0123456789{}[],:"-. truefalsnxyz'
PIECES = ["true", "false", "null", '{"', '":', '", "', "],", "12", "xy", "}}", "00"]
SPELLINGS = [text.encode() for text in [*dict.fromkeys(CHARS), *PIECES]]
SPELLINGS += [b""] * (END - len(SPELLINGS)) + [b"<end>"]


class Letters:
    """As much of a tokenizer as a grammar needs."""

    special_ids = frozenset({END})

    def __init__(self, spellings: list[bytes] = SPELLINGS) -> None:
        self.spellings = spellings

    def token_bytes(self, token: int) -> bytes:
        return self.spellings[token]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return []  # so that whatever is forced is spelled piece by piece


def engine_of(end_ids: tuple[int, ...] = (END,), late: bool = False, spellings: list[bytes] = SPELLINGS, **settings: Any) -> FakeEngine:
    engine = FakeEngine(end_ids=end_ids, **settings)
    engine.core.grammars = Grammars(lambda: Letters(spellings), VOCAB, end_ids, late)  # type: ignore[arg-type,return-value]
    return engine


def asking(structured: object, count: int = 100, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, structured_outputs=structured, **others)  # type: ignore[arg-type]


def text_of(engine: FakeEngine, name: str, index: int = 0) -> str:
    return b"".join(SPELLINGS[token] for token in engine.tokens[name, index] if token != END).decode()


def run(engine: FakeEngine) -> None:
    """As long as it takes: a step may end while a grammar is compiled."""
    until = time.monotonic() + 60
    while engine.core.has_work:
        assert time.monotonic() < until, engine.scheduler.snapshot()
        engine.step()
    engine.assert_idle()
    grammars = engine.core.grammars
    assert not grammars.collect(engine.scheduler) and not grammars._guided and not grammars._jobs


# ---- what a grammar promises

leaves = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -20, "maximum": 300},
        {"enum": ["xy", 12, None, {"x": [1, 2]}]},
        {"const": "true"},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[xyz]{2,4}$"},
    ]
)


def around(parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    lists = st.fixed_dictionaries({"type": st.just("array"), "items": parts, "minItems": st.integers(0, 1), "maxItems": st.integers(1, 3)})
    names = st.sampled_from(["x", "y", "z", "xy", "true"])
    objects = st.dictionaries(names, parts, min_size=1, max_size=3).map(
        lambda properties: {"type": "object", "properties": properties, "required": [*properties][:2], "additionalProperties": False}
    )
    return lists | objects | st.lists(parts, min_size=2, max_size=2).map(lambda two: {"anyOf": two})


schemas = st.recursive(leaves, around, max_leaves=5)


# promise: samplingparams-structured-outputs
@settings(max_examples=40)
@given(
    wanted=st.lists(schemas, min_size=1, max_size=3),
    n=st.integers(1, 3),
    depth=st.sampled_from([1, 2]),
    preempt_every=st.sampled_from([0, 3]),
    num_blocks=st.sampled_from([110, 600]),
    seed=st.integers(0, 99),
)
def test_json_parses_and_fits_its_schema_and_neighbours_say_what_they_would_say_alone(
    wanted: list[dict[str, Any]], n: int, depth: int, preempt_every: int, num_blocks: int, seed: int
) -> None:
    engine = engine_of(depth=depth, preempt_every=preempt_every, num_blocks=num_blocks, rows=6)
    for number, schema in enumerate(wanted):
        engine.add(f"json{number}", [seed % 49, number, 3, 4, 5], asking({"json": schema}, 400, n=n, seed=seed))
        engine.add(f"plain{number}", [seed % 49, number, 3, 4, 6], SamplingParams(max_tokens=30, seed=seed))
    run(engine)
    for number, schema in enumerate(wanted):
        for index in range(n):
            said = text_of(engine, f"json{number}", index)
            assert engine.reason(f"json{number}", index) == "stop", said
            assert jsonschema_rs.is_valid(schema, json.loads(said)), said
        assert (engine.tokens[f"plain{number}", 0], engine.reason(f"plain{number}")) == engine.expected(f"plain{number}")


TEXTS = [
    ({"regex": r"x{2,5}(y|z[01/]{3})+\."}, r"x{2,5}(y|z[01/]{3})+\."),
    ({"regex": r"\d{3}-[\dx]{2}"}, r"[0-9]{3}-[0-9x]{2}"),
    ({"choice": ["true", "tru", "xy", "x.y", '"']}, r'true|tru|xy|x\.y|"'),
    ({"grammar": 'start: list\nlist: list "," ITEM | ITEM\nITEM: /[xyz]{1,3}/'}, r"[xyz]{1,3}(,[xyz]{1,3})*"),
    ({"json_object": True}, r"\{.*\}"),
]


# promise: samplingparams-structured-outputs
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("structured", "pattern"), TEXTS, ids=lambda value: str(value)[:20])
def test_an_answer_matches_as_a_whole(structured: object, pattern: str, depth: int) -> None:
    engine = engine_of(depth=depth, num_blocks=2000, rows=8, preempt_every=5)
    for number in range(4):
        engine.add(f"r{number}", [number, 1, 2], asking(structured, 700, n=3, seed=number))
    run(engine)
    texts = {text_of(engine, name, index) for name, index in engine.tokens if engine.reason(name, index) == "stop"}
    assert len(texts) > 1 and all(re.fullmatch(pattern, text, re.DOTALL) for text in texts), texts
    assert sum(engine.reason(*key) == "stop" for key in engine.tokens) >= 10


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("structured", "pattern"), TEXTS, ids=lambda value: str(value)[:20])
def test_drafts_change_no_answer(structured: object, pattern: str, depth: int) -> None:
    """A mask belongs to each output: what may follow a draft, also where the draft is wrong, or is the last that may come."""
    kinds: list[dict[str, Any]] = [{}, {"min_tokens": 9}, {"ignore_eos": True}, {"stop_token_ids": (3,)}]
    answers: list[dict[tuple[str, int], tuple[list[int], FinishReason | None]]] = []
    random, accepted = Random(depth), 0

    def draft(seq: Sequence) -> list[int]:
        right, known = answers[0][seq.request.request_id, seq.index][0], seq.num_tokens - seq.request.num_prompt
        return [token if random.random() < 0.8 else random.randrange(VOCAB) for token in [*right[known:], END][: random.randint(0, 5)]]

    for source in (None, draft):
        engine = engine_of(depth=depth, num_blocks=2000, rows=40)
        engine.scheduler.drafts.source = source
        for number, kind in enumerate(kinds):
            engine.add(f"r{number}", [number, 1, 2], asking(structured, 60, n=2, seed=number, **kind))
        run(engine)
        answers.append({key: (tokens, engine.reason(*key)) for key, tokens in engine.tokens.items()})
        assert engine.scheduler.stats.generation_tokens == sum(map(len, engine.tokens.values())), "tokens were sampled after an end"
        accepted += sum(len(steps) - len(set(steps)) for steps in engine.token_steps.values())
    assert answers[0] == answers[1] and accepted


# ---- where a text may end


def test_a_text_that_is_complete_ends_with_stop_at_once_without_an_end_id() -> None:
    engine = engine_of()
    engine.add("whole", [1], asking({"choice": ["xy"]}))
    engine.add("just enough", [1], asking({"regex": "x{3}"}, 3))
    engine.add("cut", [1], asking({"regex": "x{3}"}, 2))
    run(engine)
    assert (text_of(engine, "whole"), engine.reason("whole"), END in engine.tokens["whole", 0]) == ("xy", "stop", False)
    assert (text_of(engine, "just enough"), engine.reason("just enough")) == ("xxx", "stop")
    assert (text_of(engine, "cut"), engine.reason("cut")) == ("xx", "length")


@pytest.mark.parametrize("depth", [1, 2])
def test_masks_are_filled_while_the_forward_runs(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, called = engine_of(depth=depth), list[str]()

    def note(owner: object, name: str) -> None:
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: (called.append(name), call(*given))[1])

    for owner, name in ((engine.executor, "forward"), (engine.core.grammars, "fill"), (engine.executor, "sample")):
        note(owner, name)
    engine.add("a", [1], asking({"regex": "x{9}"}))
    run(engine)
    assert called == ["forward", "fill", "sample"] * (len(called) // 3) and len(called) >= 27


@pytest.mark.parametrize("ending", [None, "length", "stop"])
def test_what_several_tokens_say_behind_the_end_of_a_text_is_dropped(ending: FinishReason | None) -> None:
    engine = engine_of()
    engine.add("a", [1], asking({"choice": ["xy"]}))
    grammars = engine.core.grammars
    while engine.scheduler.requests["a"].held:
        grammars.nap()
        grammars.collect(engine.scheduler)
    x, y = SPELLINGS.index(b"x"), SPELLINGS.index(b"y")
    logprobs = [TokenLogprobs(-float(at), 1, (), ()) for at in range(4)]
    delta = Delta("a", 0, [x, y, x, END if ending == "stop" else y], logprobs, finish_reason=ending)
    first, *ends = grammars.advance(engine.scheduler, [delta])
    assert first.token_ids == [x, y] and first.logprobs == logprobs[:2]
    assert [news.finish_reason for news in (first, *ends)] == [None, "stop"], "its last token is text, and no end id"


@pytest.mark.parametrize("depth", [1, 2])
def test_end_ids_that_are_ignored_or_come_too_early_are_no_way_out(depth: int) -> None:
    engine = engine_of(depth=depth)
    for seed in range(6):
        engine.add(f"may end{seed}", [1], asking({"regex": "x{1,30}"}, seed=seed))
        engine.add(f"ignores{seed}", [1], asking({"regex": "x{1,30}"}, ignore_eos=True, seed=seed))
        engine.add(f"twelve{seed}", [1], asking({"regex": "x{1,30}"}, min_tokens=12, seed=seed))
        engine.add(f"short{seed}", [1], asking({"choice": ["xy", "x"]}, min_tokens=50, seed=seed))
    run(engine)
    lengths = {name: len(text_of(engine, name)) for name, _ in engine.tokens}
    assert {engine.reason(name) for name in lengths} == {"stop"}
    assert min(lengths[f"may end{seed}"] for seed in range(6)) < 12, "end ids end a text that may end"
    assert {lengths[f"ignores{seed}"] for seed in range(6)} == {30}
    assert all(12 <= lengths[f"twelve{seed}"] <= 30 for seed in range(6))
    assert {text_of(engine, f"short{seed}") for seed in range(6)} == {"xy"}, "it goes on while it can, and ends where it must"


def test_a_model_without_end_ids_ends_where_the_grammar_does() -> None:
    engine = engine_of(end_ids=())
    engine.add("a", [1], asking({"regex": "x{1,9}"}))
    engine.add("cannot go on", [1], asking({"regex": "xyw?"}))  # nothing in the vocabulary spells a w
    run(engine)
    assert (text_of(engine, "a"), engine.reason("a")) == ("x" * 9, "stop")
    assert (text_of(engine, "cannot go on"), engine.reason("cannot go on")) == ("xy", "stop")


# ---- what goes wrong


@pytest.mark.parametrize("depth", [1, 2])
def test_a_dead_end_ends_its_own_request_with_an_error(depth: int) -> None:
    """Nothing in the vocabulary spells a w."""
    engine = engine_of(depth=depth)
    engine.add("dead", [1], asking({"regex": "x[yz]{2}w"}, n=2))
    engine.add("deader", [1], asking({"regex": "(xw|zw)y"}))
    engine.add("fine", [1], asking({"regex": "x[yz]{9}"}))
    engine.add("plain", [1], SamplingParams(max_tokens=9))
    run(engine)
    assert [engine.reason(*key) for key in (("dead", 0), ("dead", 1), ("deader", 0))] == ["error"] * 3
    assert re.fullmatch("x[yz]{1,2}", text_of(engine, "dead")), "what was said stays"
    assert "leads nowhere" in str(engine.ends["dead", 0].error) and engine.ends["dead", 0].code == "grammar_error"
    assert re.fullmatch("x[yz]{9}", text_of(engine, "fine"))
    assert (engine.tokens["plain", 0], "length") == engine.expected("plain")


def test_what_cannot_be_compiled_or_takes_too_long_ends_its_own_request_with_an_error() -> None:
    for late, said in ((False, "no text can match it"), (True, "took more than 30 s")):
        engine = engine_of(late=late)
        engine.add("bad", [1], asking({"json": {"$ref": "#"}}, n=2))
        engine.add("plain", [1], SamplingParams(max_tokens=9))
        run(engine)
        assert [engine.reason("bad", index) for index in range(2)] == ["error", "error"]
        assert said in str(engine.ends["bad", 0].error) and not engine.tokens["bad", 0]
        assert (engine.tokens["plain", 0], "length") == engine.expected("plain")


def test_a_grammar_whose_masks_take_too_long_fails_once_for_all_its_samples() -> None:
    """A mask of this regex takes a tenth of a second, and each sample would find that out for itself."""
    engine = engine_of(rows=40, num_blocks=2000)
    slow: Any = {"grammar": "start: /(x{1000}){1000}/"}
    start = time.process_time()
    engine.add("slow", [1], asking(slow, n=40))
    engine.add("fine", [1], asking({"regex": "x[yz]{9}"}))
    engine.add("plain", [1], SamplingParams(max_tokens=9))
    run(engine)
    engine.add("slow again", [1], asking(slow, n=40))
    run(engine)
    assert time.process_time() - start < 8
    for name in ("slow", "slow again"):
        assert {engine.reason(name, index) for index in range(40)} == {"error"} and engine.ends[name, 0].code == "grammar_error"
    assert re.fullmatch("x[yz]{9}", text_of(engine, "fine"))
    assert (engine.tokens["plain", 0], "length") == engine.expected("plain")


def test_a_grammar_above_its_time_fails_at_the_first_sample_and_stays_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(rows=40, num_blocks=2000)
    engine.add("before", [1], asking({"regex": "x[yz]{9}"}))
    run(engine)
    monkeypatch.setattr(guidance, "MASK_SECONDS", 0)
    monkeypatch.setattr(guidance, "GRACE_SECONDS", 0)
    for name in ("first", "second"):
        engine.add(name, [1], asking({"choice": ["xy", "zx"]}, n=40))
        engine.add(f"plain {name}", [1], SamplingParams(max_tokens=9))
        run(engine)
        assert {engine.reason(name, index) for index in range(40)} == {"error"}
        assert "too much work" in str(engine.ends[name, 0].error) and engine.ends[name, 0].code == "grammar_error"
        assert (engine.tokens[f"plain {name}", 0], engine.reason(f"plain {name}")) == engine.expected(f"plain {name}")
    (compiled,) = [future.result() for form, future in engine.core.grammars._cache.items() if form.choice]
    assert compiled.cost.masks <= 1 + guidance.TIMED_MASKS, "nobody else was asked"


@pytest.mark.parametrize("depth", [1, 2])
def test_samples_take_turns_where_the_masks_of_all_would_take_long(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four samples and two prompts at 50 ms a mask, 100 ms a step: two masks in each step. A request without a grammar waits for none."""
    monkeypatch.setattr(grammar, "TURN_SECONDS", 0.1)
    monkeypatch.setattr(guidance.Matcher, "mask_seconds", 0.05)
    engine = engine_of(depth=depth)
    engine.add("free", [1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True))
    engine.add("samples", [1, 2, 3], asking({"regex": "[xy]{8}"}, n=4))
    engine.add("one", [1, 2, 3], asking({"regex": "[xy]{8}"}))
    engine.add("another", [5, 6], asking({"regex": "[xy]{8}"}))
    masked, free, schedule = [], [], engine.scheduler.schedule

    def watched() -> StepPlan:
        plan = schedule()
        masked.append(len(plan.mask_rows))
        free.append(0 in plan.seq_id)
        return plan

    monkeypatch.setattr(engine.scheduler, "schedule", watched)
    run(engine)
    assert max(masked) == 2 and sum(masked) >= 6 * 8 // 2
    assert sum(free) == 40 and all(free[:40]), "it was planned in every step"
    for name, index in [*(("samples", index) for index in range(4)), ("one", 0), ("another", 0)]:
        assert re.fullmatch("[xy]{8}", text_of(engine, name, index))


def test_samples_have_matchers_while_they_run() -> None:
    engine = engine_of(rows=4)
    for number in range(10):
        engine.add(f"r{number}", [1], asking({"regex": "x{4}"}, n=4))
    most = 0
    while engine.core.has_work:
        engine.step()
        most = max(most, sum(len(guided.samples) for guided in engine.core.grammars._guided.values()))
    assert most == 4 and {engine.reason(*key) for key in engine.tokens} == {"stop"}


def test_a_vocabulary_that_could_not_be_read_is_read_again() -> None:
    engine, tries = engine_of(), list[int]()

    def read() -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("the disk is away")
        return Letters()

    engine.core.grammars = Grammars(read, VOCAB, (END,))
    for name in ("first", "second", "third"):
        engine.add(name, [1], asking({"choice": ["xy"]}))
        run(engine)
    assert engine.reason("first") == "error" and engine.ends["first", 0].code == "grammar_busy"
    assert engine.reason("second") == engine.reason("third") == "stop" and len(tries) == 2


def test_while_a_grammar_is_compiled_others_run_nothing_spins_and_it_can_be_aborted() -> None:
    engine, go = engine_of(rows=2), threading.Event()

    def slow() -> Any:
        assert go.wait(30)
        return Letters()

    engine.core.grammars = Grammars(slow, VOCAB, (END,))
    for name in ("aborted", "waits"):
        engine.add(name, [1, 2, 3], asking({"choice": ["xy", "zx"]}))
    engine.add("plain", [1, 2, 3, 4], SamplingParams(max_tokens=9))
    for _ in range(20):
        engine.step()
    assert (engine.tokens["plain", 0], "length") == engine.expected("plain"), "it stood behind two that wait"
    step, until, rounds = engine.scheduler.step, time.monotonic() + 0.3, 0
    while time.monotonic() < until:
        engine.step()
        rounds += 1
    assert engine.scheduler.step == step, "no step is spent on waiting"
    assert 0 < rounds < 40, "it spins"
    engine.abort("aborted")
    go.set()
    run(engine)
    assert engine.reason("aborted") == "abort" and engine.reason("waits") == "stop"


def test_a_request_that_was_ended_elsewhere_or_whose_name_is_used_again_leaves_nothing() -> None:
    engine = engine_of(rows=1)
    engine.add("first", [1], asking({"choice": ["xy"]}))
    run(engine)  # the grammar is compiled from here on
    engine.add("runs", [1], SamplingParams(max_tokens=200, ignore_eos=True))
    engine.step()
    engine.add("expires", [1], asking({"choice": ["xy"]}))
    while engine.core.grammars._jobs:
        engine.step()
    engine._record(engine.scheduler.expire(1))  # as a queue's time-out does, past the core
    assert engine.reason("expires") == "error"
    engine.add("again", [1], asking({"choice": ["xy"]}))
    while engine.core.grammars._jobs:
        engine.step()
    engine.core.abort("again")
    engine.core.add(AddRequest("again", [2], SamplingParams(max_tokens=9, ignore_eos=True)))
    run(engine)
    assert (len(engine.tokens["again", 0]), engine.reason("again")) == (9, "length")


def test_two_thousand_schemas_take_no_more_memory_than_one_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "CACHE_BYTES", 4 * 2**20)
    engine, taken = engine_of(check=False), []
    for number in range(2000):
        engine.add(f"r{number}", [1], asking({"json": {"enum": [f"x{number}", f"y{number}"]}}, 1))
        if number % 50 == 49:
            while engine.core.has_work:
                engine.step()
        if number % 1000 == 999:
            taken.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    grammars = engine.core.grammars
    assert taken[1] - taken[0] < 10 * 2**20
    assert len(grammars._cache) < 40 and grammars._cache_bytes == sum(map(grammar._size, grammars._cache))


def test_one_grammar_is_compiled_once_and_one_that_failed_again() -> None:
    engine = engine_of()
    for number in range(3):
        engine.add(f"r{number}", [1], asking({"choice": ["xy"]}))
        engine.add(f"bad{number}", [1], asking({"regex": "("}))
    run(engine)
    first = dict(engine.core.grammars._cache)
    engine.add("again", [1], asking({"choice": ["xy"]}))
    engine.add("bad again", [1], asking({"regex": "("}))
    run(engine)
    now = engine.core.grammars._cache
    assert [now[form] is first[form] for form in first] == [bool(form.choice) for form in first]


# ---- the door


# promise: samplingparams-structured-outputs
def test_without_a_tokenizer_or_the_library_it_is_refused_at_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        FakeEngine().add("a", [1], asking({"choice": ["xy"]}))
    engine = engine_of()
    monkeypatch.setattr(limits, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match="pip install llguidance") as refused:
        engine.add("a", [1], asking({"choice": ["xy"]}))
    assert refused.value.param == "structured_outputs"
    engine.add("plain", [1])
    run(engine)


WITHOUT = """
import sys
sys.modules["llguidance"] = None
from tests.support.fake import FakeEngine
import octavo.llm
engine = FakeEngine()
engine.add("a", [1, 2])
engine.run()
engine.assert_exact()
"""


def test_the_engine_runs_where_the_library_is_not_installed() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT], check=True)
