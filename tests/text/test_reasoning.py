"""Thinking told from the answer: however the text is cut, nothing lost, nothing held back that need not be."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.text.prompt import ChatTemplate
from octavo.text.reasoning import (
    Piece,
    PlainSplitter,
    ReasoningSplitter,
    ReasoningTokens,
    behind_thought,
    reasoning_family,
    reasoning_splitter,
)
from tests.support.cut import CUTS, cut
from tests.support.tokenizers import DATA

OPENED = "<|im_start|>assistant\n<think>\n"
SOUP = st.lists(st.sampled_from(["<think>", "</think>", "</thi", "nk>", "<", "a", "é", " ", "\n", " " * 9]), max_size=10).map("".join)


def runs(pieces: list[Piece]) -> list[tuple[str, str]]:
    """(kind, text), neighbours of a kind joined."""
    joined: list[tuple[str, str]] = []
    for piece in pieces:
        assert piece.text
        same = joined and joined[-1][0] == piece.kind
        joined[-1:] = [(piece.kind, joined[-1][1] + piece.text)] if same else [*joined[-1:], (piece.kind, piece.text)]
    return joined


def split(texts: list[str], prompt: str = "") -> list[tuple[str, str]]:
    splitter = ReasoningSplitter(prompt)
    return runs([piece for text in texts for piece in splitter.push(text)] + splitter.flush())


# promise: page-continue
@given(CUTS)
def test_an_answer_that_continues_a_thought_begins_inside_it(cuts: list[int]) -> None:
    """White space and tags at its beginning belong to the thought."""
    for family, text, wanted in (
        ("think", " and <think> 4.\n</think>\n\nYes", [("reasoning", " and <think> 4."), ("tag", "\n</think>\n\n"), ("content", "Yes")]),
        ("harmony", " 4.<|end|><|start|>assistant<|channel|>final<|message|>Yes", [("reasoning", " 4."), ("content", "Yes")]),
    ):
        splitter = reasoning_splitter(family, "a prompt", in_thought=True)
        pieces = runs([piece for part in cut(text, cuts) for piece in splitter.push(part)] + splitter.flush())
        assert [piece for piece in pieces if family == "think" or piece[0] != "tag"] == wanted
        counter = ReasoningTokens("a prompt", lambda token: b"abc</think>"[token : token + 1], in_thought=True)
        counter.push(range(11))
        assert counter.count == 11
    assert "(" not in behind_thought("answer: A\n", "think", "a prompt", in_thought=True).splitlines()[0], "the tag is not written again"


@given(SOUP, CUTS, st.booleans())
def test_any_cut_gives_the_same_pieces_and_every_character_once(text: str, cuts: list[int], opened: bool) -> None:
    prompt = OPENED if opened else ""
    pieces = split(cut(text, cuts), prompt)
    assert pieces == split([text], prompt)
    assert "".join(text for _, text in pieces) == text


TOKENS = st.sampled_from([b"<think>", b"</think>", b"</", b"think", b">x", "é".encode()[:1], b"\n", b"a"])
SPACE = st.text(" \n\t", max_size=3)
WORDS = st.text("ab <>/\n", max_size=12).map(str.strip)


@given(SPACE, WORDS, SPACE, SPACE, WORDS, CUTS, st.booleans(), st.booleans())
def test_thinking_comes_first_and_space_belongs_to_the_tags(
    before: str, thought: str, behind: str, gap: str, answer: str, cuts: list[int], opened: bool, said: bool
) -> None:
    head = before + "<think>" + gap if said or not opened else before
    tail = behind + "</think>" + gap
    expected = [("tag", head), ("reasoning", thought), ("tag", tail), ("content", answer)]
    if not thought:
        expected = [("tag", head + tail), ("content", answer)]
    text = head + thought + tail + answer
    assert split(cut(text, cuts), OPENED if opened else "") == [piece for piece in expected if piece[1]]


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("It is <think>no</think> thought.", False, [("content", "It is <think>no</think> thought.")]),
        ("\n\n4", False, [("content", "\n\n4")]),
        (" <thi", False, [("content", " <thi")]),
        ("hm </thi", True, [("reasoning", "hm </thi")]),
        ("<think>never done\n", False, [("tag", "<think>"), ("reasoning", "never done\n")]),
        ("<think></think><think>", False, [("tag", "<think></think>"), ("content", "<think>")]),
        (" " * 9 + "<think>a", False, [("content", " " * 9 + "<think>a")]),
    ],
)
def test_what_is_no_thought_is_text_and_one_never_closed_stays_one(text: str, opened: bool, expected: list[tuple[str, str]]) -> None:
    assert split([text], OPENED if opened else "") == expected == split(list(text), OPENED if opened else "")


@given(st.lists(SOUP, max_size=6), st.booleans())
def test_only_what_may_become_a_tag_is_held_back(texts: list[str], opened: bool) -> None:
    splitter, shown = ReasoningSplitter(OPENED if opened else ""), ""
    for end, text in enumerate(texts):
        shown += "".join(piece.text for piece in splitter.push(text))
        held = "".join(texts[: end + 1])[len(shown) :]
        half = held.lstrip(" \n")
        assert len(held) - len(half) <= 8 and ("<think>".startswith(half) or "</think>".startswith(half))


@given(st.lists(TOKENS, max_size=12), CUTS, st.booleans())
def test_tokens_of_thinking_are_counted_to_the_one_that_ends_it(tokens: list[bytes], cuts: list[int], opened: bool) -> None:
    prompt = OPENED if opened else ""
    counter, ids = ReasoningTokens(prompt, tokens.__getitem__), list(range(len(tokens)))
    for length in cuts:
        counter.push(ids[:length])
        ids = ids[length:]
    counter.push(ids)
    thinks = opened or re.match(rb"\s{0,8}<think>", b"".join(tokens))
    ends = [end for end in range(len(tokens)) if b"</think>" in b"".join(tokens[:end])]
    assert counter.count == (min([*ends, len(tokens)]) if thinks else 0)


def test_templates_say_whether_they_think_and_whether_they_began() -> None:
    prompts = {}
    for file in (DATA / "templates").glob("*.jinja"):
        source = file.read_text(encoding="utf-8")
        if reasoning_family("auto", source) == "think":
            variables = {"enable_thinking": True}
            prompts[file.stem] = ChatTemplate(source, file.stem, "", "").render([{"role": "user", "content": "2+2?"}], variables=variables)
    began = {name for name, prompt in prompts.items() if split(["hm"], prompt) == [("reasoning", "hm")]}
    opens = {"Qwen-QwQ-32B", "Qwen3-VL-Thinking", "Qwen3.5-4B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-ai-DeepSeek-V3.1"}
    assert began == opens and prompts.keys() - began == {"Qwen-Qwen3-0.6B", "Qwen3_from_tokenizer_config", "HuggingFaceTB-SmolLM3-3B"}


def test_without_a_parser_everything_is_content() -> None:
    assert reasoning_family("none", "<think>") == "none" == reasoning_family("auto", None)
    plain = reasoning_splitter("none", OPENED)
    assert isinstance(plain, PlainSplitter)
    assert plain.push("<think>") + plain.push("") + plain.flush() == [Piece("content", "<think>")]
