"""A tokenizer out of GGUF metadata.

A GGUF file carries the vocabulary as lists (tokens, their types, merges or scores) and names the rules around it:
    tokenizer.ggml.model = "gpt2"    byte-level BPE; `tokenizer.ggml.pre` says how text is split before merging (SPLITS)
    tokenizer.ggml.model = "llama"   sentencepiece BPE: no merge list, the highest-scoring merged piece goes first
    tokenizer.ggml.model = "t5"      sentencepiece unigram: the pieces whose scores have the largest sum
The lists are given to the `tokenizers` library in bulk, so 50,000 tokens take about 0.1 s. Everything read is checked here;
a damaged list is a LoadError that names its key.
"""

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from octavo.errors import LoadError
from octavo.text.tokenizer_files import MAX_ADDED_CHARS, MAX_ADDED_TEXT, MAX_ADDED_TOKENS, MAX_UNIGRAM_TEXT

Item = TypeVar("Item")

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

UNREACHABLE = -1e6  # a score

# Every way to cut a piece in two is tried, so a file may not hold many long ones.
MAX_PIECE_CHARS, MAX_PIECE_TEXT, MAX_MERGES = 512, 4_000_000, 2**20  # of one, of all, and the merges they make

# Tokens that end a turn, whether or not the file names their ids. A call of a tool ends one, too.
ENDS_OF_TURNS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>")
NO_TURN = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3
IN_BETWEEN = "<|end|>"  # where answers end with <|return|>, it ends only one of the messages that an answer is made of


# -- how byte-level tokenizers cut a text before they merge: the kinds that `tokenizer.ggml.pre` names
#
#     gpt-2, default, olmo, phi-2            words, runs of digits, runs of signs
#     smollm, refact, starcoder, command-r   the same, with every digit by itself
#     qwen2, deepseek-r1-qwen                contractions, words with one sign before them, single digits
#     llama-bpe, dbrx, smaug-bpe, glm4, ...  the same, with up to three digits
#     bloom                                  at spaces and after signs
#     tekken                                 words are cut where small letters end and capitals begin, single digits
#     gpt-4o, llama4                         the same with contractions, and up to three digits
#
# They are data: each is the pattern that the tokenizer.json of such models has.

_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def _by_case(ending: str, digits: str) -> str:
    """Returns a pattern that cuts words at capitals. `ending`: of a word, `digits`: that stay together"""
    words = rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+{ending}|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Split:
    make: Callable[[], pre_tokenizers.PreTokenizer]
    whole_words: bool = False  # a word that is a token is taken as it is, whatever merges lead to
    begins: bool = False  # a text begins with BOS, unless the file says otherwise
    composed: bool = False  # characters are composed first (NFC)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _pattern(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def make() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


SPLITS = {
    **dict.fromkeys(("default", "gpt-2", "olmo", "phi-2"), Split(_gpt2)),
    **dict.fromkeys(("smollm", "refact", "starcoder"), Split(_single_digits)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Split(_pattern(_QWEN2), composed=True)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), Split(_pattern(_LLAMA3), whole_words=True, begins=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4"), Split(_pattern(_LLAMA3))),
    "command-r": Split(_single_digits, composed=True),
    "bloom": Split(_pattern(r" ?[^(\s|.,!?…。，、।۔،)]+")),
    "tekken": Split(_pattern(_by_case("", r"\p{N}")), whole_words=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Split(_pattern(_by_case(_ENDING, r"\p{N}{1,3}")))),
}


# -- a tokenizer


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    backend: Tokenizer
    num_ids: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None


def build_gguf_tokenizer(metadata: Mapping[str, object], source: str) -> GgufTokenizer:
    fields = _Fields(metadata, source)
    kind = fields.text("ggml.model")
    vocab = _Vocab.read(fields)
    bos = fields.token_id("ggml.bos_token_id", len(vocab.tokens))
    if kind == "gpt2":
        split = _split(fields)
        backend = _byte_level_backend(vocab, fields, split)
        add_bos = fields.flag("ggml.add_bos_token", split.begins)
    elif kind == "llama":
        backend = _sentencepiece_backend(vocab, fields)
        add_bos = fields.flag("ggml.add_bos_token", True)
    elif kind == "t5":
        backend = _unigram_backend(vocab, fields)
        add_bos = fields.flag("ggml.add_bos_token", False)
    else:
        raise fields.error("ggml.model", f"is {reprlib.repr(kind)}; supported: gpt2, llama, t5")
    backend.add_tokens(vocab.added(fields, swallow_space=kind == "llama" and metadata.get("general.architecture") == "phi3"))
    if add_bos and bos is not None:
        backend.post_processor = processors.TemplateProcessing(single="BOS $A", pair="BOS $A $B", special_tokens=[("BOS", bos)])
    named = [fields.token_id(f"ggml.{name}_token_id", len(vocab.tokens)) for name in ("eos", "eot", "eom")]
    eos = tuple(dict.fromkeys(token_id for token_id in (*named, *vocab.ends_of_turns()) if token_id is not None))
    if not eos:
        raise fields.error("ggml.eos_token_id", "is missing, so no generation could end")
    return GgufTokenizer(backend, len(vocab.tokens), bos, eos, fields.text("chat_template", "") or None)


class _Fields:
    """Reads the `tokenizer.` keys and checks them."""

    def __init__(self, metadata: Mapping[str, object], source: str) -> None:
        self._metadata = metadata
        self._source = source

    def __contains__(self, key: str) -> bool:
        return key in self._metadata

    def error(self, key: str, what: str) -> LoadError:
        return LoadError(f"{self._source}: tokenizer.{key} {what}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self._metadata.get("tokenizer." + key, default)
        if not isinstance(value, str):
            raise self.error(key, "is missing" if value is None else f"must be text, not {type(value).__name__}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get("tokenizer." + key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {reprlib.repr(value)}")
        return value

    def token_id(self, key: str, num_tokens: int) -> int | None:
        value = self._metadata.get("tokenizer." + key)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < num_tokens:
            raise self.error(key, f"is {reprlib.repr(value)}, but the vocabulary has ids 0 to {num_tokens - 1}")
        return value

    def items(self, key: str, convert: Callable[[object], Item], length: int | None = None) -> list[Item]:
        value = self._metadata.get("tokenizer." + key)
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise self.error(key, "is missing" if value is None else f"must be a list, not {type(value).__name__}")
        try:
            items = list(map(convert, value))
        except (TypeError, ValueError) as error:
            raise self.error(key, f"holds a wrong item: {error}") from None
        if length is not None and len(items) != length:
            raise self.error(key, f"has {len(items)} items for {length} tokens")
        return items


@dataclass(frozen=True, slots=True)
class _Vocab:
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    @classmethod
    def read(cls, fields: _Fields) -> "_Vocab":
        tokens = fields.items("ggml.tokens", _text)
        types = fields.items("ggml.token_type", _integer, len(tokens))
        ids = {token: token_id for token_id, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            twice = next(token for token_id, token in enumerate(tokens) if ids[token] != token_id)
            raise fields.error("ggml.tokens", f"lists {reprlib.repr(twice)} more than once")
        return cls(tokens, types, ids)

    def ends_of_turns(self) -> list[int]:
        """Returns the ids of tokens that end a turn by their names."""
        found = [token for token in ENDS_OF_TURNS if self.types[self.ids.get(token, 0)] == CONTROL and token in self.ids]
        return [self.ids[token] for token in found if token != IN_BETWEEN or "<|return|>" not in self.ids]

    def added(self, fields: "_Fields", swallow_space: bool) -> list[AddedToken]:
        """Returns the tokens that are found in a text before it is split. Control tokens are special, user-defined ones are text.

        `swallow_space`: white space behind the tokens of a turn belongs to them (Phi-3)
        """
        added = [
            (token, kind) for token, kind in zip(self.tokens, self.types, strict=True) if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
        ]
        lengths = [len(token) for token, _ in added]
        if len(added) > MAX_ADDED_TOKENS or sum(lengths) > MAX_ADDED_TEXT or max(lengths, default=0) > MAX_ADDED_CHARS:
            most = f"at most {MAX_ADDED_TOKENS:,} of {MAX_ADDED_CHARS} characters each, {MAX_ADDED_TEXT:,} in all, are taken"
            raise fields.error("ggml.token_type", f"makes {len(added):,} tokens of {sum(lengths):,} characters special; {most}")
        return [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False, rstrip=swallow_space and token not in NO_TURN)
            for token, kind in added
        ]


def _split(fields: _Fields) -> Split:
    pre = fields.text("ggml.pre", "default")
    if pre not in SPLITS:
        raise fields.error("ggml.pre", f"is {reprlib.repr(pre)}; supported: {', '.join(sorted(SPLITS))}")
    return SPLITS[pre]


def _byte_level_backend(vocab: _Vocab, fields: _Fields, split: Split) -> Tokenizer:
    merges = fields.items("ggml.merges", _pair)
    try:
        model = models.BPE(vocab.ids, merges, ignore_merges=split.whole_words)
    except Exception as error:  # the library raises bare Exception
        raise fields.error("ggml.merges", f"does not fit the tokens: {error}") from None
    backend = Tokenizer(model)
    backend.pre_tokenizer = split.make()
    backend.decoder = decoders.ByteLevel()
    if split.composed:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece_backend(vocab: _Vocab, fields: _Fields) -> Tokenizer:
    scores = fields.items("ggml.scores", _finite, len(vocab.tokens))
    unknown = next((token for token, kind in zip(vocab.tokens, vocab.types, strict=True) if kind == UNKNOWN), None)
    backend = Tokenizer(
        models.BPE(vocab.ids, _merges_by_score(vocab, scores, fields), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    _set_spaces(backend, fields, [])
    return backend


def _set_spaces(backend: Tokenizer, fields: _Fields, first: list[normalizers.Normalizer]) -> None:
    """Spaces are written as ▁, one is put in front of a text, and both are undone when ids become text. `first`: what comes before"""
    add_prefix = fields.flag("ggml.add_space_prefix", True)
    prefix: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if add_prefix else []
    backend.normalizer = normalizers.Sequence([*first, *prefix, normalizers.Replace(" ", "▁")])
    drop_prefix: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if add_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *drop_prefix])


def _unigram_backend(vocab: _Vocab, fields: _Fields) -> Tokenizer:
    """Pieces that no text is made of (bytes, control and unused ones) get a score that no way through a text takes."""
    scores = fields.items("ggml.scores", _finite, len(vocab.tokens))
    characters = sum(map(len, vocab.tokens))
    if characters > MAX_UNIGRAM_TEXT:
        raise fields.error("ggml.tokens", f"has {characters:,} characters, at most {MAX_UNIGRAM_TEXT:,} are taken")
    unknown = next((token_id for token_id, kind in enumerate(vocab.types) if kind == UNKNOWN), None)
    if unknown is None:
        raise fields.error("ggml.token_type", "has no token for what is unknown")
    usable = [score if kind in (NORMAL, USER_DEFINED) else UNREACHABLE for score, kind in zip(scores, vocab.types, strict=True)]
    backend = Tokenizer(models.Unigram(list(zip(vocab.tokens, usable, strict=True)), unknown, BYTE in vocab.types))
    first: list[normalizers.Normalizer] = []
    if "tokenizer.ggml.precompiled_charsmap" in fields and (charsmap := fields.items("ggml.precompiled_charsmap", _byte)):
        first.append(normalizers.Precompiled(bytes(charsmap)))
    if fields.flag("ggml.remove_extra_whitespaces", False):
        first += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    _set_spaces(backend, fields, first)
    return backend


def _merges_by_score(vocab: _Vocab, scores: list[float], fields: _Fields) -> list[tuple[str, str]]:
    """Returns every way to split a piece, best piece first: sentencepiece joins the neighbours whose joined piece scores highest."""
    pieces = {token for token, kind in zip(vocab.tokens, vocab.types, strict=True) if kind == NORMAL}
    longest, characters = max(map(len, pieces), default=0), sum(map(len, pieces))
    if longest > MAX_PIECE_CHARS or characters > MAX_PIECE_TEXT:
        most = f"at most {MAX_PIECE_CHARS} and {MAX_PIECE_TEXT:,} are taken"
        raise fields.error("ggml.tokens", f"has pieces of up to {longest:,} characters, {characters:,} in all; {most}")
    best_first = sorted(pieces, key=lambda piece: (-scores[vocab.ids[piece]], vocab.ids[piece]))
    cuts = (
        (piece[:cut], piece[cut:])
        for piece in best_first
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    )
    merges = list(islice(cuts, MAX_MERGES + 1))
    if len(merges) > MAX_MERGES:
        raise fields.error("ggml.tokens", f"can be joined in more than {MAX_MERGES:,} ways")
    return merges


def _text(item: object) -> str:
    if not isinstance(item, str):
        raise TypeError(f"{reprlib.repr(item)} is not text")
    return item


def _integer(item: object) -> int:
    if not isinstance(item, int):
        raise TypeError(f"{reprlib.repr(item)} is not an integer")
    return item


def _pair(item: object) -> tuple[str, str]:
    left, right = _text(item).split(" ")
    return left, right


def _byte(item: object) -> int:
    return _integer(item) & 255  # files have them with a sign or without


def _finite(item: object) -> float:
    if not isinstance(item, (int, float)) or not math.isfinite(item):
        raise ValueError(f"{reprlib.repr(item)} is not a finite number")
    return item
