"""Kernels compiled in other processes: found where they are looked for, without CUDA, and nobody stays behind."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from octavo.models.family import FAMILIES
from octavo.models.registry import describe, read_config
from octavo.worker import compilers, device
from octavo.worker.compilers import Compilers, Wanted
from octavo.worker.kernel_shapes import from_json, kernel_shapes
from tests.support.no_cuda import build_no_cuda

RAW: dict[str, object] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "full_attention_interval": 2,
}  # fmt: skip
MODEL = read_config({"architectures": ["Qwen3ForCausalLM"], **RAW, "vocab_size": 1000, "head_dim": 64}, "a test")
SHAPES = kernel_shapes(describe(MODEL), kept=[])
assert SHAPES is not None
WANTED = Wanted(SHAPES, "bfloat16", block_size=16, max_len=64, layout="nhd", capability=90, processes=2)
SLEEPS = "import time; time.sleep(600)"


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_is_wanted_reaches_the_other_process_whole(architecture: str) -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    groups = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    raw = {"architectures": [architecture], **RAW, **moe, **latent, **groups, "text_config": RAW}
    shapes = kernel_shapes(describe(read_config(raw, "a test")), kept=[])
    wanted = Wanted(shapes, "bfloat16", block_size=16, max_len=64, layout="nhd", capability=90, processes=2) if shapes else WANTED
    assert from_json(Wanted, json.loads(json.dumps(asdict(wanted)))) == wanted


def started(monkeypatch: pytest.MonkeyPatch, program: str) -> Compilers:
    """With a program in place of the real one."""
    monkeypatch.setattr(compilers, "command", lambda *_: [sys.executable, "-c", program, str(os.getpid())])
    return Compilers.start()


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def gone_soon(pid: int) -> bool:
    end = time.monotonic() + 20
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


@pytest.mark.soak
def test_what_they_compiled_is_found_and_no_cuda_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**build_no_cuda(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"}.items():
        monkeypatch.setenv(name, value)
    program = (
        "import sys; from tests.support.cached import call_fewer; call_fewer(); "
        "from octavo.worker.compile_process import main; main(int(sys.argv[1]))"
    )
    with started(monkeypatch, program) as some:
        some.compile(WANTED)
        while some._hear():
            pass
    told = json.dumps(asdict(WANTED)) + "\n"
    look = [sys.executable, "-m", "tests.support.cached"]
    said = subprocess.run(look, input=told, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    met = [line.split() for line in said.stdout.splitlines()]
    assert len(met) == 16 and ["found", "prefill_hopper"] in met and {word for word, _ in met} == {"found"}, said.stdout


def test_a_kernel_is_waited_for_until_it_is_there_and_not_at_all_if_it_will_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"print('failed call x'); print('all a b c'); print('done b'); print('failed c why', flush=True); {SLEEPS}"
    with started(monkeypatch, program) as some:
        for name in ("b", "c", "nobody's"):
            some._wait_for(name)  # returns
        assert some._coming == {"a"}


def test_processes_that_die_are_no_trouble(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for program in ("", "print('all a b', flush=True)", "this is no program"):
        with started(monkeypatch, program) as some, caplog.at_level(logging.DEBUG):
            time.sleep(0.2)
            some.compile(WANTED)
            some._wait_for("a")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with Compilers.start() as none:
        none.compile(WANTED)


def test_where_all_was_compiled_before_nobody_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    more = replace(WANTED, max_len=128)
    for wanted, waits in ((WANTED, True), (WANTED, False), (more, True)):
        with started(monkeypatch, "import time; time.sleep(1)") as some:
            some.compile(wanted)
            with some.awaited():
                assert (some.seconds_waited > 0) == waits
    with pytest.raises(MemoryError), started(monkeypatch, "") as some:
        some.compile(replace(WANTED, dtype="float16"))
        with some.awaited():
            raise MemoryError
    assert len(list(tmp_path.iterdir())) == 2  # and none of a start that failed


def test_none_outlives_the_engine_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with started(monkeypatch, SLEEPS) as some:
        assert some._process is not None
        pid = some._process.pid
        assert alive(pid)
    assert gone_soon(pid)


def test_none_outlives_a_parent_that_is_killed() -> None:
    """The process that compiles, and one of its children, when nobody could tell them."""
    compiles = (
        "import os, sys, time; from octavo.worker import compile_process as c; c.die_with(int(sys.argv[1]))\n"
        "pid = c._fork(lambda: (c.die_with(os.getppid()), time.sleep(600)))\n"
        "print(os.getpid(), pid, flush=True); time.sleep(600)"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {compiles!r}, str(os.getpid())], process_group=0)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2 and all(map(alive, pids))
        os.kill(process.pid, signal.SIGKILL)
        assert all(map(gone_soon, pids))


def test_none_are_started_where_there_is_nothing_to_compile_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(Compilers, "start", lambda: calls.append("started") or Compilers())
    for asked, signs in (("cpu", True), ("auto", False), ("cuda", False)):
        monkeypatch.setattr(device, "nvidia_signs", lambda signs=signs: signs)
        device.compilers_for(asked)
    assert calls == []
    monkeypatch.setattr(device, "nvidia_signs", lambda: True)
    device.compilers_for("auto")
    assert calls == ["started"]
