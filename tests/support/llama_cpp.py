"""llama.cpp as a reference: its converter writes GGUF files of tiny models, and its library says what it computes of them."""

import base64
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from bench.cpu_peers import DEFAULT_ENVS
from bench.peers import environments

SCRIPTS = Path(environments.__file__).parent
SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}


@cache
def llama_python() -> str:
    DEFAULT_ENVS.mkdir(parents=True, exist_ok=True)
    return str(environments.environment("llama", DEFAULT_ENVS))


@cache
def converter_source() -> str:
    return str(environments.llama_source(DEFAULT_ENVS))


def add_tokenizer(folder: Path, vocab_size: int, text: str) -> None:
    """Writes a tokenizer of bytes and pairs of bytes, as GPT-2's, that is made from `text`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[*dict.fromkeys(SPECIAL.values())], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    assert tokenizer.get_vocab_size() == vocab_size
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}))


def convert(folder: Path, path: Path) -> Path:
    """Writes the GGUF file of a folder, in float32 but for what is packed already. An error has the converter's last lines."""
    command = [sys.executable, str(SCRIPTS / "run_converter.py"), converter_source(), str(folder)]
    done = subprocess.run([*command, "--outfile", str(path), "--outtype", "f32", "--no-mtp"], capture_output=True, text=True)
    assert done.returncode == 0, "\n".join(done.stderr.splitlines()[-12:])
    return path


class LlamaCpp:
    """A GGUF file in llama.cpp. It is called as a model of transformers is."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, path: Path, context: int) -> None:
        self._command = [llama_python(), str(SCRIPTS / "run_logits.py"), str(path), str(context)]

    def __call__(self, ids: Tensor, use_cache: bool) -> Any:
        replies = self._ask(sequences=ids.tolist())["logits"]
        logits = [np.frombuffer(base64.b64decode(one), "<f4").reshape(ids.shape[1], -1).copy() for one in replies]
        return SimpleNamespace(logits=torch.from_numpy(np.stack(logits)))

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self._ask(texts=texts)["ids"]
        return ids

    def _ask(self, texts: list[str] | None = None, sequences: list[list[int]] | None = None) -> dict[str, Any]:
        request = json.dumps({"texts": texts or [], "sequences": sequences or []})
        done = subprocess.run(self._command, input=request, capture_output=True, text=True)
        assert done.returncode == 0, "\n".join(done.stderr.splitlines()[-12:])
        reply: dict[str, Any] = json.loads(done.stdout)
        return reply
