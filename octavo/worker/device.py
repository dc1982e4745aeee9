"""Selects the device, or refuses a platform, by pure functions of what was detected, so that tests need no such machine.

    Linux on x86-64 and aarch64, also under WSL2     supported and tested
    macOS, others                                    the portable path: plain torch, not tested
    native Windows, ROCm, MPS                        refused in one line

A GPU is used if torch detects one from NVIDIA of compute capability 8.0 or higher, and Triton is installed.
"""

import importlib.metadata
import os
import platform
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.config import EngineConfig, show_gpus, visible_gpus
from octavo.errors import ConfigError
from octavo.platforms import platform_note, platform_refusal
from octavo.worker.compilers import Compilers

GIB = 2**30
LEAST_CAPABILITY = (8, 0)  # bfloat16 in the matrix units, asynchronous copies
GPU_SIGNS = (Path("/dev/nvidia0"), Path("/proc/driver/nvidia"), Path("/usr/lib/wsl/lib/libcuda.so.1"), Path("/dev/nvmap"))  # Jetson
DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")  # contains one folder per GPU
CPU_TORCH = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cpu"
CUDA_TORCH = "pip install --force-reinstall torch"  # on Linux the default build has CUDA
TRITON = "pip install triton"
TOOLS = "apt install gcc python3-dev"


@dataclass(frozen=True, slots=True)
class TorchBuild:
    version: str
    cuda: str | None  # the CUDA or ROCm release it was built for
    hip: str | None


def torch_build() -> TorchBuild:
    import torch

    return TorchBuild(str(torch.__version__), torch.version.cuda, torch.version.hip)


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU as reported by torch."""

    name: str
    capability: tuple[int, int]
    total: int  # bytes
    free: int  # bytes that no process uses; with unified memory, without the file cache that the system could free
    unified: bool = False  # it shares the CPU's memory: Jetson, GB10. Grace Hopper does not: its GPU has its own memory

    def __str__(self) -> str:
        major, minor = self.capability
        size = f"{self.total / GIB:.1f} GiB"
        memory = f"GPU and CPU share {size} of memory" if self.unified else f"{self.free / GIB:.1f} of {size} free"
        return f"{self.name}, compute capability {major}.{minor}, {memory}"


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that determines the device."""

    build: TorchBuild
    signs: bool  # of an NVIDIA GPU, whether or not torch detects it
    gpu: Gpu | None = None
    trouble: str = ""  # the error of CUDA if it did not start
    visible: str | None = None  # the GPUs that CUDA may show this process, if listed
    triton: str | None = None  # its version


@dataclass(frozen=True, slots=True)
class Lack:
    what: str
    help: str = ""  # the command that helps, if any


@dataclass(frozen=True, slots=True)
class Choice:
    device: Literal["cpu", "cuda"]
    why: str
    gpu: Gpu | None = None

    def __str__(self) -> str:
        return f"{self.device}: {self.why}"


def device_here(requested: str) -> Choice:
    """Returns the device of this process. The GPU is not touched if the CPU was requested."""
    build = torch_build()
    if refusal := platform_refusal(platform.system()) or torch_refusal(build):
        raise ConfigError(refusal)
    return choose_device(requested, Found(build, nvidia_signs()) if requested == "cpu" else find())


def find() -> Found:
    """Detects what this machine has. This starts CUDA if torch can."""
    gpu, trouble = torch_gpu()
    return Found(torch_build(), nvidia_signs(), gpu, trouble, visible_gpus(), _version("triton"))


def nvidia_signs() -> bool:
    """Whether the system reports a GPU, usable or not."""
    return any(sign.exists() for sign in GPU_SIGNS)


def compilers_for(requested: str) -> Compilers:
    """Returns processes that compile GPU kernels while this one starts, or none if no GPU can be used."""
    return Compilers.start() if requested != "cpu" and nvidia_signs() and _version("triton") else Compilers()


def torch_gpu() -> tuple[Gpu | None, str]:
    """Returns torch's default GPU, or None and the reason why there is none."""
    import torch

    try:
        torch.cuda.init()
        device = torch.cuda.current_device()  # 0, or that of a rank
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
    except (RuntimeError, AssertionError) as error:  # no driver, or too old, or hidden by CUDA_VISIBLE_DEVICES
        return None, " ".join(str(error).split()).partition(". ")[0][:200]
    return Gpu(properties.name, (properties.major, properties.minor), total, free, bool(properties.is_integrated)), ""


def missing_tools() -> str:
    """Returns the tools that Triton lacks to build kernel launchers. It needs none if its cache has them or CC names a compiler."""
    scheme = sysconfig.get_default_scheme()
    headers = os.path.join(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme), "Python.h")
    compiler = shutil.which("gcc") or shutil.which("clang")
    return " and ".join([*([] if compiler else ["a C compiler"]), *([] if os.path.isfile(headers) else ["Python's headers"])])


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def native_level() -> tuple[str | None, str]:
    """Returns the best level of the native kernels on this machine, or None and the reason why there is none."""
    from octavo.kernels.cpu.library import find_library

    library = find_library()
    return (None, library) if isinstance(library, str) else (library.levels[-1], "")


def level_used(config: EngineConfig) -> str | None:
    """Returns the level at which the native program will run, unless a start-up check rejects it, or None if torch computes."""
    if not config.wants_native:
        return None
    best, _ = native_level()
    if config.cpu_isa == "auto":
        return None if best == "portable" else best  # see open_native
    return best and config.cpu_isa


def torch_refusal(build: TorchBuild) -> str | None:
    if build.hip is not None:
        return f"torch {build.version} is a ROCm build, which Octavo does not run on; the CPU build does: {CPU_TORCH}"
    return None


def take_gpus(engine: int, engines: int, ranks: int) -> None:
    """Makes only the GPUs of one of several engines visible to this process, one per rank. Without GPUs it does nothing."""
    gpus = _gpus()
    if not gpus:
        return
    if len(gpus) < engines * ranks:
        raise ConfigError(
            f"{engines} engines of {ranks} GPU{'s' * (ranks > 1)} each need {engines * ranks}, and there are {len(gpus)}: "
            "lower --data-parallel-size, or set --device cpu"
        )
    show_gpus(gpus[engine * ranks : (engine + 1) * ranks])


def _gpus() -> list[str]:
    """Returns the GPUs that this process may see, by their names in CUDA_VISIBLE_DEVICES."""
    if (visible := visible_gpus()) is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(DRIVER_GPUS.glob("*"))]


def choose_device(requested: str, found: Found) -> Choice:
    """Returns the device and the reason, with a hint if a GPU is left unused."""
    if requested == "cpu":
        return Choice("cpu", "as asked for")
    lack = missing(found)
    if lack is None:
        return Choice("cuda", f"{found.gpu}, Triton {found.triton}", found.gpu)
    why = f"{lack.what} ({lack.help})" if lack.help else lack.what
    if requested == "cuda":
        raise ConfigError(f"--device is cuda, but no GPU can be used: {why}; --device auto takes the CPU then")
    return Choice("cpu", why)


def missing(found: Found) -> Lack | None:
    """Returns why no GPU can be used, or None."""
    if found.gpu is None and not found.signs:
        return Lack("no NVIDIA GPU was found")
    if found.build.cuda is None:
        return Lack(f"an NVIDIA GPU is there, but torch {found.build.version} has no CUDA", CUDA_TORCH)
    if found.gpu is None and found.visible is not None:
        return Lack(f"an NVIDIA GPU is there, but with CUDA_VISIBLE_DEVICES={found.visible[:80]!r} CUDA does not start: {found.trouble}")
    if found.gpu is None:
        return Lack(f"an NVIDIA GPU is there, but CUDA does not start: {found.trouble}", "nvidia-smi")
    if found.gpu.capability < LEAST_CAPABILITY:
        own, least = (".".join(map(str, capability)) for capability in (found.gpu.capability, LEAST_CAPABILITY))
        return Lack(f"{found.gpu.name} has compute capability {own}, the least is {least}")
    if found.triton is None:
        return Lack(f"{found.gpu.name} is there, but Triton is not installed", TRITON)
    return None


def start_lines(choice: Choice) -> list[str]:
    """Returns the start-up log lines about this machine."""
    note = platform_note(platform.system(), platform.machine())
    return [f"Device: {choice}", *([f"Platform: {note}"] if note else [])]
