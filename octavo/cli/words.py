"""Tells what a word on the command line is: a model, the address of a server, or a question.

    a model       a folder, a .gguf file, owner/name on the hub, the default model's name
    a server      http://gpu-7:8000, localhost:8000
    a question    what has spaces, or signs that no name has
    not clear     any other single word, such as mistral or hello: it may be a model or a question, so the user is asked
"""

import re
from pathlib import Path

from octavo.loading.names import is_default_name, parse_hub_name
from octavo.loading.ollama_names import meant_on_hub

_ADDRESS = re.compile(r"https?://\S+|localhost(/\S*)?|([a-z][\w.-]*|(\d+\.){3}\d+|\[[0-9a-f:]+\]):\d{1,5}(/\S*)?", re.IGNORECASE | re.ASCII)
_NAME = re.compile(r"\w[\w.:@-]*", re.ASCII)


def looks_like_server(word: str) -> bool:
    return _ADDRESS.fullmatch(word) is not None


def looks_like_model(word: str) -> bool:
    """Whether a word clearly names a model, on this machine or on the hub."""
    if word.endswith(".gguf") or is_default_name(word):
        return True
    if re.search(r"[\s?]", word) is None and ("/" in word or "\\" in word):
        return True
    try:
        return word != "" and Path(word).is_dir()
    except OSError:  # the word is too long for a file name
        return False


def named_model(word: str) -> str | None:
    """Returns the model whose name a word has, as --model takes it, or None. Folders do not count: ordinary words are names of many."""
    return word if word.endswith(".gguf") or is_default_name(word) or parse_hub_name(word) else meant_on_hub(word)


def may_name_model(word: str) -> bool:
    """Whether a word could be a model's name. A sentence, 2+2 or a word of Chinese could not."""
    return _NAME.fullmatch(word) is not None
