"""The tokenizer files of a folder, checked before the `tokenizers` library reads them.

tokenizer.json: the library trusts such a file. On a hostile one it panics, aborts the process by asking for gigabytes, loops, or gives
out ids that no model has. So what is known to be sound is let in and the rest is refused by name: kinds of parts that tokenizers of our
models use, patterns and lists of bounded size, names that lead somewhere. The library reads the same text afterwards, so no key may
occur twice: two readers could take it differently.

tokenizer.model, SentencePiece's own file, for folders without a tokenizer.json: read into the keys that a GGUF file has.
"""

import reprlib
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from octavo.errors import LoadError
from octavo.text.json_file import read_bytes

Kind = TypeVar("Kind")

MAX_ID = 2**31 - 1
MAX_ADDED_TOKENS, MAX_ADDED_CHARS, MAX_ADDED_TEXT = 65_536, 512, 2**20  # how many, how long, all together: they become one automaton
MAX_UNIGRAM_TEXT = 4_000_000  # characters of all pieces: they become a tree with a table in every node
MAX_PARTS = 64
MAX_PATTERN_CHARS = 8192
MAX_PREFIX_CHARS = 16
MAX_REGEX_REPLACEMENTS = 4  # each may double a text

# part of the file -> where a Sequence keeps its members, and the kinds that are let in
PARTS: Mapping[str, tuple[str, frozenset[str]]] = {
    "normalizer": (
        "normalizers",
        frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Prepend", "Replace", "ByteLevel"}),
    ),
    "pre_tokenizer": (
        "pretokenizers",
        frozenset({"ByteLevel", "Split", "Digits", "Metaspace", "Punctuation", "Whitespace", "WhitespaceSplit", "UnicodeScripts"}),
    ),
    "post_processor": ("processors", frozenset({"ByteLevel", "TemplateProcessing", "BertProcessing", "RobertaProcessing"})),
    "decoder": ("decoders", frozenset({"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"})),
}


def check_tokenizer_json(raw: Mapping[str, Any], path: Path) -> int:
    """Returns one more than the largest id of the model part. Raises a `LoadError` for what is not accepted."""
    checker = _Checker(path)
    checker.added_tokens(raw.get("added_tokens"))
    for where in PARTS:
        for part in checker.parts(raw.get(where), where):
            checker.part(part, where)
    return checker.model(raw.get("model"))


def check_added_tokens(entries: list[Any], path: Path) -> None:
    """Refuses added tokens, each with a content and an id, that are too many, too long, or not what they should be."""
    _Checker(path).added_tokens(entries)


class _Checker:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_parts = 0
        self.num_regex_replacements = 0

    def need(self, sound: bool, what: str) -> None:
        if not sound:
            raise LoadError(f"{self.path}: {what}")

    def want(self, value: object, kind: type[Kind], what: str) -> Kind:
        if not isinstance(value, kind):
            raise LoadError(f"{self.path}: {what} must be a {kind.__name__}, not {reprlib.repr(value)}")
        return value

    def added_tokens(self, tokens: object) -> None:
        entries = [] if tokens is None else self.want(tokens, list, "added_tokens")
        self.need(len(entries) <= MAX_ADDED_TOKENS, f"has {len(entries):,} added_tokens, at most {MAX_ADDED_TOKENS:,} are taken")
        characters = 0
        for entry in entries:
            token = self.want(entry, dict, "an entry of added_tokens")
            content = self.want(token.get("content"), str, "the content of an added token")
            self.need(_is_id(token.get("id")), f"added token {reprlib.repr(content)} has id {reprlib.repr(token.get('id'))}")
            self.need(len(content) <= MAX_ADDED_CHARS, f"an added token has {len(content):,} characters ({MAX_ADDED_CHARS} are taken)")
            characters += len(content)
        self.need(characters <= MAX_ADDED_TEXT, f"added_tokens have {characters:,} characters, at most {MAX_ADDED_TEXT:,} are taken")

    # -- normalizer, pre_tokenizer, post_processor, decoder

    def parts(self, value: object, where: str) -> Iterator[dict[str, Any]]:
        """Returns the part itself, or the members of a Sequence, which may hold others."""
        if value is None:
            return
        part = self.want(value, dict, where)
        members, kinds = PARTS[where]
        self.num_parts += 1
        self.need(self.num_parts <= MAX_PARTS, f"{where} has too many parts ({MAX_PARTS} are taken in all)")
        if part.get("type") == "Sequence":
            for member in self.want(part.get(members), list, f"{where}: {members}"):
                yield from self.parts(member, where)
            return
        kind = self.want(part.get("type"), str, f"{where}: type")
        self.need(kind in kinds, f"{where} is of type {reprlib.repr(kind)}; supported: Sequence, {', '.join(sorted(kinds))}")
        yield part

    def part(self, part: dict[str, Any], where: str) -> None:
        kind = part["type"]
        if kind in ("Split", "Replace"):
            self.pattern(part.get("pattern"), f"{where}: {kind}")
        if kind == "Replace":
            content = self.want(part.get("content"), str, f"{where}: content of Replace")
            self.need(len(content) <= 1, f"{where}: Replace may put in one character at most")
            self.num_regex_replacements += "Regex" in part["pattern"]
            self.need(self.num_regex_replacements <= MAX_REGEX_REPLACEMENTS, f"{where}: more than {MAX_REGEX_REPLACEMENTS} regex Replace")
        if kind == "Prepend":
            prefix = self.want(part.get("prepend"), str, f"{where}: prepend")
            self.need(1 <= len(prefix) <= MAX_PREFIX_CHARS, f"{where}: Prepend must put in 1 to {MAX_PREFIX_CHARS} characters")
        if kind == "Strip" and where == "decoder":
            self.need(part.get("stop") == 0, f"{where}: Strip may cut only at the start (stop 0)")
        if kind == "TemplateProcessing":
            self.template(part)

    def pattern(self, pattern: object, where: str) -> None:
        forms = self.want(pattern, dict, f"{where}: pattern")
        self.need(set(forms) in ({"String"}, {"Regex"}), f"{where}: pattern must be a String or a Regex")
        for text in forms.values():
            length = len(self.want(text, str, f"{where}: pattern"))
            self.need(1 <= length <= MAX_PATTERN_CHARS, f"{where}: a pattern of {length:,} characters (1 to {MAX_PATTERN_CHARS} are taken)")

    def template(self, part: dict[str, Any]) -> None:
        """Raises if the part inserts a special token that it does not describe."""
        what = "post_processor: TemplateProcessing"
        known = self.want(part.get("special_tokens"), dict, f"{what}: special_tokens")
        for side in ("single", "pair"):
            for piece in self.want(part.get(side), list, f"{what}: {side}"):
                if "SpecialToken" in self.want(piece, dict, f"{what}: a piece"):
                    token = self.want(piece["SpecialToken"], dict, f"{what}: SpecialToken")
                    name = self.want(token.get("id"), str, f"{what}: id")
                    self.need(name in known, f"{what}: {reprlib.repr(name)} is none of its special_tokens")

    # -- model

    def model(self, value: object) -> int:
        model = self.want(value, dict, "model")
        kind = model.get("type", "BPE" if "merges" in model else None)  # old files do not say
        self.need(kind in ("BPE", "Unigram"), f"model is of type {reprlib.repr(kind)}; supported: BPE, Unigram")
        return self.bpe(model) if kind == "BPE" else self.unigram(model)

    def bpe(self, model: dict[str, Any]) -> int:
        vocab = self.want(model.get("vocab"), dict, "model.vocab")
        self.want(model.get("merges"), list, "model.merges")
        wrong = next((token for token, token_id in vocab.items() if not _is_id(token_id)), None)
        self.need(wrong is None, f"model.vocab gives {reprlib.repr(wrong)} an id that is not from 0 to {MAX_ID}")
        if (unknown := model.get("unk_token")) is not None:
            self.need(self.want(unknown, str, "unk_token") in vocab, f"unk_token {reprlib.repr(unknown)} is no token of its vocab")
        self.need(not model.get("dropout"), "model.dropout would split the same text differently each time; it must be null")
        for key in ("continuing_subword_prefix", "end_of_word_suffix"):
            self.need(not model.get(key), f"model.{key} is not supported")
        return max(vocab.values(), default=-1) + 1

    def unigram(self, model: dict[str, Any]) -> int:
        vocab = self.want(model.get("vocab"), list, "model.vocab")
        unknown = self.want(model.get("unk_id"), int, "unk_id")
        self.need(all(map(_is_piece, vocab)), "model.vocab must list pieces, each with its score")
        self.need(0 <= unknown < len(vocab), f"unk_id is {reprlib.repr(unknown)}, no piece of the vocab")
        characters = sum(len(piece) for piece, _ in vocab)
        self.need(characters <= MAX_UNIGRAM_TEXT, f"model.vocab has {characters:,} characters, at most {MAX_UNIGRAM_TEXT:,} are taken")
        return len(vocab)


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_ID


def _is_piece(item: object) -> bool:
    return isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) and type(item[1]) in (int, float)


# -- tokenizer.model
#
# It is a protocol buffer, of which a few fields matter:
#
#   pieces 1            piece 1, score 2, type 3 (the numbers of `tokenizer.ggml.token_type`)
#   trainer_spec 2      model_type 3, bos_id 41, eos_id 42
#   normalizer_spec 3   precompiled_charsmap 2, add_dummy_prefix 3, remove_extra_whitespaces 4
#
# Every length is compared with what is left before anything is read, and a damaged file is a LoadError.

UNIGRAM, BPE = 1, 2
KINDS = {UNIGRAM: "t5", BPE: "llama"}
MAX_PIECES = 2**20
VARINT, FIXED_64, BYTES, FIXED_32 = 0, 1, 2, 5
MAX_VARINT_BYTES = 10
Value = int | bytes


def read_sentencepiece(path: Path) -> dict[str, object]:
    """Returns what the `tokenizer.` keys of a GGUF file with this tokenizer would be."""
    try:
        return _keys(read_bytes(path), path)
    except (ValueError, struct.error, UnicodeDecodeError) as error:
        raise LoadError(f"{path}: not a SentencePiece model ({str(error)[:100]})") from None


def _keys(data: bytes, path: Path) -> dict[str, object]:
    pieces: list[dict[int, Value]] = []
    specs: dict[int, dict[int, Value]] = {2: {}, 3: {}}
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            pieces.append(dict(_fields(value)))
            if len(pieces) > MAX_PIECES:
                raise ValueError(f"more than {MAX_PIECES:,} pieces")
        elif number in specs and isinstance(value, bytes):
            specs[number] |= dict(_fields(value))
    trainer, normalizer = specs[2], specs[3]
    kind = trainer.get(3, UNIGRAM)
    if kind not in KINDS:
        raise LoadError(f"{path}: is of model_type {kind!r}; supported: {UNIGRAM} (unigram) and {BPE} (BPE)")
    ids = {"tokenizer.ggml.bos_token_id": _signed(trainer.get(41, 1)), "tokenizer.ggml.eos_token_id": _signed(trainer.get(42, 2))}
    return {
        "tokenizer.ggml.model": KINDS[kind],
        "tokenizer.ggml.tokens": [_bytes(piece.get(1, b"")).decode() for piece in pieces],
        "tokenizer.ggml.scores": [struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0] for piece in pieces],
        "tokenizer.ggml.token_type": [piece.get(3, 1) for piece in pieces],
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, 1)),
        "tokenizer.ggml.remove_extra_whitespaces": bool(normalizer.get(4, 1)),
        "tokenizer.ggml.precompiled_charsmap": list(_bytes(normalizer.get(2, b""))),
        **{key: token_id for key, token_id in ids.items() if token_id >= 0},  # -1: there is none
    }


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Returns the fields of a message: their numbers and values. Numbers of fixed size are bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == BYTES:
            size, at = _varint(data, at)
        elif wire in (FIXED_64, FIXED_32):
            size = 8 if wire == FIXED_64 else 4
        else:
            raise ValueError(f"a field of wire type {wire}")
        if size > len(data) - at:
            raise ValueError(f"a field of {size} bytes, where {len(data) - at} are left")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place, byte in enumerate(data[at : at + MAX_VARINT_BYTES]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise ValueError("a number without an end")


def _signed(value: Value) -> int:
    if not isinstance(value, int):
        raise ValueError("an id that is no number")
    return value - 2**64 if value >= 2**63 else value


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes should be")
    return value
