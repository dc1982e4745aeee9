"""Text to token ids and back, for every kind of model file.

`Tokenizer` wraps one `tokenizers.Tokenizer`, which does the encoding. Decoding is ours and rests on one idea: **a token is
a few bytes, and text is the UTF-8 of the bytes joined**. So a whole sequence and a stream of single tokens (see
detokenizer.py) decode to the same text by construction.

Two families cover the models we run, told apart by asking the file's own decoder a question:
    byte-level     "Ġhello" -> b" hello"     every character of a token stands for one byte (GPT-2, Qwen, Llama 3)
    sentencepiece  "▁hello" -> b" hello"     "▁" is a space, "<0xE2>" one byte; some drop one space at the text's start
"""

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Self

import tokenizers

from octavo.errors import LoadError, OctavoError, RequestError
from octavo.text.gguf_tokenizer import build_gguf_tokenizer
from octavo.text.json_file import parse_json_object, read_json_object, read_text
from octavo.text.tokenizer_files import check_added_tokens, check_tokenizer_json, read_sentencepiece

# Added tokens that stand where an image goes: without one they mean nothing.
IMAGE_TOKENS = frozenset({"<|image_pad|>", "<|video_pad|>", "<|image|>", "<image>", "<image_soft_token>", "[IMG]"})
PARTS_OF_ANSWERS = frozenset({"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call|>", "<|/tool_call|>"})
HARMONY = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"})
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        source: str,
        num_ids: int,
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        chat_template: str | None,
    ) -> None:
        """`num_ids`: one more than the largest id of the backend's model. Added tokens may lie above."""
        self.source = source
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        spoken = _spoken({token.content for token in added.values()})
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special and token.content not in spoken)
        self.image_ids = frozenset(token_id for token_id, token in added.items() if token.content in IMAGE_TOKENS)
        around = backend.encode("").ids  # what every prompt gets around it
        self.vocab_size = max(num_ids, max([*added, *around], default=-1) + 1)
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
        """Reads tokenizer.json and tokenizer_config.json of a Hugging Face folder. chat_template.jinja wins over the config's template.

        tokenizer.model is read where there is no tokenizer.json.
        """
        if not (path / "tokenizer.json").exists() and (path / "tokenizer.model").exists():
            return cls._from_sentencepiece(path, path / "tokenizer.model")
        with _complaints(path / "tokenizer.json"):
            backend, num_ids = _read_tokenizer_json(path / "tokenizer.json")
            config = read_json_object(path / "tokenizer_config.json")
            bos, eos = (_special_id(backend, config, key, path / "tokenizer_config.json") for key in ("bos_token", "eos_token"))
            return cls(backend, str(path), num_ids, bos, () if eos is None else (eos,), _folder_template(path, config))

    @classmethod
    def _from_sentencepiece(cls, path: Path, file: Path) -> Self:
        with _complaints(file):
            config = read_json_object(path / "tokenizer_config.json")
            keys = read_sentencepiece(file)
            if isinstance(add_bos := config.get("add_bos_token"), bool):
                keys["tokenizer.ggml.add_bos_token"] = add_bos
            parts = build_gguf_tokenizer(keys, str(file))
            _add_tokens(parts.backend, config.get("added_tokens_decoder"), path / "tokenizer_config.json")
            bos, eos = (_special_id(parts.backend, config, key, path / "tokenizer_config.json") for key in ("bos_token", "eos_token"))
            ends = parts.eos_token_ids if eos is None else tuple(dict.fromkeys((eos, *parts.eos_token_ids)))
            bos = parts.bos_token_id if bos is None else bos
            return cls(parts.backend, str(path), parts.num_ids, bos, ends, _folder_template(path, config))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], source: str) -> Self:
        """Builds a tokenizer from the `tokenizer.*` keys of a GGUF file. `source`: the file, for messages."""
        with _complaints(source):
            parts = build_gguf_tokenizer(metadata, source)
            return cls(parts.backend, source, parts.num_ids, parts.bos_token_id, parts.eos_token_ids, parts.chat_template)

    def check_fits(self, rows: int) -> None:
        """Raises if the tokenizer has an id that is not below `rows`, the number of rows of the model's embedding."""
        if self.vocab_size > rows:
            raise LoadError(f"{self.source}: the tokenizer has ids up to {self.vocab_size - 1}, the model's vocabulary ends at {rows - 1}")

    @property
    def bos_token(self) -> str:
        return self.token(self.bos_token_id) if self.bos_token_id is not None else ""

    @property
    def eos_token(self) -> str:
        return self.token(self.eos_token_ids[0]) if self.eos_token_ids else ""

    @cached_property
    def longest_token(self) -> int:
        """The most bytes of a text that one token stands for, or somewhat more."""
        spelled = self._backend.get_vocab(with_added_tokens=False)
        longest = max((len(token) if self._byte_level else len(token.encode()) for token in spelled), default=1)
        return max(longest, *(len(token.encode()) for token in self._added.values()), 1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()  # the library would only say that this is no str
        except UnicodeEncodeError as error:
            raise RequestError(f"text holds an unpaired surrogate at character {error.start}, so it is not valid Unicode") from None
        try:
            # one text as a batch: unlike `encode`, that lets other threads run, and it keeps no offsets
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            if not _from_library(error):
                raise
            raise RequestError(f"the tokenizer of {self.source} failed on this text: {reprlib.repr(str(error))}") from None

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        hidden: frozenset[int] = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(token_id) for token_id in ids if token_id not in hidden])
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def token(self, token_id: int) -> str:
        """Returns the token as the vocabulary spells it, or nothing for an id that it does not have (padding rows of an embedding)."""
        return (self._backend.id_to_token(token_id) or "") if 0 <= token_id < self.vocab_size else ""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to the text, whether it is special or not."""
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
    """Returns the bytes that GPT-2's alphabet spells. A token with a character outside that alphabet stands for itself."""
    try:
        return token.translate(_BYTES_AS_LATIN).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _spoken(added: set[str]) -> frozenset[str]:
    """Returns the special tokens that stay in an answer's text, because they say where its parts begin and end (`tool_calls.py`)."""
    return PARTS_OF_ANSWERS | HARMONY if "<|channel|>" in added else PARTS_OF_ANSWERS


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's character for each byte: printable Latin-1 stands for itself, the others are U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + order): byte for order, byte in enumerate(others)}


# For `str.translate`. Whatever is outside the alphabet becomes, or stays, a character that Latin-1 does not have.
_BYTES_AS_LATIN = dict.fromkeys(range(256), "\uffff") | {ord(char): chr(byte) for char, byte in _byte_alphabet().items()}


def _probe(backend: tokenizers.Tokenizer, tokens: list[str]) -> str | None:
    return None if backend.decoder is None else backend.decoder.decode(tokens)


def _from_library(error: BaseException) -> bool:
    """Whether an error is the library's: it raises bare `Exception`, and in a panic a `BaseException` that is no `Exception`."""
    library = isinstance(error, Exception) and not isinstance(error, MemoryError)
    return library or type(error).__name__ == "PanicException"


@contextmanager
def _complaints(source: object) -> Iterator[None]:
    """Turns an error of the library into a `LoadError` that names the file."""
    try:
        yield
    except OctavoError:
        raise
    except BaseException as error:
        if not _from_library(error):
            raise
        raise LoadError(f"{source}: not a tokenizer this version of `tokenizers` reads ({str(error)[:200]})") from None


def _read_tokenizer_json(path: Path) -> tuple[tokenizers.Tokenizer, int]:
    """Returns the backend, and one more than the largest id of its model."""
    text = read_text(path)
    raw = parse_json_object(text, path, unique_keys=True)
    num_ids = check_tokenizer_json(raw, path)
    backend = tokenizers.Tokenizer.from_str(text)
    # A stored file may ask for fixed lengths; a prompt must never be cut or padded behind its author's back.
    backend.no_truncation()
    backend.no_padding()
    for token in raw.get("added_tokens") or []:  # the library counts on from the last id, whatever the file says
        content, stored_id, given = token["content"], token["id"], backend.token_to_id(token["content"])
        if content and given != stored_id:
            raise LoadError(f"{path}: added token {reprlib.repr(content)} has id {stored_id} but would get {given}: ids must follow on")
    return backend, num_ids


def _add_tokens(backend: tokenizers.Tokenizer, listed: object, path: Path) -> None:
    """Adds the tokens that a tokenizer_config.json has besides those of the model."""
    entries = [{**token, "id": int(key)} for key, token in listed.items()] if isinstance(listed, dict) else []
    check_added_tokens(entries, path)
    for entry in sorted(entries, key=lambda entry: int(entry["id"])):
        token = tokenizers.AddedToken(entry["content"], special=entry.get("special") is True, normalized=False)
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != entry["id"]:
            raise LoadError(f"{path}: added token {reprlib.repr(token.content)} has id {entry['id']}: ids must follow on from the model's")


def _special_id(backend: tokenizers.Tokenizer, config: Mapping[str, object], key: str, path: Path) -> int | None:
    entry = config.get(key)
    if isinstance(entry, dict):  # older files write {"content": "<s>", ...}
        entry = entry.get("content")
    if entry is None:
        return None
    token_id = backend.token_to_id(entry) if isinstance(entry, str) else None
    if token_id is None:
        raise LoadError(f"{path}: {key} is {reprlib.repr(entry)}, which is no token of the tokenizer")
    return token_id


def _folder_template(path: Path, config: Mapping[str, object]) -> str | None:
    own_file = path / "chat_template.jinja"
    if own_file.exists():
        return read_text(own_file)
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry.get("template") for entry in template if isinstance(entry, dict) and entry.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise LoadError(f"{path / 'tokenizer_config.json'}: chat_template must be text or a list with a template named 'default'")
    return template
