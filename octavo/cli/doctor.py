"""`octavo doctor`: what this machine has, what is missing and what to fix, as one block to paste into a bug report.

It must work where little else does: each library may be missing or broken, torch too. It shows no secrets and no home folder.
"""

import argparse
import os
import re

from octavo import __version__
from octavo.cli.doctor_facts import Facts, gather
from octavo.cli.doctor_findings import Finding, findings
from octavo.policy.memory_plan import default_pool_bytes
from octavo.worker.device import choose_device, platform_note
from octavo.worker.machine import fast_dtype

GIB = 2**30
FEATURES = {  # what a reader looks for -> any of these flags of the kernel
    "avx2": ("avx2",),
    "avx512": ("avx512f",),
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
    "vnni": ("avx512_vnni", "avx_vnni"),
    "amx": ("amx_tile",),
    "neon": ("asimd",),
    "dotprod": ("asimddp",),
    "fp16": ("asimdhp",),
    "i8mm": ("i8mm",),
    "sve": ("sve",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    private = "The output can be pasted into a bug report: it holds no keys and no home folder."
    parser.epilog = f"{private}\nExit code 0: nothing to fix. 1: something to fix."


def run(args: argparse.Namespace) -> int:
    facts = gather()
    found = findings(facts)
    print(without_home(report(facts, found), os.path.expanduser("~")))
    return int(any(finding.must for finding in found))


def without_home(text: str, home: str) -> str:
    """Paths as ~/..., so that no user name is shown."""
    return text if home in ("/", "~") else re.sub(re.escape(home.rstrip("/")) + r"(?![\w.-])", "~", text)


def report(facts: Facts, found: list[Finding]) -> str:
    rows = {
        "octavo": f"{__version__}, {facts.python}",
        "platform": f"{facts.system} {facts.release} {facts.machine}, " + ("portable path" if _portable(facts) else "supported"),
        "torch": _torch(facts),
        "device": str(choose_device("auto", facts.torch.found)) if facts.torch else "unknown without torch",
        "gpu": _gpu(facts),
        "cpu": _cpu(facts),
        "native": _native(facts),
        "threads": _threads(facts),
        "memory": _memory(facts),
        "default model": str(facts.default_model or "not installed"),
        "model cache": _cache(facts),
        "libraries": ", ".join(f"{library.name} {library.version or '(missing)'}" for library in facts.libraries),
        "environment": ", ".join(f"{name}={value}" for name, value in facts.variables.items()) or "no variables of Octavo are set",
    }
    lines = [f"{name:15}{text}" for name, text in rows.items()]
    for title, must in (("to fix", True), ("good to know", False)):
        wanted = [finding for finding in found if finding.must == must]
        if wanted or must:
            lines.append(f"{title}:" + ("" if wanted else " nothing"))
        lines += [line for finding in wanted for line in (f"  - {finding.what}", f"    {finding.help}")]
    return "\n".join(lines)


def _portable(facts: Facts) -> bool:
    return platform_note(facts.system, facts.machine) is not None


def _torch(facts: Facts) -> str:
    if facts.torch is None:
        return "cannot be imported"
    build = facts.torch.found.build
    kind = f"CUDA {build.cuda}" if build.cuda else f"ROCm {build.hip}" if build.hip else "CPU"
    return f"{build.version}, {kind} build, mkldnn {'on' if facts.torch.mkldnn else 'off'}"


def _gpu(facts: Facts) -> str:
    if facts.torch is None:
        return "unknown without torch"
    found = facts.torch.found
    if found.gpu is None:
        return "there, but torch does not see it" if found.signs else "none"
    versions = {"driver": facts.driver or "unknown", "CUDA": found.build.cuda, "Triton": found.triton or "not installed"}
    return f"{found.gpu}; " + ", ".join(f"{name} {version}" for name, version in versions.items())


def _cpu(facts: Facts) -> str:
    offered = [name for name, flags in FEATURES.items() if facts.cpu_flags.intersection(flags)]
    text = f"{facts.cpu}: {' '.join(offered) or 'no vector instructions known'}"
    if facts.torch is None:
        return text
    refused = ", amx refused by the kernel" if "amx" in offered and not facts.torch.amx else ""
    return f"{text}{refused}; torch dispatches to {facts.torch.dispatch}, and is fast at {facts.torch.dtype}"


def _native(facts: Facts) -> str:
    if facts.native == "portable":
        return "only portable kernels, so torch computes; --cpu-isa portable uses them"
    return f"{facts.native} kernels, dtype auto is {fast_dtype(facts.native)}" if facts.native else facts.no_native


def _threads(facts: Facts) -> str:
    limits = [f"{facts.allowed_cpus} CPUs allowed", f"cgroup quota {facts.quota_cpus or 'none'}"]
    limits.append(f"OMP_NUM_THREADS {facts.omp_threads or 'not set'}")
    load = "" if facts.load is None else f"; load average {facts.load:.1f}"
    return f"{facts.threads} ({', '.join(limits)}){load}"


def _memory(facts: Facts) -> str:
    limit = f"{facts.memory_bytes / GIB:.1f} GiB" if facts.memory_bytes < facts.total_bytes else "none"
    available = "unknown" if facts.available_bytes is None else f"{facts.available_bytes / GIB:.1f} GiB"
    pool = default_pool_bytes(facts.memory_bytes)
    return f"{facts.total_bytes / GIB:.1f} GiB, available {available}, cgroup limit {limit}; KV cache by default {pool / GIB:.2f} GiB"


def _cache(facts: Facts) -> str:
    if (cache := facts.cache) is None:
        return "unknown without huggingface_hub"
    return f"{cache.folder}: {cache.in_use / GIB:.2f} GiB in use, {cache.free_disk / GIB:.1f} GiB of disk free"
