"""Which platforms Octavo runs on, and what is special about them. Every command asks before it imports anything else."""

import platform


def platform_refusal(system: str) -> str | None:
    """Returns why Octavo does not run on a platform, or None."""
    if system.startswith(("Windows", "CYGWIN", "MSYS", "MINGW")):
        return "Octavo does not run on native Windows: run it under WSL2 (wsl --install, then inside it as on Linux)"
    return None


def platform_note(system: str, machine: str) -> str | None:
    """Returns a note for users of a platform that is not tested, or None."""
    if system == "Linux" and machine.lower() in ("x86_64", "amd64", "aarch64", "arm64"):
        return None
    name = "macOS" if system == "Darwin" else system
    return f"{name} on {machine} runs on the portable path, which is not tested there; Linux on x86-64 and aarch64 is"


def is_arm() -> bool:
    return platform.machine() == "aarch64"
