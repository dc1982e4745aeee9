"""Where Octavo computes and where it does not run, as pure functions of what was found: each case is tested without its machine.

    Linux x86-64, also under WSL2     supported and tested
    macOS, Linux on ARM, others       the portable path: plain torch, not tested
    native Windows, ROCm, MPS         refused in one line
"""

import platform
from dataclasses import dataclass
from pathlib import Path

from octavo.config import EngineConfig

GPU_SIGNS = (Path("/dev/nvidia0"), Path("/proc/driver/nvidia"))
CPU_TORCH = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cpu"
CUDA_TORCH = "pip install --force-reinstall torch"  # on Linux the plain build has CUDA


@dataclass(frozen=True, slots=True)
class TorchBuild:
    version: str
    cuda: str | None  # the CUDA or ROCm release it was built for
    hip: str | None


def torch_build() -> TorchBuild:
    import torch

    return TorchBuild(str(torch.__version__), torch.version.cuda, torch.version.hip)


def nvidia_gpu() -> bool:
    """Whether there is one, used or not; asking torch would start CUDA."""
    return any(sign.exists() for sign in GPU_SIGNS)


def native_level() -> tuple[str | None, str]:
    """The best level of the native kernels on this machine; or None, and why there are none."""
    from octavo.kernels.cpu.library import find_library

    library = find_library()
    return (None, library) if isinstance(library, str) else (library.highest_level, "")


def native_threads(config: EngineConfig, threads: int) -> int:
    """How many threads the native program will have; none where it is not wanted or not there."""
    return threads if config.wants_native and native_level()[0] is not None else 0


def platform_refusal(system: str) -> str | None:
    if system.startswith(("Windows", "CYGWIN", "MSYS", "MINGW")):
        return "Octavo does not run on native Windows: run it under WSL2 (wsl --install, then inside it as on Linux)"
    return None


def torch_refusal(build: TorchBuild) -> str | None:
    if build.hip is not None:
        return f"torch {build.version} is a ROCm build, which Octavo does not run on; the CPU build does: {CPU_TORCH}"
    return None


def platform_note(system: str, machine: str) -> str | None:
    """What to tell those who are on another platform than the tested one."""
    if system == "Linux" and machine.lower() in ("x86_64", "amd64"):
        return None
    name = "macOS" if system == "Darwin" else system
    return f"{name} on {machine} runs on the portable path, which is not tested there; Linux x86-64 is"


def device_choice(asked: str, gpu: bool, build: TorchBuild) -> str:
    """The device and why, with what helps where a GPU lies idle."""
    if asked == "cpu":
        return "cpu, as asked for"
    if not gpu:
        return "cpu: no NVIDIA GPU was found"
    if build.cuda is None:
        return f"cpu: an NVIDIA GPU is there, but torch {build.version} has no CUDA ({CUDA_TORCH}), and this version computes on the CPU"
    return "cpu: an NVIDIA GPU is there, but this version computes on the CPU"


def start_lines(asked: str, build: TorchBuild) -> list[str]:
    """What the log says of this machine at start."""
    note = platform_note(platform.system(), platform.machine())
    return [f"Device: {device_choice(asked, nvidia_gpu(), build)}", *([f"Platform: {note}"] if note else [])]
