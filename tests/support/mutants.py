"""Mutants of the smallest model that opens: mutant number i of a seed, always the same one.

Half of the damage knows the format (another value at a place in JSON, another kind of a GGUF key, a piece of a template),
half of it only sees bytes.
"""

import copy
import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support import tiny_files as tiny
from tests.support.gguf_bytes import gguf_bytes, key, tensor, text

NUMBERS = [0, 1, -1, 2, 7, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**30]
FLOATS = [0.0, -0.0, 0.5, -1.5, 1.0, 1e-320, 1e300, -1e308, float("nan"), float("inf")]
TEXTS = ["", " ", "a", "x" * 600, "\0", "\n", "é", "Ġ", "▁", "\ud83d", "../x", "/etc/passwd", "a.safetensors", "F32", "BF16", "I64", "<s>"]
REGEXES = ["(", "(a+)+$", "((a{9}){9}){9}", "(?<a>\\g<a>)", "x*", "", "[", "\\p{L}+", "(?=a)", "a|", "(?<!a{1,3})", "\\", "^$"]
KINDS = [
    "Sequence", "NFC", "NFKD", "Lowercase", "Strip", "StripAccents", "Prepend", "Replace", "ByteLevel", "Precompiled", "Nmt",
    "BertNormalizer", "Split", "Digits", "Metaspace", "Punctuation", "Whitespace", "UnicodeScripts", "FixedLength", "CharDelimiterSplit",
    "TemplateProcessing", "BertProcessing", "RobertaProcessing", "ByteFallback", "Fuse", "CTC", "WordPiece", "BPEDecoder", "BPE", "Unigram",
    "WordLevel", "awq", "yarn", "llama3", "linear", "default", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
]  # fmt: skip
PARTS: list[Any] = [
    {"type": "Sequence", "normalizers": [], "pretokenizers": [], "decoders": [], "processors": []},
    {"type": "Precompiled", "precompiled_charsmap": "/////wAA"},
    {"type": "Replace", "pattern": {"Regex": "x?"}, "content": "aa"},
    {"type": "Replace", "pattern": {"String": ""}, "content": "a"},
    {"type": "Strip", "content": "x", "start": 3, "stop": 2**60, "strip_left": True, "strip_right": True},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "FixedLength", "length": 0},
    {"type": "Punctuation", "behavior": "Isolated"},
    {"type": "BertProcessing", "sep": ["x", 2**32 - 1], "cls": ["y", 3]},
    {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], ["b", -1e308]], "byte_fallback": True},
    {"id": 16, "content": "<n>", "single_word": True, "lstrip": True, "rstrip": True, "normalized": True, "special": False},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 1},
    {"dtype": "F16", "shape": [2**62, 4], "data_offsets": [0, 2**63]},
    {"max_length": 0, "strategy": "LongestFirst", "stride": 5, "direction": "Left"},
    {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
]
FRAGMENTS = [
    "{{", "}}", "{%", "%}", "{#", "#}", "{{ 7 }}", "{% for m in messages %}", "{% endfor %}", "{% if a %}", "{% elif b %}", "{% else %}",
    "{% endif %}", "{% set x = ", "{% macro f(x) %}", "{% endmacro %}", "{% raw %}", "{% generation %}",
    "{{ messages[0].content * 9**9 }}", "{{ ''.__class__ }}", "{{ range(10**9)|list }}", "{{ cycler.__init__.__globals__ }}",
    "{{ [x] * 9 }}", "|tojson", "|map('x')", "**", "~", "(", ")", "[", "]", "-", "not ", ".", "'", "\\", "1e999", "9" * 5000, "\0",
    "\ud83d", "{% include 'x' %}", "{% break %}", "loop.index",
    "namespace(a=1)", "{{ f(f) }}", "{{ raise_exception('no') }}", "{{ strftime_now('%' ~ 'Y') }}", " is defined", "{% set ns.x = [ns] %}",
]  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    file: str  # of the folder, or model.gguf
    content: bytes


def mutant(seed: int, number: int) -> Mutant:
    dice = random.Random(f"{seed}:{number}")
    file = dice.choice(FILES)
    content = STRUCTURED[file](dice) if dice.random() < 0.7 else SOUND[file]
    if content == SOUND[file] or dice.random() < 0.15:
        content = damaged(dice, content)
    return Mutant(file, content)


def damaged(dice: random.Random, content: bytes) -> bytes:
    """A few bytes overwritten, put in, left out or repeated; now and then the end cut off."""
    raw = bytearray(content)
    for _ in range(dice.choice([1, 1, 2, 4])):
        at, width = dice.randrange(len(raw) + 1), dice.choice([1, 1, 2, 4, 8, 40])
        plain = [bytes(width), b"\xff" * width, dice.randbytes(width), bytes(raw[at : at + width])]
        piece = dice.choice([*plain, struct.pack("<Q", 2 ** dice.randrange(64))])
        raw[at : at + dice.choice([0, len(piece), len(piece), width])] = dice.choice([piece, piece, b""])
    return bytes(raw[: dice.randrange(len(raw) + 1)] if dice.random() < 0.1 else raw)


# -- JSON


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key or index) in a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for at, item in items:
        found.append((value, at))
        places(item, found)
    return found


def odd_value(dice: random.Random) -> Any:
    pool = dice.choice([NUMBERS, FLOATS, TEXTS, REGEXES, KINDS, PARTS, [None, True, False, [], {}, [[]], [None]]])
    value = copy.deepcopy(dice.choice(pool))
    return [value] * dice.choice([1, 2, 100]) if dice.random() < 0.1 else value


def mutated_json(dice: random.Random, value: Any) -> Any:
    value = copy.deepcopy(value)
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        found = places(value, [])
        if not found:
            return value
        holder, at = dice.choice(found)
        action = dice.randrange(6)
        if action <= 2:
            holder[at] = odd_value(dice)
        elif action == 3:
            del holder[at]
        elif action == 4:  # a part of it somewhere else
            other, there = dice.choice(found)
            holder[at] = copy.deepcopy(other[there]) if len(json.dumps(value)) < 50_000 else None
        elif isinstance(holder, dict):
            holder[dice.choice([*TEXTS, *KINDS])] = holder.pop(at)
        else:
            holder.insert(at, odd_value(dice))
    return value


def json_bytes(dice: random.Random, value: Any) -> bytes:
    """As text; now and then an object says something twice."""
    written = json.dumps(value)
    if dice.random() < 0.05 and written.endswith("}") and written != "{}":
        written = f"{written[:-1]}, {json.dumps(dice.choice(list(value)))}: {json.dumps(odd_value(dice))}}}"
    return written.encode()


def structured_json(value: Any) -> Callable[[random.Random], bytes]:
    return lambda dice: json_bytes(dice, mutated_json(dice, value))


def structured_safetensors(dice: random.Random) -> bytes:
    written = json_bytes(dice, mutated_json(dice, tiny.weight_header()))
    length = len(written) if dice.random() < 0.95 else dice.choice(NUMBERS) % 2**64
    return struct.pack("<Q", length) + written + bytes(DATA_BYTES + dice.choice([0, 0, 0, 1, -4, 4096]))


# -- GGUF

KEYS = ["llama.vocab_size", "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.expert_count", "tokenizer.ggml.eot_token_id"]
WIDTHS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


def odd_key(dice: random.Random, name: str) -> bytes:
    kind = dice.choice([*WIDTHS, 8, 9, 9, 13])
    return key(name, kind, odd_gguf_value(dice, kind))


def odd_gguf_value(dice: random.Random, kind: int) -> bytes:
    if kind == 8:
        return text(dice.choice(TEXTS).encode(errors="replace"), length=dice.choice([None, None, None, *NUMBERS[8:16]]))
    if kind == 9:
        inner, count = dice.choice([*WIDTHS, 8, 9]), dice.choice([0, 1, 3, 16, 16, 17])
        said = count if dice.random() < 0.9 else dice.choice(NUMBERS[:16]) % 2**64
        return struct.pack("<IQ", inner, said) + b"".join(odd_gguf_value(dice, inner) for _ in range(count if inner != 9 else count % 3))
    if kind == 13:
        return b""
    layout = "<" + WIDTHS[kind]
    value = dice.choice(FLOATS if kind in (6, 12) else NUMBERS)
    if kind in (6, 12):
        return struct.pack(layout, 1e30 if kind == 6 and abs(value) > 1e38 else value)
    return (value % 2**64).to_bytes(8, "little")[: struct.calcsize(layout)]


def structured_gguf(dice: random.Random) -> bytes:
    keys = dict(dice.choice([tiny.gguf_keys, tiny.sentencepiece_keys])())
    tensors, size = tiny.gguf_tensors()
    for _ in range(dice.choice([1, 1, 2, 3])):
        name, target = dice.choice(list(keys)), dice.choice(list(tensors))
        action = dice.randrange(7)
        if action <= 2:
            keys[name] = odd_key(dice, name)
        elif action == 3 and len(keys) > 1:
            del keys[name]
        elif action == 4:
            keys[f"again {len(keys)}"] = keys[name] if dice.random() < 0.5 else odd_key(dice, dice.choice(KEYS))
        elif action == 5 and len(tensors) > 1 and dice.random() < 0.3:
            del tensors[target]
        else:
            dims = [dice.choice([1, 4, 8, 16, 32, 0, 2**32, 2**63]) for _ in range(dice.randrange(6))]
            offset = dice.choice([0, 32, 8, size, 2**40, 2**64 - 32])
            called, kind = dice.choice([target, "rope_freqs.weight", "x"]), dice.choice([0, 1, 2, 8, 14, 30, 99])
            tensors[dice.choice([target, "more"])] = tensor(called, dims, kind, offset)
    counts = {} if dice.random() < 0.9 else {dice.choice(["num_keys", "num_tensors", "version"]): dice.choice(NUMBERS[:6])}
    counts = {name: abs(value) for name, value in counts.items()}
    return gguf_bytes(list(keys.values()), list(tensors.values()), bytes(size + dice.choice([0, 0, 64, -64])), **counts)


# -- templates


def structured_template(dice: random.Random) -> bytes:
    pieces = [tiny.TEMPLATE[:20], tiny.TEMPLATE[20:40], tiny.TEMPLATE[40:]]
    for _ in range(dice.choice([1, 2, 4, 8])):
        at = dice.randrange(len(pieces) + 1)
        pieces[at:at] = [dice.choice(FRAGMENTS)] * (1 if dice.random() < 0.95 else dice.choice([10, 100, 1000]))
    return "".join(pieces).encode("utf-8", "surrogatepass")


SOUND = {
    **tiny.folder_files(),
    "model.safetensors.index.json": tiny.sharded_files()["model.safetensors.index.json"],
    "model.gguf": tiny.gguf_file(),
    "chat_template.jinja": tiny.TEMPLATE.encode(),
}
DATA_BYTES = max(entry["data_offsets"][1] for entry in tiny.weight_header().values())
STRUCTURED: dict[str, Callable[[random.Random], bytes]] = {
    "config.json": structured_json(tiny.CONFIG),
    "generation_config.json": structured_json(tiny.GENERATION),
    "tokenizer.json": structured_json(tiny.TOKENIZER),
    "tokenizer_config.json": structured_json(tiny.TOKENIZER_CONFIG),
    "model.safetensors.index.json": structured_json(json.loads(SOUND["model.safetensors.index.json"])),
    "model.safetensors": structured_safetensors,
    "model.gguf": structured_gguf,
    "chat_template.jinja": structured_template,
}
# GGUF headers and tokenizers have the most to get wrong
FILES = [*STRUCTURED, *["model.gguf", "tokenizer.json"] * 3, "config.json", "model.safetensors"]
