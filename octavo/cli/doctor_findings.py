"""What to fix, each with the command that helps. Pure functions of the facts, so that every case can be tested anywhere."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.cli.doctor_facts import OPTIONAL, REQUIRED, Facts, Library
from octavo.config import VARIABLES
from octavo.errors import nearest
from octavo.loading.names import INSTALL
from octavo.worker.device import TOOLS, missing, platform_note, torch_refusal

GIB = 2**30
LEAST_MEMORY = 2 * GIB
LEAST_DISK = 2 * GIB


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    help: str
    must: bool = True  # False: good to know, but Octavo runs as it should


def findings(facts: Facts) -> list[Finding]:
    return [*_libraries(facts), *_model(facts), *_machine(facts), *_variables(facts)]


def _libraries(facts: Facts) -> Iterator[Finding]:
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
            yield Finding(f"Triton builds what launches kernels with {facts.tools}, not found here", TOOLS, must=False)


def _older(library: Library, oldest: str) -> bool:
    return _numbers(library.version or "") < _numbers(oldest)


def _numbers(version: str) -> list[int]:
    """2.11.0a1+cpu -> 2, 11, 0"""
    found = re.match(r"[\d.]+", version)
    return [int(part) for part in found[0].split(".") if part] if found else []


def _model(facts: Facts) -> Iterator[Finding]:
    if facts.default_model is None:
        yield Finding("the default model is not installed", INSTALL)
    if facts.cache is not None and facts.cache.free_disk < LEAST_DISK:
        left = f"{facts.cache.free_disk / GIB:.1f} GiB left in {facts.cache.folder}"
        what = f"the disk is nearly full: {left}; free some space, or keep models on another disk"
        yield Finding(what, "export HF_HUB_CACHE=/a/larger/disk")


def _machine(facts: Facts) -> Iterator[Finding]:
    if facts.native is None:
        yield Finding("there are no native kernels, torch computes alone", facts.no_native, must=False)
    if facts.native == "portable":
        what = "this CPU has none of the instructions that the native kernels are fast with, torch computes alone"
        yield Finding(what, "octavo doctor  # in a container or virtual machine: on the host, too; it may hide them", must=False)
    if note := platform_note(facts.system, facts.machine):
        yield Finding(note, "octavo verify  # proves that paging works here", must=False)
    cpus = min(facts.allowed_cpus, facts.quota_cpus or facts.allowed_cpus)
    if facts.omp_threads is not None and facts.omp_threads > cpus:
        yield Finding(f"OMP_NUM_THREADS is {facts.omp_threads}, this process may use {cpus} CPUs", f"export OMP_NUM_THREADS={cpus}")
    if facts.memory_bytes < LEAST_MEMORY:
        what = f"this process may use {facts.memory_bytes / GIB:.1f} GiB of memory; below {LEAST_MEMORY // GIB} GiB little fits"
        limited = facts.memory_bytes < facts.total_bytes
        yield Finding(what, "raise the container's limit (docker run --memory 4g)" if limited else "add memory, or choose small models")
    if facts.load is not None and facts.load > cpus:
        what = f"other processes are busy: load average {facts.load:.1f} on {cpus} CPUs; figures taken now will be low"
        yield Finding(what, "top", must=False)


def _variables(facts: Facts) -> Iterator[Finding]:
    for name, value in facts.variables.items():
        if name not in VARIABLES:
            yield Finding(f"{name} is set, but nothing reads it{nearest(name, VARIABLES)}", f"unset {name}")
        elif name == "OMP_NUM_THREADS" and facts.omp_threads is None:
            yield Finding(f"OMP_NUM_THREADS is {value!r}, no number of threads", "unset OMP_NUM_THREADS")
    for mistake in facts.mistakes:
        yield Finding(mistake, f"unset {mistake.split()[0]}")
    if "OCTAVO_DEBUG" in facts.variables and not facts.mistakes:
        yield Finding("OCTAVO_DEBUG is set: the engine runs with switches for tests", "unset OCTAVO_DEBUG")
