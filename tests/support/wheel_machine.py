"""Whether a wheel is for an architecture: `python -m tests.support.wheel_machine WHEEL ARCH`

Its name has to say so, and the library in it has to be machine code of that kind, which the head of an ELF file tells.
"""

import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

LIBRARY = "octavo/native/liboctavo.so"
ELF_MACHINES = {62: "x86_64", 183: "aarch64"}  # bytes 18 and 19 of the file


def what_is_wrong(wheel: Path, arch: str) -> str | None:
    if not wheel.name.endswith(f"-py3-none-linux_{arch}.whl"):
        return f"{wheel.name} is not named for {arch}"
    with zipfile.ZipFile(wheel) as file:
        if LIBRARY not in file.namelist():
            return f"{wheel.name} has no {LIBRARY}"
        head = file.read(LIBRARY)[:20]
    machine = ELF_MACHINES.get(int.from_bytes(head[18:20], "little"), "another machine") if head[:4] == b"\x7fELF" else "no ELF file"
    return None if machine == arch else f"the library in {wheel.name} is for {machine}, not {arch}"


def main(arguments: Sequence[str]) -> int:
    wheel, arch = arguments
    wrong = what_is_wrong(Path(wheel), arch)
    print(wrong or f"{Path(wheel).name} has its library")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
