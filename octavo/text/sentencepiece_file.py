"""tokenizer.model, SentencePiece's own file, for folders without a tokenizer.json: read into the keys that a GGUF file has.

It is a protocol buffer, of which a few fields matter:

    pieces 1            piece 1, score 2, type 3 (the numbers of `tokenizer.ggml.token_type`)
    trainer_spec 2      model_type 3, bos_id 41, eos_id 42
    normalizer_spec 3   precompiled_charsmap 2, add_dummy_prefix 3, remove_extra_whitespaces 4

Every length is compared with what is left before anything is read, and a damaged file is a LoadError.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

from octavo.errors import LoadError
from octavo.text.json_file import read_bytes

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
