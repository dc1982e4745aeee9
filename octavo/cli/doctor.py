"""`octavo doctor` prints what this machine has, what is missing and what to fix, as one block to paste into a bug report.

It must work where little else does: any library may be missing or broken, torch too. It shows no secrets and no home folder.
"""

import argparse
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from octavo import __version__
from octavo.cli.doctor_facts import OPTIONAL, REQUIRED, Facts, Library, gather
from octavo.config import VARIABLES
from octavo.errors import nearest
from octavo.loading.names import INSTALL
from octavo.platforms import platform_note
from octavo.sizing.cache_size import default_pool_bytes
from octavo.worker.device import TOOLS, choose_device, missing, torch_refusal
from octavo.worker.machine import fast_dtype

GIB = 2**30
FEATURES = {  # name -> flags of /proc/cpuinfo; the CPU has the feature if it has one of them
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
    private = "You can paste the output into a bug report: it contains no keys and no path of your home folder."
    parser.epilog = f"{private}\nExit code 0: nothing to fix. 1: something to fix."


def run(args: argparse.Namespace) -> int:
    facts = gather()
    found = findings(facts)
    print(without_home(report(facts, found), os.path.expanduser("~")))
    return int(any(finding.must for finding in found))


def without_home(text: str, home: str) -> str:
    """Writes paths in the home folder as ~/..., so that no user name is shown."""
    return text if home in ("/", "~") else re.sub(re.escape(home.rstrip("/")) + r"(?![\w.-])", "~", text)


def report(facts: Facts, found: "list[Finding]") -> str:
    """Returns the whole block: a line for each fact, then the findings."""
    rows = {
        "octavo": f"{__version__}, {facts.python}",
        "platform": f"{facts.system} {facts.release} {facts.machine}, " + ("portable path" if _portable(facts) else "supported"),
        "torch": _torch(facts),
        "device": str(choose_device("auto", facts.torch.found)) if facts.torch else "unknown without torch",
        "gpu": _gpu(facts),
        "cpu": _cpu(facts),
        "native": _native(facts),
        "threads": _threads(facts),
        "ranks": _ranks(facts),
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
        return "present, but torch does not see it" if found.signs else "none"
    versions = {"driver": facts.driver or "unknown", "CUDA": found.build.cuda, "Triton": found.triton or "not installed"}
    return f"{found.gpu}; " + ", ".join(f"{name} {version}" for name, version in versions.items())


def _cpu(facts: Facts) -> str:
    offered = [name for name, flags in FEATURES.items() if facts.cpu_flags.intersection(flags)]
    text = f"{facts.cpu}: {' '.join(offered) or 'no known vector instructions'}"
    if facts.torch is None:
        return text
    refused = ", amx refused by the kernel" if "amx" in offered and not facts.torch.amx else ""
    return f"{text}{refused}; torch uses {facts.torch.dispatch} and is fastest in {facts.torch.dtype}"


def _native(facts: Facts) -> str:
    if facts.native == "portable":
        return "only portable kernels, so torch computes instead; --cpu-isa portable uses them"
    return f"{facts.native} kernels, dtype auto is {fast_dtype(facts.native)}" if facts.native else facts.no_native


def _threads(facts: Facts) -> str:
    limits = [f"{facts.allowed_cpus} CPUs allowed", f"cgroup quota {facts.quota_cpus or 'none'}"]
    limits.append(f"OMP_NUM_THREADS {facts.omp_threads or 'not set'}")
    load = "" if facts.load is None else f"; load average {facts.load:.1f}"
    return f"{facts.threads} ({', '.join(limits)}){load}"


def _ranks(facts: Facts) -> str:
    """Returns how a model that is split would share the CPUs."""
    nodes = facts.numa_nodes
    cores = f"{_count(sum(nodes), 'core')} in {_count(len(nodes), 'NUMA node')}"
    if sum(nodes) == 1:
        return f"{cores}, which -tp or -pp would share"
    if len(nodes) == 1:
        return f"{cores}; -tp 2 gives each rank {_count(nodes[0] // 2, 'core')}"
    return f"{cores}; -tp {len(nodes)} gives each rank a node, with " + " and ".join(map(str, sorted(set(nodes)))) + " cores"


def _count(number: int, name: str) -> str:
    return f"{number} {name}" + ("" if number == 1 else "s")


def _memory(facts: Facts) -> str:
    limit = f"{facts.memory_bytes / GIB:.1f} GiB" if facts.memory_bytes < facts.total_bytes else "none"
    available = "unknown" if facts.available_bytes is None else f"{facts.available_bytes / GIB:.1f} GiB"
    pool = default_pool_bytes(facts.memory_bytes)
    return f"{facts.total_bytes / GIB:.1f} GiB, available {available}, cgroup limit {limit}; KV cache by default {pool / GIB:.2f} GiB"


def _cache(facts: Facts) -> str:
    if (cache := facts.cache) is None:
        return "unknown without huggingface_hub"
    return f"{cache.folder}: {cache.in_use / GIB:.2f} GiB in use, {cache.free_disk / GIB:.1f} GiB of disk free"


# -- what to fix: functions of the facts alone, so that tests can show them every case

LEAST_MEMORY = 2 * GIB
LEAST_DISK = 2 * GIB


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to fix, or something good to know."""

    what: str
    help: str  # a command that helps
    must: bool = True  # False: good to know, Octavo runs without a fix


def findings(facts: Facts) -> list[Finding]:
    return [*_library_findings(facts), *_model_findings(facts), *_machine_findings(facts), *_variable_findings(facts)]


def _library_findings(facts: Facts) -> Iterator[Finding]:
    for library in facts.libraries:
        name, oldest = library.name, REQUIRED.get(library.name, "")
        wanted = f"'{name}>={oldest}'" if oldest else name
        if library.version is None and library.error is not None:
            lost = f"; {OPTIONAL[name]}" if name in OPTIONAL else ""
            yield Finding(f"{name} is not installed{lost}", f"pip install {wanted}", must=name in REQUIRED)
        elif library.error is not None:
            yield Finding(f"{name} {library.version} cannot be imported: {library.error}", f"pip install --force-reinstall {wanted}")
        elif oldest and _older(library, oldest):
            yield Finding(f"{name} {library.version} is too old: {oldest} or newer is needed", f"pip install --upgrade {wanted}")
    if facts.torch is not None:
        if refusal := torch_refusal(facts.torch.found.build):
            what, _, command = refusal.rpartition(": ")
            yield Finding(what, command)
        elif (lack := missing(facts.torch.found)) is not None and lack.help:
            yield Finding(f"{lack.what}; the CPU computes", lack.help, must=False)
        elif lack is None and facts.tools:
            yield Finding(f"Triton needs {facts.tools} to build the code that launches kernels; not found here", TOOLS, must=False)


def _older(library: Library, oldest: str) -> bool:
    return _numbers(library.version or "") < _numbers(oldest)


def _numbers(version: str) -> list[int]:
    """Returns the numbers a version begins with: 2, 11, 0 for 2.11.0a1+cpu."""
    found = re.match(r"[\d.]+", version)
    return [int(part) for part in found[0].split(".") if part] if found else []


def _model_findings(facts: Facts) -> Iterator[Finding]:
    if facts.default_model is None:
        yield Finding("the default model is not installed", INSTALL)
    if facts.cache is not None and facts.cache.free_disk < LEAST_DISK:
        left = f"{facts.cache.free_disk / GIB:.1f} GiB left in {facts.cache.folder}"
        what = f"the disk is nearly full: {left}; free some space, or keep models on another disk"
        yield Finding(what, "export HF_HUB_CACHE=/a/larger/disk")


def _machine_findings(facts: Facts) -> Iterator[Finding]:
    if facts.native is None:
        yield Finding("there are no native kernels, so torch computes instead", facts.no_native, must=False)
    if facts.native == "portable":
        what = "this CPU lacks the instructions that make the native kernels fast, so torch computes instead"
        yield Finding(what, "octavo doctor  # in a container or virtual machine: on the host, too; it may hide them", must=False)
    if note := platform_note(facts.system, facts.machine):
        yield Finding(note, "octavo verify  # proves that paging works here", must=False)
    cpus = min(facts.allowed_cpus, facts.quota_cpus or facts.allowed_cpus)
    if facts.omp_threads is not None and facts.omp_threads > cpus:
        yield Finding(f"OMP_NUM_THREADS is {facts.omp_threads}, this process has only {cpus} CPUs", f"export OMP_NUM_THREADS={cpus}")
    if facts.memory_bytes < LEAST_MEMORY:
        what = f"this process may use {facts.memory_bytes / GIB:.1f} GiB of memory; few models fit in less than {LEAST_MEMORY // GIB} GiB"
        limited = facts.memory_bytes < facts.total_bytes
        yield Finding(what, "raise the container's limit (docker run --memory 4g)" if limited else "add memory, or choose small models")
    if facts.load is not None and facts.load > cpus:
        what = f"other processes are busy: load average {facts.load:.1f} on {cpus} CPUs; speeds measured now will be too low"
        yield Finding(what, "top", must=False)


def _variable_findings(facts: Facts) -> Iterator[Finding]:
    for name, value in facts.variables.items():
        if name not in VARIABLES:
            yield Finding(f"{name} is set, but nothing reads it{nearest(name, VARIABLES)}", f"unset {name}")
        elif name == "OMP_NUM_THREADS" and facts.omp_threads is None:
            yield Finding(f"OMP_NUM_THREADS is {value!r}, which is not a number of threads", "unset OMP_NUM_THREADS")
    for mistake in facts.mistakes:
        yield Finding(mistake, f"unset {mistake.split()[0]}")
    if "OCTAVO_DEBUG" in facts.variables and not facts.mistakes:
        yield Finding("OCTAVO_DEBUG is set: the engine runs with switches for tests", "unset OCTAVO_DEBUG")
