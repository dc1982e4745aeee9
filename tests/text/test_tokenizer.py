"""Text to ids and back: published vectors, plain re-tellings of the algorithms as oracles, and damaged files."""

import json
import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import LoadError, RequestError
from octavo.text.gguf_tokenizer import SPLITS
from octavo.text.tokenizer import Tokenizer, byte_level_bytes
from tests.support.tokenizers import (
    DATA,
    gpt2_metadata,
    qwen_folder,
    qwen_metadata,
    smollm2_metadata,
    stories_metadata,
    vectors,
)

# Words, numbers, spaces and scripts mixed, so that every rule of a pre-tokenizer meets every other.
snippets = st.sampled_from(
    ["Hello", " world", "'ll", "'S", "don't", "  ", "\n", "\t\n ", "\r\n", "2024", " 7", "½", "x9y", "!?.", "<s>"]
    + ["ß", "Ελλάδα", "日本語", "🦙", "e\u0301"]
)


def without_control(text: str) -> str:
    """Hypothesis also draws strings that imported modules have, such as <|endoftext|>, which is read as that token."""
    return text.replace("<|", "")


texts = st.lists(snippets | st.text(max_size=6), max_size=12).map("".join).map(without_control)


@cache
def smollm2() -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata(), "smollm2.gguf")


@cache
def stories() -> Tokenizer:
    return Tokenizer.from_gguf(stories_metadata(), "stories.gguf")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_folder(tmp_path_factory.mktemp("qwen"))


def test_gpt2_vectors() -> None:
    tokenizer = Tokenizer.from_gguf(gpt2_metadata(), "gpt-2.gguf")
    assert [tokenizer.encode(text) for text, _ in vectors("gpt-2")] == [ids for _, ids in vectors("gpt-2")]
    assert [tokenizer.decode(ids) for _, ids in vectors("gpt-2")] == [text for text, _ in vectors("gpt-2")]


def test_qwen2_vectors_from_a_folder_and_from_gguf(qwen: Path) -> None:
    from_folder = Tokenizer.from_folder(qwen)
    from_gguf = Tokenizer.from_gguf(qwen_metadata((qwen / "tokenizer.json").read_text(encoding="utf-8")), "qwen.gguf")
    expected = [ids for _, ids in vectors("qwen2")]
    assert from_gguf.encode("it'Stop, we'LLama") == from_folder.encode("it'Stop, we'LLama")
    for tokenizer in (from_folder, from_gguf):
        assert [tokenizer.encode(text) for text, _ in vectors("qwen2")] == expected
        assert tokenizer.eos_token == "<|im_end|>" and tokenizer.vocab_size == 151_665

    @settings(max_examples=60)
    @given(texts)
    def check(text: str) -> None:
        assert from_gguf.encode(text) == from_folder.encode(text)

    check()
    assert from_folder.chat_template is not None and "<|im_start|>" in from_folder.chat_template


GPT2_PATTERN = regex.compile(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


@cache
def smollm2_oracle() -> Callable[[str], list[int]]:
    """Single digits apart, GPT-2's words, then merge the lowest-ranked pair until none is left."""
    metadata = smollm2_metadata()
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, list) and isinstance(merges, list)
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    rank = {tuple(merge.split(" ")): order for order, merge in enumerate(merges)}
    spelling = {smollm2().token_bytes(token_id): tokens[token_id] for token_id in range(17, 300) if len(tokens[token_id]) == 1}

    def word_ids(word: str) -> list[int]:
        # A byte the vocabulary lacks is dropped, as the published tokenizer does.
        parts = [spelling[bytes([byte])] for byte in word.encode() if bytes([byte]) in spelling]
        while pairs := [pair for pair in pairwise(parts) if pair in rank]:
            best = min(pairs, key=rank.__getitem__)
            merged, at = [], 0
            while at < len(parts):
                joined = tuple(parts[at : at + 2]) == best
                merged.append("".join(best) if joined else parts[at])
                at += 2 if joined else 1
            parts = merged
        return [ids[part] for part in parts]

    def encode(text: str) -> list[int]:
        pieces = [piece for piece in regex.split(r"(\p{N})", text) if piece]
        return [token_id for piece in pieces for word in GPT2_PATTERN.findall(piece) for token_id in word_ids(word)]

    return encode


@settings(max_examples=100)
@given(texts)
def test_smollm2_encodes_as_plain_bpe_over_digits_and_words(text: str) -> None:
    assert smollm2().encode(text) == smollm2_oracle()(text)


@settings(max_examples=100)
@given(st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"]), max_size=60).map(without_control))
def test_smollm2_text_survives_the_round_trip(text: str) -> None:
    assert smollm2().decode(smollm2().encode(text)) == text


def test_control_tokens_are_single_ids_that_decoding_hides() -> None:
    ids = smollm2().encode("<|im_start|>user\nHi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert smollm2().decode(ids) == "user\nHi"
    assert smollm2().decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>"
    assert (smollm2().eos_token_ids, smollm2().bos_token_id, smollm2().vocab_size) == ((2,), 1, 49_152)
    assert smollm2().chat_template is not None


@pytest.mark.timed("the CPU time of building a tokenizer")
def test_smollm2_is_built_in_a_third_of_a_second() -> None:
    metadata = smollm2_metadata()
    seconds = []
    for _ in range(3):
        start = time.process_time()
        Tokenizer.from_gguf(metadata, "smollm2.gguf")
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.35


def llama2c_encode(text: str) -> list[int]:
    """What llama2.c does: a space in front, characters or their bytes, then the best-scoring neighbours joined, leftmost first."""
    metadata = stories_metadata()
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    assert isinstance(tokens, list) and isinstance(scores, list)
    ids = {token: token_id for token_id, token in enumerate(tokens) if token_id >= 3}
    parts: list[int] = []
    for char in (" " + text if text else "").replace(" ", "▁"):
        parts += [ids[char]] if char in ids else [byte + 3 for byte in char.encode()]
    while True:
        neighbours = [tokens[left] + tokens[right] for left, right in pairwise(parts)]
        joins = [(-scores[ids[both]], at, ids[both]) for at, both in enumerate(neighbours) if both in ids]
        if not joins:
            return [1, *parts]
        _, at, token_id = min(joins)
        parts[at : at + 2] = [token_id]


story_words = st.sampled_from(["Once upon", " a time", "  ", "\n", "Lily", "é", "🦙", "aaaa", "the", "T"])


@settings(max_examples=80)
@given(st.lists(story_words | st.text(max_size=4), max_size=8).map("".join))
def test_sentencepiece_encodes_as_llama2c_and_survives_the_round_trip(text: str) -> None:
    # The names of control tokens are read as those tokens, which llama2.c does not do.
    text = text.replace("<", "").replace("▁", "")
    assert stories().encode(text) == llama2c_encode(text)
    assert stories().decode(stories().encode(text)) == text


def test_stories_reference_ids_are_the_reference_text() -> None:
    text = json.loads((DATA / "refs" / "stories260K_expected.json").read_text())["expected_text"]
    ids = np.load(DATA / "refs" / "stories260K_greedy_ref.npz")["ids"].tolist()
    assert stories().decode(ids) == text
    assert stories().encode(text) == ids
    assert stories().encode(text, add_special_tokens=False) == ids[1:]


def tiny_metadata(pre: str) -> dict[str, object]:
    tokens = [*"0123456789", "12", "123", "1234", "12345", "<end>", "<noté>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 14 + [3, 4],
        "tokenizer.ggml.merges": ["1 2", "12 3", "123 4", "1234 5"],
        "tokenizer.ggml.bos_token_id": 14,
        "tokenizer.ggml.eos_token_id": 14,
        "tokenizer.ggml.eot_token_id": 15,
        "tokenizer.chat_template": "{{ messages }}",
    }


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["12345"]),
        ("default", ["12345"]),
        ("smollm", ["1", "2", "3", "4", "5"]),
        ("qwen2", ["1", "2", "3", "4", "5"]),
        ("llama-bpe", ["<end>", "123", "4", "5"]),  # llama 3 begins every text with its BOS
        ("llama3", ["<end>", "123", "4", "5"]),
        ("tekken", ["<end>", "1", "2", "3", "4", "5"]),
        ("dbrx", ["123", "4", "5"]),
        ("gpt-4o", ["123", "4", "5"]),
        ("refact", ["1", "2", "3", "4", "5"]),
        ("command-r", ["1", "2", "3", "4", "5"]),
        ("glm4", ["123", "4", "5"]),
        ("bloom", ["12345"]),
    ],
)
def test_each_pre_tokenizer_splits_numbers_its_own_way(pre: str, pieces: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(tiny_metadata(pre), "tiny.gguf")
    assert [tokenizer.token(token_id) for token_id in tokenizer.encode("12345")] == pieces
    assert tokenizer.decode(tokenizer.encode("1<noté>2<end>")) == "1<noté>2"  # user-defined is text, control is not
    assert tokenizer.eos_token_ids == (14, 15)


# What the patterns of these models cut a text into: words, signs, contractions, paths, line ends
TEXT = "don't camelCase /a/b\n\n  x"
CUTS = {
    "gpt-2": ["don", "'t", " camelCase", " /", "a", "/", "b", "\n\n ", " x"],
    "bloom": ["don't", " camelCase", " /a/b", "\n\n ", " x"],
    "dbrx": ["don", "'t", " camelCase", " /", "a", "/b", "\n\n", " ", " x"],
    "tekken": ["don", "'t", " camel", "Case", " /", "a", "/b", "\n\n", " ", " x"],
    "gpt-4o": ["don't", " camel", "Case", " /", "a", "/b", "\n\n", " ", " x"],
}


@pytest.mark.parametrize("pre", CUTS)
def test_each_pre_tokenizer_cuts_words_its_own_way(pre: str) -> None:
    cut = SPLITS[pre].make().pre_tokenize_str(TEXT)
    assert [byte_level_bytes(piece).decode() for piece, _ in cut] == CUTS[pre]


def turns(*names: str, model: str = "gpt2") -> dict[str, object]:
    """The metadata of a vocabulary with these control tokens; the first of them is the end that the file names."""
    base = tiny_metadata("gpt-2") if model == "gpt2" else stories_metadata()
    tokens, types = list(base["tokenizer.ggml.tokens"]), list(base["tokenizer.ggml.token_type"])  # type: ignore[call-overload]
    scores = {} if model == "gpt2" else {"tokenizer.ggml.scores": [*base["tokenizer.ggml.scores"], *[0.0] * len(names)]}  # type: ignore[misc]
    ends = {"tokenizer.ggml.eos_token_id": len(tokens), "tokenizer.ggml.eot_token_id": None}
    return base | ends | {"tokenizer.ggml.tokens": [*tokens, *names], "tokenizer.ggml.token_type": [*types, *[3] * len(names)]} | scores


# promise: end-ids-gguf
@pytest.mark.parametrize(
    ("names", "ends"),
    [
        (["<eos>", "<start_of_turn>", "<end_of_turn>"], ["<eos>", "<end_of_turn>"]),
        (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<|endoftext|>", "<|im_end|>"]),
        (["<|endoftext|>", "<|user|>", "<|end|>"], ["<|endoftext|>", "<|end|>"]),
        (["<|return|>", "<|end|>", "<|call|>", "<|channel|>"], ["<|return|>", "<|call|>"]),  # harmony: an answer has several messages
        (["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"]),
    ],
)
def test_a_turn_ends_with_the_tokens_that_are_known_to_end_one(names: list[str], ends: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(turns(*names), "t.gguf")
    assert [tokenizer.token(token_id) for token_id in tokenizer.eos_token_ids] == ends


def test_tokens_of_a_turn_swallow_white_space_in_phi3_alone() -> None:
    """As the tokenizer.json of Phi-3 says it of them (rstrip), and GGUF files do not."""
    for architecture, swallows in (("phi3", True), ("llama", False)):
        tokenizer = Tokenizer.from_gguf(turns("<|end|>", "<|user|>", model="llama") | {"general.architecture": architecture}, "t.gguf")
        plain, spaced = (tokenizer.encode(text, add_special_tokens=False) for text in ("<|user|>hi", "<|user|>\n hi"))
        assert (plain == spaced) == swallows


def test_a_sentencepiece_vocabulary_without_a_space_prefix_leaves_text_as_it_is() -> None:
    """Gemma's. Runs of spaces are tokens of their own there, which GGUF files spell with spaces."""
    metadata = stories_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    tokens, types = list(metadata["tokenizer.ggml.tokens"]), list(metadata["tokenizer.ggml.token_type"])  # type: ignore[call-overload]
    tokens, types = [*tokens, "   "], [*types, 4]
    scores = [*metadata["tokenizer.ggml.scores"], 0.0]  # type: ignore[misc]
    added = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.scores": scores}
    tokenizer = Tokenizer.from_gguf(metadata | added, "g.gguf")
    for text in ("Once upon a time", " Once", "a   b", "é\n"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
    assert len(tokens) - 1 in tokenizer.encode("a   b") and tokenizer.encode("Once")[0] == tokenizer.bos_token_id
    assert tokenizer.encode("Once", add_special_tokens=False) != stories().encode("Once", add_special_tokens=False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ggml.model", "bert"),
        ("ggml.model", None),
        ("ggml.pre", "viking"),
        ("ggml.tokens", None),
        ("ggml.tokens", "abc"),
        ("ggml.tokens", [*"0123456789", "12", "123", "1234", "12345", "<end>", 7]),
        ("ggml.tokens", [*"0123456789", "12", "123", "1234", "12345", "<end>", "0"]),
        ("ggml.token_type", [1] * 15),
        ("ggml.token_type", ["x"] * 16),
        ("ggml.merges", ["1 2 3"]),
        ("ggml.merges", ["1 x"]),
        ("ggml.merges", [7]),
        ("ggml.bos_token_id", 16),
        ("ggml.eos_token_id", -1),
        ("ggml.add_bos_token", 3),
        ("chat_template", b"x"),
    ],
)
def test_damaged_gguf_metadata_is_refused_by_its_key(key: str, value: object) -> None:
    with pytest.raises(LoadError, match=rf"^tiny\.gguf: tokenizer\.{key}\b"):
        Tokenizer.from_gguf(tiny_metadata("gpt-2") | {f"tokenizer.{key}": value}, "tiny.gguf")


def test_scores_must_fit_and_an_end_must_exist() -> None:
    with pytest.raises(LoadError, match="scores has 2 items for 512 tokens"):
        Tokenizer.from_gguf(stories_metadata() | {"tokenizer.ggml.scores": [1.0, 2.0]}, "s.gguf")
    with pytest.raises(LoadError, match=r"scores holds a wrong item: nan"):
        Tokenizer.from_gguf(stories_metadata() | {"tokenizer.ggml.scores": [float("nan")] * 512}, "s.gguf")
    metadata = stories_metadata()
    del metadata["tokenizer.ggml.eos_token_id"]
    with pytest.raises(LoadError, match="eos_token_id is missing"):
        Tokenizer.from_gguf(metadata, "s.gguf")


def write_folder(folder: Path, config: object) -> Path:
    stored = Tokenizer.from_gguf(tiny_metadata("gpt-2"), "tiny.gguf")._backend.to_str()
    (folder / "tokenizer.json").write_text(stored, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_folder_gives_template_and_ends_in_every_spelling(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config = {"chat_template": named, "eos_token": {"content": "<end>"}, "bos_token": None}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, config))
    assert (tokenizer.chat_template, tokenizer.eos_token_ids, tokenizer.bos_token_id, tokenizer.bos_token) == ("D", (14,), None, "")
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert Tokenizer.from_folder(tmp_path).chat_template == "own file"


def test_broken_folder_is_refused_by_the_file(tmp_path: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises(LoadError, match=match):
            Tokenizer.from_folder(tmp_path)

    refused(r"tokenizer\.json: not found")
    write_folder(tmp_path, {"eos_token": "<nowhere>"})
    refused(r"tokenizer_config\.json: eos_token is '<nowhere>'")
    write_folder(tmp_path, ["no object"])
    refused(r"tokenizer_config\.json: must be a JSON object, got list")
    (tmp_path / "tokenizer_config.json").write_text("{")
    refused(r"tokenizer_config\.json: not valid JSON")
    (tmp_path / "tokenizer_config.json").unlink()
    refused(r"tokenizer_config\.json: not found")
    (tmp_path / "tokenizer.json").write_text("{}")
    refused(r"tokenizer\.json: model must be a dict")
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    refused(r"tokenizer\.json: not UTF-8")


def test_a_decoder_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, {})
    stored = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    stored["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(LoadError, match="decoder is of type 'WordPiece'; supported: Sequence, ByteFallback"):
        Tokenizer.from_folder(tmp_path)


def test_text_that_is_no_unicode_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="unpaired surrogate at character 2"):
        smollm2().encode("ab\ud800")
