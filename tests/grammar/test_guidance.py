"""Grammars as they are compiled accept what they say: regexes against Python's, forms of JSON, spellings of a tokenizer."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.errors import RequestError
from octavo.grammar import guidance
from octavo.grammar.guidance import Guide
from octavo.grammar.text import MAX_PROPERTIES, check_limits, grammar_text, joined_grammars
from octavo.structured_outputs import structured_outputs
from octavo.text.tokenizer import Tokenizer
from tests.support.tokenizers import qwen_folder

END = 256
BYTES = Guide([bytes([byte]) for byte in range(256)] + [b"<end>"], [END], [END], list)


def accepts(structured: object, text: str, guide: Guide = BYTES) -> bool:
    matcher = guide.compile(grammar_text(structured_outputs(structured)))
    matcher.advance(list(text.encode()))
    return not matcher.failed and matcher.accepting


REGEXES = [
    r"a/b", r"a\/b", "a\nb", r"a\nb", r"[/\n]+", r"\d+", r"[\d/]{2}", r"\\d", r"[\\d]+",
    r"[]a]+", r"[^]/]*", r"\[\d\]", r"(a|b)*\.", r"a{2,3}b?",
]  # fmt: skip


@given(regex=st.sampled_from(REGEXES), text=st.text(alphabet="ab/\\dn\n]1[.2", max_size=5))
@example(r"\d+", "12")
@example(r"a/b", "a/b")
@example("a\nb", "a\nb")
@example(r"\[\d\]", "[1]")
@example(r"[\\d]+", "\\d")
def test_a_regex_accepts_what_pythons_does(regex: str, text: str) -> None:
    assert accepts({"regex": regex}, text) == bool(re.fullmatch(regex, text))


def test_digits_are_those_of_json() -> None:
    assert accepts({"regex": r"\d"}, "7") and not accepts({"regex": r"\d"}, "٧") and not accepts({"regex": r"[\d]"}, "１")


SQL = """
    root ::= select   # a comment, with a "quote" |

    select ::= "SELECT " column " from " [a-z]+
    column ::= "col_1"
      | "col_\\u0032"
      | [\\u00e0-\\u00ff/\\]] "#" """


# promise: structured-outputs-params
def test_a_grammar_may_be_ebnf_as_vllm_and_llama_cpp_write_it() -> None:
    for text in ("SELECT col_1 from a", "SELECT col_2 from users", "SELECT é# from t", "SELECT /# from t", "SELECT ]# from t"):
        assert accepts({"grammar": SQL}, text), text
    for text in ("SELECT col_3 from a", "SELECT col_1 from ", "SELECT e# from t", "SELECT é from t"):
        assert not accepts({"grammar": SQL}, text), text
    deep = "root ::= " + "(" * 9999
    for wrong, said in (("root ::= missing", "missing"), ("a ::= b", "b"), ('root ::= "a', "end of input"), (deep, "deep")):
        with pytest.raises(RequestError, match=f"grammar is not valid EBNF: .*{said}"):
            accepts({"grammar": wrong}, "a")


CITY = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"], "additionalProperties": False}
TAG = {
    "structures": [
        {"begin": "<f=weather>", "schema": CITY, "end": "</f>"},
        {"begin": "<f=time>", "schema": {"type": "object"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


# promise: structured-outputs-params
@pytest.mark.parametrize("wrapped", [False, True])
def test_text_is_free_until_a_trigger_and_then_a_tag_with_its_json_must_follow(wrapped: bool) -> None:
    form = structured_outputs({"structural_tag": json.dumps(TAG)})
    check_limits(form)
    grammar = {"grammar": joined_grammars("start: @form", {"form": form})} if wrapped else form
    call = '<f=weather>{"city": "Rome"}</f>'
    for text in ("", "It is sunny.", f"Ask: {call}", f"{call}{call} and {call}", "<f=time>{}</f>", "a <f or <b>"):
        assert accepts(grammar, text), text
    for text in ("<f=", "<f=other>", '<f=weather>{"city": "Oslo"}</f>', '<f=weather>{"city": "Rome"} ', "a\n<f=time>[]"):
        assert not accepts(grammar, text), text


letters = st.characters(exclude_categories=("Cs",), exclude_characters="\0")


@given(st.lists(st.text(letters, min_size=1, max_size=6), min_size=1, max_size=4))
@example(['"', "\\", "\n", 'a"b', "<|im_end|>", "é"])
def test_a_choice_is_one_of_its_texts_whatever_they_hold(texts: list[str]) -> None:
    for text in texts:
        assert accepts({"choice": texts}, text) and accepts({"choice": texts}, text + "x") == (text + "x" in texts)


def test_json_may_be_laid_out_and_not_be_padded_for_ever() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    value = {"a": [1, 2]}
    for text in (json.dumps(value), json.dumps(value, separators=(",", ":")), json.dumps(value, indent=2), json.dumps(value, indent="\t")):
        assert accepts({"json": schema}, text), text
        assert accepts({"json_object": True}, text), text
    assert not accepts({"json": schema}, '{"a":' + " " * 3 + "[1]}") and not accepts({"json": schema}, '{"a":\n' + " " * 50 + "[1]}")
    assert not accepts({"json_object": True}, "[1]")


@pytest.mark.parametrize("spells", ["as asked", "with a space", "with a special token", "not at all"])
def test_what_is_forced_is_spelled_in_exactly_its_bytes(spells: str) -> None:
    """Some tokenizers put a space in front, or read a special token out of the text; a mask must never ask for either."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>", b"ye", b" yes"]
    said = {"as asked": [257, ord("s")], "with a space": [258], "with a special token": [256], "not at all": []}[spells]
    guide = Guide(tokens, [256], [256], lambda data: said if data == b"yes" else list(data))
    matcher = guide.compile(grammar_text(structured_outputs({"choice": ["yes"]})))
    masks = np.zeros((1, guide.num_words), np.int32)
    guide.fill([(0, matcher)], masks)
    allowed = [token for token in range(len(tokens)) if int(masks[0, token >> 5]) >> (token & 31) & 1]
    assert allowed and all(b"yes".startswith(tokens[token]) for token in allowed)


def followed(guide: Guide, tokens: list[bytes], text: str) -> bytes:
    """What a model says that takes the longest token it may."""
    matcher, said = guide.compile(grammar_text(structured_outputs({"choice": [text]}))), b""
    masks = np.zeros((1, guide.num_words), np.int32)
    while not matcher.ended and not matcher.failed:
        guide.fill([(0, matcher)], masks)
        allowed = [token for token in range(len(tokens)) if int(masks[0, token >> 5]) >> (token & 31) & 1]
        token = max(allowed, key=lambda token: len(tokens[token]))
        said += tokens[token]
        matcher.advance([token])
    assert not matcher.failed
    return said


def test_a_long_text_that_must_follow_is_spelled_piece_by_piece() -> None:
    """The tokenizer is asked for its start alone, however long it is: at every mask, that is."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>", b"ab", "é".encode(), b"abab"]
    asked = list[int]()

    def encode(data: bytes) -> list[int]:
        asked.append(len(data))
        data.decode()  # whole characters
        ids: list[int] = []
        while data:
            token = max((token for token in range(len(tokens)) if data.startswith(tokens[token])), key=lambda token: len(tokens[token]))
            ids, data = [*ids, token], data[len(tokens[token]) :]
        return ids

    text = "ababé" * 300
    assert followed(Guide(tokens, [256], [256], encode), tokens, text) == text.encode()
    assert max(asked) <= 256


def test_a_choice_of_ten_thousand_texts_can_be_followed_to_any_of_them() -> None:
    texts = [f"{number * 7919 % 10_007} of them" for number in range(10_000)]
    for text in (texts[0], texts[5_000], texts[-1]):
        assert accepts({"choice": texts}, text)
    assert not accepts({"choice": texts}, texts[0] + "x")


def test_an_object_of_as_many_optional_properties_as_are_allowed_can_be_followed_in_a_large_vocabulary(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(qwen_folder(tmp_path))
    names = [f"{kind}_{number}" for number in range(MAX_PROPERTIES // 5) for kind in ("name", "price", "p", "order_date", "customer")]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    large = guidance.guide(tokenizer, 151_643, [151_642])
    matcher = large.compile(grammar_text(structured_outputs({"json": schema})))
    masks = np.zeros((1, large.num_words), np.int32)
    for token in tokenizer.encode(json.dumps({names[3]: 1, names[250]: 2, names[-1]: 3}), False):
        large.fill([(0, matcher)], masks)
        assert not matcher.failed and masks[0, token >> 5] >> (token & 31) & 1
        matcher.advance([token])
    assert matcher.accepting


def test_masks_that_are_filled_together_are_those_filled_one_by_one() -> None:
    compiled = BYTES.compile(grammar_text(structured_outputs({"regex": "[a-z]{5}[0-9]+"})))
    matchers = [(row, compiled.copy()) for row in range(70)]
    for row, matcher in matchers:
        matcher.advance(list(b"abcde12"[: row % 8]))
    first, second = np.zeros((70, BYTES.num_words), np.int32), np.zeros((70, BYTES.num_words), np.int32)
    BYTES.fill(matchers, first)
    assert compiled.cost.to_time == 0, "they are trusted by now"
    seconds = compiled.cost.seconds
    BYTES.fill(matchers, second)
    for _ in range(1_000):
        compiled.copy().advance(list(b"abcde12"))
    assert compiled.cost.seconds == seconds, "what lives long does not become too costly by its age"
    assert (first == second).all() and len({row.tobytes() for row in first}) == 3


def test_after_a_slow_batch_the_masks_of_its_grammar_are_filled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = BYTES.compile(grammar_text(structured_outputs({"regex": "[a-z]+"})))
    matchers = [(row, compiled.copy()) for row in range(3 * guidance.ROUNDS * guidance.MOST_THREADS)]
    expected, masks = np.zeros((len(matchers), BYTES.num_words), np.int32), np.zeros((len(matchers), BYTES.num_words), np.int32)
    BYTES.fill(matchers, expected)
    assert compiled.cost.to_time == 0, "they are trusted by now"
    monkeypatch.setattr(guidance, "MASK_SECONDS", -1.0)  # any batch is slow
    monkeypatch.setattr(guidance, "_fill_timed", lambda matcher, masks, row, grace: masks[row].__setitem__(slice(None), expected[row]))
    BYTES.fill(matchers, masks)
    assert compiled.cost.to_time == guidance.TIMED_MASKS and (masks == expected).all()
