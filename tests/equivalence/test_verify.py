"""The proof of paging: it holds on a real model under stress, and it catches what it is there to catch."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.cli.verify import LEAST_REQUESTS
from octavo.config import EngineConfig
from octavo.engine import verify as proof
from octavo.engine.verify import Verified, verify
from octavo.errors import ConfigError, VerifyError
from octavo.loading.resolve import load_model_config, resolve_model
from octavo.messages import StepPlan
from octavo.policy.beam_groups import BeamGroups
from octavo.step.step_tensors import HEAD, Shape
from octavo.worker.graph_program import Graph
from octavo.worker.kv_store import PagedStore
from octavo.worker.model_runner import ModelRunner
from octavo.worker.native_layers import NativeAttention
from octavo.worker.native_program import NativeProgram
from octavo.worker.program import Forward
from octavo.worker.request_table import RequestTable
from tests.support.forked import run_forked
from tests.support.models import tiny_model
from tests.support.places import PLACES, Place
from tests.support.soaked import rarely


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("tiny") / "model", "Qwen3ForCausalLM", seed=5))


BOTH = pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])


def run(folder: str, native: bool = True, depth: int = 1, requests: int = 24, block_size: int = 16, **settings: Any) -> Verified:
    source = resolve_model(folder)
    config = EngineConfig(**{"model": folder, "dtype": "float32", "device": "cpu", "native": native, "block_size": block_size} | settings)
    return verify(config, source, load_model_config(source), depth, requests)


# promise: octavo-verify
@pytest.mark.soak
def test_default_model_agrees_bit_for_bit() -> None:
    command = [sys.executable, "-m", "octavo", "verify", "--requests", "12", "--dtype", "bfloat16", "--kv-cache-dtype", "int8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    head = r"SmolLM2-135M-Instruct, bfloat16, native \w+ kernels, blocks of 16 in int8: paged and contiguous caches agree bit for bit"
    assert re.fullmatch(head, done.stdout.splitlines()[0])
    counts = {line[:32].strip(): line[32:].split() for line in done.stdout.splitlines()[2:]}
    for what in ("blocks allocated", "blocks shared", "blocks copied on write", "blocks evicted", "preemptions", "sequences forked"):
        assert all(int(count.replace(",", "")) > 0 for count in counts[what]), what


# promise: octavo-verify, block-size
@pytest.mark.parametrize(
    ("depth", "block_size", "cache", "native"),
    [
        (1, 2, "float32", True), (1, 2, "bfloat16", False), (2, 16, "float32", False), (2, 16, "int8", True),
        *rarely(*((1, 2, *case) for case in (("float32", False), ("bfloat16", True), ("int8", False), ("int8", True)))),
        *rarely(*((2, 16, *case) for case in (("float32", True), ("bfloat16", False), ("bfloat16", True), ("int8", False)))),
    ],
)  # fmt: skip
def test_tiny_model_agrees_at_both_depths_and_other_block_sizes(folder: str, depth: int, block_size: int, cache: str, native: bool) -> None:
    verified = run(folder, native, depth, block_size=block_size, kv_cache_dtype=cache)
    assert verified.compared.cache_values > 100_000 and verified.compared.output_values > 10_000 and verified.compared.together > 50
    assert verified.kernels.startswith("native ") == native and verified.kv_cache_dtype == cache


# promise: octavo-verify-requests
def test_the_fewest_requests_that_the_command_takes_cause_every_case(folder: str) -> None:
    for depth, block_size in ((1, 8), (2, 16)):
        assert run(folder, depth=depth, requests=LEAST_REQUESTS, block_size=block_size).requests == LEAST_REQUESTS


# promise: kv-cache-layout, gpu-computes-device
@pytest.mark.parametrize("depth, block_size, layout", [(1, 2, "hnd"), *rarely((2, 16, "nhd"))])
def test_steps_on_a_device_agree(folder: str, depth: int, block_size: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, padded steps and all; the kernels' twins compute."""
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=device")
    verified = run(folder, depth=depth, block_size=block_size, kv_cache_layout=layout)
    assert verified.compared.cache_values > 100_000 and verified.compared.output_values > 10_000


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, depth, eager", [("bfloat16", 2, False), ("float16", 1, True), ("float32", 2, False)])
def test_steps_on_a_gpu_agree(folder: str, dtype: str, depth: int, eager: bool) -> None:
    """The kernels themselves, over blocks and over regions; graphs, and what they are made of."""
    verified = run(folder, depth=depth, requests=40, device="cuda", dtype=dtype, enforce_eager=eager)
    assert verified.kernels == "Triton" and verified.compared.cache_values > 100_000 and verified.compared.output_values > 10_000
    assert verified.compared.together > 50  # also in steps that decode, of more than eight rows


def test_a_step_on_a_device_that_is_not_its_kernels_is_caught(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=device")
    replay = Graph.run

    def with_slip(self: Graph, shape: Shape, whole: bool) -> Forward:
        forward = replay(self, shape, whole)
        forward.logits[0, 7] += 1e-3
        return forward

    monkeypatch.setattr(Graph, "run", with_slip)
    with pytest.raises(VerifyError, match=r"a step in one call differs from its layers one by one: step 1$"):
        run(folder)


@PLACES
def test_a_block_table_that_slipped_on_a_device_is_caught(folder: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=device")
    apply = RequestTable.apply

    def with_slip(self: RequestTable, plan: StepPlan) -> None:
        apply(self, plan)
        if plan.step == 20:
            table = self.words[plan.row[0], HEAD : self.layout.tokens]
            table[:] = table.roll(1)

    monkeypatch.setattr(RequestTable, "apply", with_slip)
    with pytest.raises(VerifyError, match="caches differ: step 20"):
        run(folder, device=place)


def test_a_switch_for_tests_says_which_kernels_are_proven(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "native=off")
    assert run(folder, block_size=2).kernels == "torch"


def test_a_step_that_is_not_its_layers_is_caught(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers are what is proven, the one call is what serves."""
    at_once = NativeProgram.run

    def with_slip(self: NativeProgram, shape: Shape, whole: bool) -> Forward:
        forward = at_once(self, shape, whole)
        forward.logits[-1:, 7] += 1e-3
        return forward

    monkeypatch.setattr(NativeProgram, "run", with_slip)
    with pytest.raises(VerifyError, match="a step in one call differs from its layers one by one: step"):
        run(folder)


def test_attention_that_depends_on_where_blocks_lie_is_caught(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = NativeAttention.read

    def with_slip(self: NativeAttention, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        out = read(self, layer, qkv)
        if layer == 1 and int(self._tensors.tables[0, 0, 0]) % 9:  # a region has nine blocks, so that rows begin at their multiples
            out[0, 0] += 1e-3
        return out

    monkeypatch.setattr(NativeAttention, "read", with_slip)
    with pytest.raises(VerifyError, match=r"attention differs over equal caches: step \d+, layer 1"):
        run(folder)


def test_scales_left_behind_by_a_copy_are_caught(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_scales(self: PagedStore, plan: StepPlan) -> None:
        for source, target in plan.copies:
            for cache in self.caches:
                for name in ("k", "v"):
                    cache[name][target] = cache[name][source]

    monkeypatch.setattr(PagedStore, "apply", without_scales)
    for native in (True, False):
        with pytest.raises(VerifyError, match=r"the caches differ: .* k_scale of position"):
            run(folder, native, kv_cache_dtype="int8")


@BOTH
def test_an_off_by_one_in_a_copy_of_a_block_table_is_caught(folder: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, slipped = ModelRunner.forward, list[int]()

    def with_slip(self: ModelRunner, plan: StepPlan) -> None:
        if plan.step >= 20 and not slipped and not (plan.row_writes or plan.new_blocks):  # either would write the table anew
            slipped.append(plan.step)
            table = self.table.words[plan.row[0], HEAD : self.table.layout.tokens]
            table[:] = table.roll(1)
        forward(self, plan)

    monkeypatch.setattr(ModelRunner, "forward", with_slip)
    with pytest.raises(VerifyError) as raised:
        run(folder, native)
    assert f"caches differ: step {slipped[0]}, " in str(raised.value)


@BOTH
def test_a_skipped_copy_on_write_is_caught(folder: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedStore, "apply", lambda self, plan: None)
    with pytest.raises(VerifyError, match="the caches differ"):
        run(folder, native)


@BOTH
def test_a_stale_sealed_block_is_caught(folder: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is found by its digest, but whose bytes were overwritten."""
    apply = PagedStore.apply

    def with_stale_block(self: Any, plan: StepPlan) -> None:
        apply(self, plan)
        for write in plan.row_writes:
            if write.tables[0]:
                self.caches[1]["v"][write.tables[0][0], -1, 0, 0] += 1.0

    monkeypatch.setattr(PagedStore, "apply", with_stale_block)
    with pytest.raises(VerifyError, match=r"layer 1.*v of position 15"):
        run(folder, native)


@pytest.fixture
def came_back(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The step in which beams came back from a preemption, and the row of the last of them."""
    unpark, found = BeamGroups._unpark, list[tuple[int, int]]()

    def noted(self: BeamGroups, group: Any, plan: StepPlan) -> None:
        unpark(self, group, plan)
        found.append((plan.step, plan.row_writes[-1].row))

    monkeypatch.setattr(BeamGroups, "_unpark", noted)
    return found


# promise: octavo-verify
@BOTH
def test_beams_agree_when_they_fork_and_when_they_come_back_from_a_preemption(
    folder: str, native: bool, came_back: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "SAMPLES", (None,))
    verified = run(folder, native, depth=2, requests=LEAST_REQUESTS)
    assert verified.searches == LEAST_REQUESTS and verified.compared.forks > 50 and verified.compared.copies > 50
    assert len(came_back) > 2


def test_a_slip_in_the_table_of_a_beam_that_came_back_is_caught(
    folder: str, came_back: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = RequestTable.apply

    def with_slip(self: RequestTable, plan: StepPlan) -> None:
        apply(self, plan)
        if came_back and came_back[0][0] == plan.step:
            table = self.words[came_back[0][1], HEAD : self.layout.tokens]
            table[:] = table.roll(1)

    monkeypatch.setattr(RequestTable, "apply", with_slip)
    with pytest.raises(VerifyError, match="the caches differ") as caught:
        run(folder)
    assert f"the caches differ: step {came_back[0][0]}, layer 0" in str(caught.value)


def test_a_schedule_without_stress_is_no_proof(folder: str) -> None:
    with pytest.raises(VerifyError, match="proves too little"):
        run(folder, requests=1)


# promise: octavo-verify
def test_the_command_exits_1_on_a_difference(folder: str, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(
        "import sys\n"
        "from octavo.worker.kv_store import PagedStore\n"
        "PagedStore.apply = lambda self, plan: None\n"
        "from octavo.cli.main import main\n"
        f"sys.exit(main(['verify', {folder!r}, '--dtype', 'float32']))\n"
    )
    done = run_forked([sys.executable, str(script)], None, 120, text=True)
    assert done.returncode == 1 and "NOT VERIFIED" in done.stdout


def test_comparison_is_of_bits_not_values() -> None:
    from octavo.worker.twice import same_bits

    assert same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


@BOTH
def test_blocks_of_one_token_are_never_copied_and_agree_all_the_same(folder: str, native: bool) -> None:
    assert run(folder, native, block_size=1).compared.copies == 0


def test_a_context_too_short_for_the_schedule_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"needs a context of 8 blocks of 256 tokens \(2049 tokens\)"):
        run(folder, block_size=256)
