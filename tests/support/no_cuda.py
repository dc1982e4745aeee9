"""A libcuda that ends whoever calls it: what Triton builds against it can be loaded, but nothing can start CUDA."""

import re
import subprocess
from pathlib import Path

import triton


def build_no_cuda(folder: Path) -> dict[str, str]:
    """Makes it; returns the environment in which it is found."""
    sources = Path(triton.__file__).parent / "backends/nvidia"
    text = "".join((sources / name).read_text() for name in ("driver.c", "driver.py"))
    names = sorted({"cuInit"} | set(re.findall(r"\bcu[A-Z]\w+(?=\()", text)))
    source = folder / "no_cuda.c"
    source.write_text("#include <stdlib.h>\n" + "".join(f"int {name}(void) {{ abort(); }}\n" for name in names))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    return {"TRITON_LIBCUDA_PATH": str(folder), "LD_LIBRARY_PATH": str(folder)}
