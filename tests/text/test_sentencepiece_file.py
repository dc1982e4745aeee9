"""SentencePiece's own files, and unigram tokenizers: the ids of the `sentencepiece` library, and one line for a damaged file."""

import json
import lzma
from functools import cache
from pathlib import Path

import pytest

from octavo.errors import LoadError
from octavo.text.tokenizer import Tokenizer
from octavo.text.tokenizer_files import read_sentencepiece
from tests.support.tokenizers import TOKENIZERS

MODELS = ("unigram", "unigram_plain", "pairs")


@cache
def stored(name: str) -> bytes:
    return lzma.decompress((TOKENIZERS / f"{name}.model.xz").read_bytes())


@cache
def vectors() -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = json.loads((TOKENIZERS / "sentencepiece_ids.json").read_text(encoding="utf-8"))
    return found


def folder(path: Path, model: bytes, **config: object) -> Path:
    (path / "tokenizer.model").write_bytes(model)
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


# promise: sentencepiece-files
@pytest.mark.parametrize("name", MODELS)
def test_ids_are_those_of_sentencepiece(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder(tmp_path, stored(name)))
    of_gguf = Tokenizer.from_gguf(read_sentencepiece(tmp_path / "tokenizer.model"), "u.gguf")
    for text, ids in zip(vectors()["texts"], vectors()[name], strict=True):
        assert tokenizer.encode(str(text), add_special_tokens=False) == ids, text
        assert of_gguf.encode(str(text), add_special_tokens=False) == ids
        if name == "pairs":  # no normalizer, and a byte for what has no piece: nothing is lost
            assert tokenizer.decode(ids) == str(text).replace("▁", " ")


def test_a_folder_names_its_ends_and_adds_tokens_of_its_own(tmp_path: Path) -> None:
    count = len(read_sentencepiece(folder(tmp_path, stored("pairs")) / "tokenizer.model")["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    added = {"2": {"content": "</s>", "special": True}, str(count): {"content": "<|turn|>", "special": True}}
    settings = {"eos_token": "<|turn|>", "add_bos_token": True, "added_tokens_decoder": added, "chat_template": "T"}
    tokenizer = Tokenizer.from_folder(folder(tmp_path, stored("pairs"), **settings))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (1, (count, 2), count + 1)
    assert tokenizer.chat_template == "T"
    assert (ids := tokenizer.encode("a<|turn|>"))[0] == 1 and ids[-1] == count
    added[str(count + 5)] = {"content": "<|far|>", "special": True}
    with pytest.raises(LoadError, match="ids must follow on"):
        Tokenizer.from_folder(folder(tmp_path, stored("pairs"), added_tokens_decoder=added))


@pytest.mark.parametrize("size", [0, 1, 7, 100, 1000])
def test_a_file_that_ends_too_early_is_one_line(size: int, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"tokenizer\.model"):
        Tokenizer.from_folder(folder(tmp_path, stored("unigram_plain")[:size]))


@pytest.mark.parametrize("flipped", range(0, 400, 7))
def test_a_damaged_file_is_one_line_or_a_tokenizer(flipped: int, tmp_path: Path) -> None:
    data = bytearray(stored("unigram")[-120_000:] if flipped % 2 else stored("pairs"))
    data[flipped * len(data) // 400] ^= 0xFF
    try:
        Tokenizer.from_folder(folder(tmp_path, bytes(data))).encode("a b")
    except LoadError as error:
        assert "tokenizer.model" in str(error) and "\n" not in str(error)
