"""Hostile and broken model files, all of them: a table of cases, each with the words its refusal must contain.

    python tests/support/hostile_files.py OUT      writes every case into the new folder OUT and lists them

Large files are sparse: they take no room on disk.
"""

import sys
from functools import cache
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.hostile_case import Case
from tests.support.hostile_folders import folder_cases
from tests.support.hostile_gguf import gguf_cases
from tests.support.hostile_tokenizers import tokenizer_cases

GROUPS = {
    115: "GGUF: magic, version, counts",
    116: "GGUF: strings, arrays, keys",
    117: "GGUF: alignment",
    118: "GGUF: tensors",
    119: "GGUF: vocabulary",
    120: "GGUF: what the model is",
    121: "safetensors: header and data",
    122: "safetensors: index, names, shapes",
    123: "paths that lead elsewhere, files that are none",
    124: "pickled weights only",
    125: "custom code",
    126: "config.json and generation_config.json",
    127: "tokenizer and chat template",
    128: "quantised checkpoints",
    129: "a KV pool too small for one sequence",
    130: "no permission, no such model",
}


@cache  # making them takes a second
def all_cases() -> list[Case]:
    return sorted([*gguf_cases(), *folder_cases(), *tokenizer_cases()], key=lambda case: case.group)


def main(words: list[str]) -> int:
    if len(words) != 1 or Path(words[0]).exists():
        print("usage: hostile_files.py OUT, a folder that does not exist yet", file=sys.stderr)
        return 2
    for case in all_cases():
        model = case.write(Path(words[0]))
        print(f"{case.group}  {GROUPS[case.group]}: {case.name}\n     octavo generate --model {model} x {' '.join(case.flags)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
