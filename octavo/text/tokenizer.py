"""Text to token ids and back, for every kind of model file.

`Tokenizer` wraps one `tokenizers.Tokenizer`, which does the encoding. Decoding is ours and rests on one idea: **a token is
a few bytes, and text is the UTF-8 of the bytes joined**. So a whole sequence and a stream of single tokens (see
detokenizer.py) decode to the same text by construction.

Two families cover the models we run, told apart by asking the file's own decoder a question:
    byte-level     "Ġhello" -> b" hello"     every character of a token stands for one byte (GPT-2, Qwen, Llama 3)
    sentencepiece  "▁hello" -> b" hello"     "▁" is a space, "<0xE2>" one byte; some drop one space at the text's start
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

import tokenizers

from octavo.errors import LoadError, RequestError
from octavo.text.gguf_tokenizer import build_gguf_tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        source: str,
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        chat_template: str | None,
    ) -> None:
        self.source = source
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._bytes: dict[int, bytes] = {}  # token id -> its bytes, filled as tokens are met
        self._byte_level = _probe(backend, ["Ġ"]) == " "
        self._byte_fallback = _probe(backend, ["x", "<0x41>"]) == "xA"
        self.strips_leading_space = _probe(backend, ["▁x"]) == "x"
        if not self._byte_level and _probe(backend, ["x", "▁y"]) != "x y":
            raise LoadError(f"{source}: the tokenizer's decoder is neither byte-level nor sentencepiece-like; only those are supported")

    @classmethod
    def from_folder(cls, path: Path) -> Self:
        """Read tokenizer.json and tokenizer_config.json of a Hugging Face folder; chat_template.jinja wins over the config's."""
        backend = _read_tokenizer_json(path / "tokenizer.json")
        config = _read_config(path / "tokenizer_config.json")
        bos, eos = (_special_id(backend, config, key, path / "tokenizer_config.json") for key in ("bos_token", "eos_token"))
        return cls(backend, str(path), bos, () if eos is None else (eos,), _folder_template(path, config))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], source: str) -> Self:
        """Build from the `tokenizer.*` keys of a GGUF file; `source` names the file in errors."""
        parts = build_gguf_tokenizer(metadata, source)
        return cls(parts.backend, source, parts.bos_token_id, parts.eos_token_ids, parts.chat_template)

    @property
    def bos_token(self) -> str:
        return self.token(self.bos_token_id) if self.bos_token_id is not None else ""

    @property
    def eos_token(self) -> str:
        return self.token(self.eos_token_ids[0]) if self.eos_token_ids else ""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()  # the library would only say that this is no str
        except UnicodeEncodeError as error:
            raise RequestError(f"text holds an unpaired surrogate at character {error.start}, so it is not valid Unicode") from None
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        hidden: frozenset[int] = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(token_id) for token_id in ids if token_id not in hidden])
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an id it does not have (padding rows of an embedding)."""
        return (self._backend.id_to_token(token_id) or "") if 0 <= token_id < self.vocab_size else ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text, special or not."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._spell(token_id)
        return data

    def _spell(self, token_id: int) -> bytes:
        if self._byte_level:
            if token_id in self._added:
                return self._added[token_id].encode()
            return byte_level_bytes(self.token(token_id))
        token = self.token(token_id)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.replace("▁", " ").encode()


def byte_level_bytes(token: str) -> bytes:
    """Undo GPT-2's spelling of bytes; a token with a character outside that alphabet stands for itself."""
    values = [_BYTE_OF_CHAR.get(char) for char in token]
    return token.encode() if None in values else bytes(value for value in values if value is not None)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2 spells each byte as one visible character: printable Latin-1 as itself, the others from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + order): byte for order, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


def _probe(backend: tokenizers.Tokenizer, tokens: list[str]) -> str | None:
    return None if backend.decoder is None else backend.decoder.decode(tokens)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise LoadError(f"{path} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from None


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    text = _read_text(path)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for whatever it dislikes
        raise LoadError(f"{path} is not a tokenizer this version of `tokenizers` reads: {error}") from None
    # A stored file may ask for fixed lengths; a prompt must never be cut or padded behind its author's back.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_config(path: Path) -> dict[str, object]:
    try:
        config = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise LoadError(f"{path} must hold a JSON object, not {type(config).__name__}")
    return config


def _special_id(backend: tokenizers.Tokenizer, config: Mapping[str, object], key: str, path: Path) -> int | None:
    entry = config.get(key)
    if isinstance(entry, dict):  # older files write {"content": "<s>", ...}
        entry = entry.get("content")
    if entry is None:
        return None
    token_id = backend.token_to_id(entry) if isinstance(entry, str) else None
    if token_id is None:
        raise LoadError(f"{path}: {key} is {entry!r}, which is no token of tokenizer.json")
    return token_id


def _folder_template(path: Path, config: Mapping[str, object]) -> str | None:
    own_file = path / "chat_template.jinja"
    if own_file.exists():
        return _read_text(own_file)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise LoadError(f"{path / 'tokenizer_config.json'}: chat_template must be text or a list with a template named 'default'")
    return template
