"""The proof of paging: it holds on a real model under stress, and it catches what it is there to catch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.config import EngineConfig
from octavo.engine.verify import Verified, verify
from octavo.errors import ConfigError, VerifyError
from octavo.loading.resolve import load_model_config, resolve_model
from octavo.messages import StepPlan
from octavo.worker.kv_store import PagedStore
from octavo.worker.model_runner import ModelRunner
from tests.support.models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("tiny") / "model", "Qwen3ForCausalLM", seed=5))


def run(folder: str, depth: int = 1, requests: int = 60, block_size: int = 16) -> Verified:
    source = resolve_model(folder)
    config = EngineConfig(model=folder, dtype="float32", block_size=block_size)
    return verify(config, source, load_model_config(source), depth, requests)


def test_default_model_agrees_bit_for_bit() -> None:
    command = [sys.executable, "-m", "octavo", "verify", "--requests", "16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "agree bit for bit" in done.stdout
    counts = {line[:32].strip(): line[32:].split() for line in done.stdout.splitlines()[2:]}
    for what in ("blocks allocated", "blocks shared", "blocks copied on write", "blocks evicted", "preemptions", "samples forked"):
        assert all(int(count.replace(",", "")) > 0 for count in counts[what]), what


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("block_size", [2, 16])
def test_tiny_model_agrees_at_both_depths_and_other_block_sizes(folder: str, depth: int, block_size: int) -> None:
    verified = run(folder, depth, block_size=block_size)
    assert verified.compared.cache_values > 100_000 and verified.compared.output_values > 10_000


def test_an_off_by_one_in_a_copy_of_a_block_table_is_caught(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ModelRunner.forward

    def with_slip(self: ModelRunner, plan: StepPlan) -> None:
        if plan.step == 20:
            self.table.tables[plan.row[0]] = self.table.tables[plan.row[0]].roll(1)
        forward(self, plan)

    monkeypatch.setattr(ModelRunner, "forward", with_slip)
    with pytest.raises(VerifyError, match="caches differ: step 20"):
        run(folder)


def test_a_skipped_copy_on_write_is_caught(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedStore, "apply", lambda self, plan: None)
    with pytest.raises(VerifyError, match="the caches differ"):
        run(folder)


def test_a_stale_sealed_block_is_caught(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is found by its digest, but whose bytes were overwritten."""
    apply = PagedStore.apply

    def with_stale_block(self: Any, plan: StepPlan) -> None:
        apply(self, plan)
        for write in plan.row_writes:
            if write.table:
                self.caches[1]["v"][write.table[0], -1, 0, 0] += 1.0

    monkeypatch.setattr(PagedStore, "apply", with_stale_block)
    with pytest.raises(VerifyError, match=r"layer 1.*v of position 15"):
        run(folder)


def test_a_schedule_without_stress_is_no_proof(folder: str) -> None:
    with pytest.raises(VerifyError, match="proves too little"):
        run(folder, requests=1)


def test_the_command_exits_1_on_a_difference(folder: str, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(
        "import sys\n"
        "from octavo.worker.kv_store import PagedStore\n"
        "PagedStore.apply = lambda self, plan: None\n"
        "from octavo.cli.main import main\n"
        f"sys.exit(main(['verify', {folder!r}, '--dtype', 'float32']))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "NOT VERIFIED" in done.stdout


def test_comparison_is_of_bits_not_values() -> None:
    from octavo.worker.shadow import same_bits

    assert same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_blocks_of_one_token_are_never_copied_and_agree_all_the_same(folder: str) -> None:
    assert run(folder, block_size=1).compared.copies == 0


def test_a_context_too_short_for_the_schedule_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="wants a context of 8 blocks, 2049 tokens"):
        run(folder, block_size=256)
