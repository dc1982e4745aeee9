"""`Facts` is what `octavo doctor` finds out about this machine.

Nothing here may fail. What is unknown is None, and a library that cannot be imported is listed with the reason.
"""

import importlib
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.config import debug_from_environment, environment, log_level, thread_limit
from octavo.errors import ConfigError
from octavo.loading.hub_client import Hub
from octavo.loading.names import default_model
from octavo.worker import machine
from octavo.worker.device import Found, find, missing_tools

NVIDIA_DRIVER = Path("/sys/module/nvidia/version")
REQUIRED = {"torch": "2.11", "numpy": "", "safetensors": "", "tokenizers": "", "jinja2": ""}  # name -> the oldest version that works
SERVER = ("fastapi", "uvicorn", "uvloop", "httptools", "pydantic", "pyzmq", "msgspec", "prometheus_client")
OPTIONAL = {  # name -> what does not work without it
    "huggingface_hub": "models of the hub cannot be downloaded without it",
    "rich": "terminals show plain lines without it",
    **dict.fromkeys(SERVER, "octavo serve cannot start without it"),
    "llguidance": "structured outputs (JSON, regex, choice, grammar) do not work without it",
}
MODULES = {"pyzmq": "zmq"}  # library -> module, if their names differ


@dataclass(frozen=True, slots=True)
class Library:
    name: str
    version: str | None  # None: not installed
    error: str | None  # why it cannot be imported; None if it can


@dataclass(frozen=True, slots=True)
class Torch:
    """What torch reports about itself."""

    found: Found
    mkldnn: bool
    dispatch: str  # the widest instructions that its kernels use on this CPU
    amx: bool  # whether the operating system allows it; it may not, though the CPU has it
    dtype: str  # the dtype that is fast on this CPU, and what `--dtype auto` means when torch computes


@dataclass(frozen=True, slots=True)
class ModelCache:
    """The folder that models of the hub are downloaded to."""

    folder: Path
    in_use: int  # bytes
    free_disk: int  # bytes


@dataclass(frozen=True, slots=True)
class Facts:
    python: str
    system: str
    machine: str
    release: str
    libraries: tuple[Library, ...]
    torch: Torch | None
    driver: str | None  # the version of NVIDIA's driver
    tools: str  # the tools that Triton needs and this machine lacks
    cpu: str
    cpu_flags: frozenset[str]
    allowed_cpus: int
    numa_nodes: tuple[int, ...]  # how many of these CPUs each has
    quota_cpus: int | None
    omp_threads: int | None
    threads: int
    native: str | None  # the best level of the native kernels
    no_native: str  # why there are no native kernels, and what helps
    load: float | None  # the load average of the last minute
    total_bytes: int
    available_bytes: int | None
    memory_bytes: int  # what this process may use
    default_model: Path | None
    cache: ModelCache | None
    variables: dict[str, str]
    mistakes: tuple[str, ...]  # errors about variables whose value is refused


def gather() -> Facts:
    """Asks this machine for all facts."""
    libraries = tuple(map(_library, (*REQUIRED, *OPTIONAL)))
    native, no_native = _native()
    return Facts(
        python=f"{platform.python_implementation()} {platform.python_version()}",
        system=platform.system(),
        machine=platform.machine(),
        release=platform.release(),
        libraries=libraries,
        torch=_torch() if libraries[0].error is None else None,
        driver=_driver(),
        tools=missing_tools(),
        cpu=machine.cpu_model(),
        cpu_flags=machine.cpu_flags(),
        allowed_cpus=len(machine.allowed_cpus()),
        numa_nodes=tuple(map(len, machine.numa_nodes(machine.allowed_cpus()))),
        quota_cpus=machine.quota_cpus(),
        omp_threads=thread_limit(),
        threads=machine.num_threads(),
        native=native,
        no_native=no_native,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        total_bytes=machine.total_bytes(),
        available_bytes=machine.available_bytes(),
        memory_bytes=machine.memory_bytes(),
        default_model=default_model(),
        cache=_cache(),
        variables=environment(),
        mistakes=tuple(_mistakes()),
    )


def _native() -> tuple[str | None, str]:
    """Returns the best level of the native kernels, or None and the reason."""
    try:
        from octavo.worker.device import native_level  # needs numpy

        return native_level()
    except Exception as error:
        return None, f"cannot be checked: {' '.join(str(error).split())[:200]}"


def _library(name: str) -> Library:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    try:
        importlib.import_module(MODULES.get(name, name))
    except Exception as error:  # a broken installation raises anything
        return Library(name, version, " ".join(str(error).split())[:200] or type(error).__name__)
    return Library(name, version, None)


def _torch() -> Torch:
    import torch

    amx = torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
    return Torch(find(), torch.backends.mkldnn.is_available(), torch.backends.cpu.get_cpu_capability(), amx, machine.fast_dtype(None))


def _driver() -> str | None:
    try:
        return NVIDIA_DRIVER.read_text().strip()
    except OSError:
        return None


def _cache() -> ModelCache | None:
    try:
        folder = Hub.from_environment().cache  # the folder depends on variables that huggingface_hub reads
    except Exception:  # huggingface_hub is missing or broken
        return None
    return ModelCache(folder, _size(folder), _free(folder))


def _mistakes() -> Iterator[str]:
    """Yields the errors about environment variables that a command would end with."""
    for check in (lambda: log_level("INFO"), debug_from_environment):
        try:
            check()
        except ConfigError as error:
            yield str(error)


def _size(folder: Path) -> int:
    """Returns the bytes of all files in the folder. Links are not followed, so a file with two names counts once."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:  # the file was removed meanwhile
                continue
    return total


def _free(folder: Path) -> int:
    """Returns the free bytes of the disk that the folder is on, or would be on."""
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    return shutil.disk_usage(existing).free
