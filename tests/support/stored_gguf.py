"""A few files of llama.cpp's converter, kept in `tests/data/converted` with what llama.cpp computes of them.

`python -m tests.support.stored_gguf` writes them again. Weights are rounded to sixteenths, so that the files are small once compressed.
"""

import json
import lzma
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.converted import CASES, PROMPTS, TEXT
from tests.support.greedy import LOGIT_TOLERANCE
from tests.support.llama_cpp import LlamaCpp, add_tokenizer, convert
from tests.support.models import DATA

STORED = {"llama 3.1", "phi3, long factors", "gemma3", "granite", "qwen2moe", "gpt-oss, MXFP4"}
FOLDER = DATA / "converted"
ANSWERS = FOLDER / "answers.json"
TOKENS = 12  # of an answer, at most


def stored_file(name: str) -> Path:
    return FOLDER / f"{name.replace(', ', '-').replace(' ', '-')}.gguf.xz"


def unpacked(name: str, folder: Path) -> Path:
    path = folder / stored_file(name).stem
    path.write_bytes(lzma.decompress(stored_file(name).read_bytes()))
    return path


def store(name: str, work: Path) -> dict[str, object]:
    """Writes the file. Returns the ids of the prompts and of the answers, and logits of the answers."""
    case = CASES[name]
    folder = case.make(work / "model")
    names = {*load_file(folder / "model.safetensors")}  # those of packed weights are others
    for each in [folder, *([work / "floats"] if case.packed else [])]:
        _round(each / "model.safetensors", names)
        add_tokenizer(each, case.vocab_size, TEXT)
    path = convert(folder, work / "model.gguf")
    stored_file(name).write_bytes(lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
    reference = LlamaCpp(convert(work / "floats", work / "floats.gguf") if case.packed else path, case.context)
    prompts = reference.tokenize(PROMPTS)
    answers = [_greedy(reference, ids) for ids in prompts]
    return {"prompts": prompts, "answers": [ids for ids, _ in answers], "logprobs": [logprobs for _, logprobs in answers]}


def _round(path: Path, names: set[str]) -> None:
    weights = load_file(path)
    coarse = {name: (weights[name] * 16).round() / 16 for name in names & {*weights} if weights[name].is_floating_point()}
    save_file(weights | coarse, path, metadata={"format": "pt"})


def _greedy(reference: LlamaCpp, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Returns the ids of an answer and their logprobs, up to where the best two are nearly equal."""
    ids, logprobs = list(prompt), []
    for _ in range(TOKENS):
        row = reference(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(0)
        best = row.topk(2)
        if best.values[0] - best.values[1] < 10 * LOGIT_TOLERANCE:
            break
        ids.append(int(best.indices[0]))
        logprobs.append(round(float(best.values[0]), 5))
    assert logprobs, "no token is clear: take another prompt"
    return ids[len(prompt) :], logprobs


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    found = {}
    for name in sorted(STORED):
        with tempfile.TemporaryDirectory() as work:
            found[name] = store(name, Path(work))
    ANSWERS.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
