"""Platforms and devices, each without its machine: what is refused in one line, and what the start line says."""

import logging
import os
import platform
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from octavo.cli.main import main
from octavo.config import Debug, EngineConfig
from octavo.errors import ConfigError
from octavo.loading.resolve import load_model_config, resolve_model
from octavo.platforms import platform_note, platform_refusal
from octavo.worker import device
from octavo.worker.device import Choice, Found, Gpu, TorchBuild, choose_device, find, missing_tools, take_gpus, torch_refusal
from octavo.worker.facts import settle

CPU, CUDA, ROCM = TorchBuild("2.13.0+cpu", None, None), TorchBuild("2.13.0", "13.0", None), TorchBuild("2.13.0+rocm7", None, "7.0")
H200 = Gpu("NVIDIA H200", (9, 0), total=140 * 2**30, free=138 * 2**30)
ORIN = Gpu("Orin", (8, 7), total=int(61.2 * 2**30), free=2**30, unified=True)
READY = Found(CUDA, signs=True, gpu=H200, triton="3.6.0")


# promise: device-auto-cpu, memory-gpu-cpu
def test_a_gpu_that_can_is_taken_unless_the_cpu_was_asked_for() -> None:
    assert choose_device("auto", READY) == choose_device("cuda", READY) == choose_device("auto", replace(READY, signs=False))  # WSL2
    chosen = choose_device("auto", READY)
    assert chosen.device == "cuda" and chosen.gpu == H200
    assert str(chosen) == "cuda: NVIDIA H200, compute capability 9.0, 138.0 of 140.0 GiB free, Triton 3.6.0"
    assert choose_device("auto", replace(READY, gpu=replace(H200, capability=(8, 0)))).device == "cuda"
    assert str(choose_device("cpu", READY)) == "cpu: as asked for"
    board = choose_device("auto", replace(READY, gpu=ORIN))  # what CUDA calls free there lacks the file cache, and is not told
    assert str(board) == "cuda: Orin, compute capability 8.7, GPU and CPU share 61.2 GiB of memory, Triton 3.6.0"


# promise: device-auto-cpu, one-start-line, start-line-also
@pytest.mark.parametrize(
    ("found", "why"),
    [
        (Found(CPU, signs=False), "no NVIDIA GPU was found"),
        (Found(CUDA, signs=False, trouble="no driver"), "no NVIDIA GPU was found"),
        (Found(CPU, signs=True),
         "an NVIDIA GPU is there, but torch 2.13.0+cpu has no CUDA (pip install --force-reinstall torch)"),
        (Found(CUDA, signs=True, trouble="driver too old"),
         "an NVIDIA GPU is there, but CUDA does not start: driver too old (nvidia-smi)"),
        (Found(CUDA, signs=True, trouble="No CUDA GPUs are available", visible=""),
         "an NVIDIA GPU is there, but with CUDA_VISIBLE_DEVICES='' CUDA does not start: No CUDA GPUs are available"),
        (replace(READY, gpu=replace(H200, name="Tesla T4", capability=(7, 5))),
         "Tesla T4 has compute capability 7.5, the least is 8.0"),
        (replace(READY, triton=None), "NVIDIA H200 is there, but Triton is not installed (pip install triton)"),
    ],
    ids=lambda case: case[:40] if isinstance(case, str) else "",
)  # fmt: skip
def test_the_choice_says_why_and_what_an_idle_gpu_would_need(found: Found, why: str) -> None:
    assert choose_device("auto", found) == Choice("cpu", why)
    with pytest.raises(ConfigError) as refusal:
        choose_device("cuda", found)
    assert str(refusal.value) == f"--device is cuda, but no GPU can be used: {why}; --device auto takes the CPU then"


# promise: environment-cuda-visible
def test_what_torch_says_of_a_gpu_is_kept_and_what_it_complains_of_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    found = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, is_integrated=0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)  # as on the third rank
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.cuda, "mem_get_info", {2: (138 * 2**30, 140 * 2**30)}.__getitem__)
    assert (find().gpu, find().trouble) == (H200, "")
    found.is_integrated = 1
    assert find().gpu == replace(H200, unified=True)

    def fail() -> None:
        raise RuntimeError("Found no NVIDIA driver on\n your system. Please check that you have an NVIDIA GPU and more.")

    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert (find().gpu, find().trouble, find().visible) == (None, "Found no NVIDIA driver on your system", "7")


def test_what_triton_builds_launchers_with_is_looked_for_where_triton_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    places = {"posix_prefix": tmp_path, "posix_local": tmp_path / "local"}
    monkeypatch.setattr(device.sysconfig, "get_default_scheme", lambda: "posix_local")  # as Debian has it
    monkeypatch.setattr(device.sysconfig, "get_path", lambda _, scheme: str(places[scheme]))
    monkeypatch.setattr(device.shutil, "which", {"clang": "/usr/bin/clang"}.get)
    assert missing_tools() == ""
    monkeypatch.setattr(device.shutil, "which", lambda _: None)
    assert missing_tools() == "a C compiler"
    (tmp_path / "Python.h").unlink()
    assert missing_tools() == "a C compiler and Python's headers"


# promise: windows-through-wsl2
@pytest.mark.parametrize(("system", "refused"), [("Windows", True), ("CYGWIN_NT-10.0", True), ("Linux", False), ("Darwin", False)])
def test_native_windows_is_pointed_to_wsl2(system: str, refused: bool) -> None:
    assert ("WSL2" in (platform_refusal(system) or "")) == refused


# promise: macos-cpus-other
@pytest.mark.parametrize(
    ("system", "machine", "named"),
    [("Linux", "x86_64", None), ("Linux", "AMD64", None), ("Linux", "aarch64", None),
     ("Darwin", "arm64", "macOS on arm64 runs on the portable path"), ("FreeBSD", "amd64", "FreeBSD on amd64 runs on the portable path")],
)  # fmt: skip
def test_other_platforms_than_the_tested_one_are_told(system: str, machine: str, named: str | None) -> None:
    note = platform_note(system, machine)
    assert note is None if named is None else note is not None and note.startswith(named)


# promise: windows-through-wsl2
def test_a_rocm_build_of_torch_is_refused_with_the_command_that_helps() -> None:
    assert torch_refusal(CPU) is torch_refusal(CUDA) is None
    assert "2.13.0+rocm7 is a ROCm build" in (torch_refusal(ROCM) or "") and "whl/cpu" in (torch_refusal(ROCM) or "")


# promise: windows-through-wsl2
def test_the_command_ends_on_windows_with_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    assert main(["chat", "Hello!"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("octavo: error: Octavo does not run on native Windows") and said.err.count("\n") == 1


def settled(config: EngineConfig) -> None:
    source = resolve_model(None)
    settle(config, source, load_model_config(source), Debug())


# promise: device-auto-cpu, one-start-line, macos-cpus-other
def test_a_start_says_one_device_line_and_refuses_what_cannot_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "octavo")
    monkeypatch.setattr(device, "GPU_SIGNS", (tmp_path / "nvidia0",))
    monkeypatch.setattr(device, "torch_gpu", lambda: (None, "it is made up"))
    settled(EngineConfig())
    (tmp_path / "nvidia0").touch()
    settled(EngineConfig())
    with monkeypatch.context() as cpu:
        cpu.setattr(device, "torch_gpu", lambda: pytest.fail("CUDA was started"))
        settled(EngineConfig(device="cpu"))
    messages = [said for said in caplog.messages if not said.startswith("Checking the native kernels")]
    assert [said for said in messages if said.startswith("Device: cpu")] == messages
    assert "no NVIDIA GPU" in messages[0] and "NVIDIA GPU is there" in messages[1] and messages[2].endswith("as asked for")
    caplog.clear()
    with pytest.raises(ConfigError, match="--device is cuda, but no GPU can be used"):
        settled(EngineConfig(device="cuda"))
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    settled(EngineConfig())
    assert caplog.messages[1].startswith("Platform: Linux on riscv64 runs on the portable path")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ConfigError, match="is a ROCm build"):
        settled(EngineConfig())
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    with pytest.raises(ConfigError, match="WSL2"):
        settled(EngineConfig())


# promise: environment-cuda-visible
@pytest.mark.parametrize(
    ("visible", "driver", "engine", "ranks", "seen"),
    [(None, 4, 0, 2, "0,1"), (None, 4, 1, 2, "2,3"), ("5, 7", 8, 1, 1, "7"), ("GPU-a,GPU-b", 0, 0, 1, "GPU-a"), (None, 0, 1, 1, None)],
)
def test_each_of_two_engines_sees_gpus_of_its_own(
    visible: str | None, driver: int, engine: int, ranks: int, seen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(driver):
        (tmp_path / f"0000:{number}").mkdir()
    monkeypatch.setattr(device, "DRIVER_GPUS", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")  # so that it is as before afterwards
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    take_gpus(engine, 2, ranks)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen


# promise: environment-cuda-visible
def test_more_engines_than_gpus_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(ConfigError, match="2 engines of 2 GPUs each need 4, and there are 3: lower --data-parallel-size"):
        take_gpus(0, 2, 2)
