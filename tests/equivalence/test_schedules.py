"""`octavo verify --schedules` holds on a small model, names where two runs part, and refuses kernels that promise nothing."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.cli.main import main
from octavo.cli.verify import LABELS
from octavo.config import EngineConfig
from octavo.engine.schedules import LONGEST, draw_requests
from octavo.engine.verify import Proof
from octavo.errors import ConfigError, VerifyError
from octavo.kernels.cpu.sampling import NativeSampling
from octavo.kernels.reference.sampling import Ranking
from octavo.loading.resolve import load_model_config, resolve_model
from octavo.messages import AddRequest, StepPlan
from octavo.policy.beam_groups import BeamGroups
from octavo.policy.request import Sequence
from octavo.policy.scheduler import Scheduler
from octavo.step.step_tensors import StepTensors
from octavo.worker.kv_store import PagedStore
from octavo.worker.native_program import NativeProgram
from tests.support.families import FAMILIES, family_model
from tests.support.mixtures import MIXTURES, tiny_mixture
from tests.support.models import stories260k
from tests.support.native import levels_here
from tests.support.soaked import rarely

LEVEL = levels_here()[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with room for more than two pieces of attention."""
    folder = stories260k(tmp_path_factory.mktemp("stories") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return str(folder)


def proof(folder: str, tokens: int = 0, requests: int = 5, **settings: Any) -> Proof:
    """`tokens`: of the longest sequence; 0: requests as the command draws them"""
    config = EngineConfig(**{"model": folder, "device": "cpu", "cpu_isa": LEVEL, "dtype": "float32"} | settings)
    source = resolve_model(folder)
    model = load_model_config(source)
    return Proof(config, source, model, draw_requests(requests, tokens, model.vocab_size, 0) if tokens else None)


# promise: octavo-verify-schedules
def test_the_schedule_changes_no_answer(folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "proof.html"
    words = ["verify", folder, "--cpu-isa", LEVEL, "--dtype", "float32", "--schedules", "1", "--report", str(report)]
    assert main(words) == 0, capsys.readouterr().out
    first, head, counts = capsys.readouterr().out.splitlines()
    assert first.startswith("schedule 1: equal (100 tokens and 16 sequences a step, depth 2, threads: 2, blocks of 16")
    assert re.search(r", two engines and one of them lost after \d+ tokens\)$", first)
    assert head.endswith(f"float32, native {LEVEL} kernels, cache in float32: the answers under every schedule have the same bits as alone")
    assert counts.startswith("16 requests, 29 samples, ")
    assert all(int(number.replace(",", "")) > 0 for label in LABELS.values() for number in re.findall(f"{label}: ([0-9,]+)", counts))
    assert head in report.read_text() and "parts of prompts" in report.read_text()


def test_few_requests_with_several_pieces_of_keys_agree(folder: str) -> None:
    """Bugs that change only the last bits are planted below this test, so it is short, and its seed is one that shows all of them."""
    assert difference(proof(folder, LONGEST, requests=8, seed=1)) is None


def difference(proof: Proof) -> str | None:
    try:
        proof.run(1, 12)
    except VerifyError as error:
        return str(error)
    return None


# promise: octavo-verify-schedules
def test_other_blocks_weights_and_seeds_agree(folder: str) -> None:
    """The second and third schedule have other blocks than the first, and limits drawn from the seed."""
    proven = proof(folder, 160, 9, quantization="int8", kv_cache_dtype="int8", seed=3, block_size=8).run(3, 12)
    assert [schedule.block_size for schedule, _ in proven.schedules] == [8, 4, 64]
    assert len({str(schedule) for schedule, _ in proven.schedules}) == 3 and proven.kv_cache_dtype == "int8"


def damaged_hits(monkeypatch: pytest.MonkeyPatch) -> str:
    """A block that is found in the cache has other values in layer 1."""
    apply = PagedStore.apply

    def slip(self: PagedStore, plan: StepPlan) -> None:
        apply(self, plan)
        for write in plan.row_writes:
            if write.tables[0]:
                self.caches[1]["v"][write.tables[0][0], 0] += 1e-3

    monkeypatch.setattr(PagedStore, "apply", slip)
    return r"The first difference in a repeated run: step \d+, layer 1, attention, position \d+ \(by \S+ at most\)"


def logits_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> str:
    compute = NativeProgram.compute

    def slip(self: NativeProgram, step: StepTensors) -> tuple[Tensor, Tensor, Tensor]:
        hidden, logits, best = compute(self, step)
        return hidden, logits + 1e-3 * (len(logits) > 1) * torch.arange(logits.shape[1]), best

    monkeypatch.setattr(NativeProgram, "compute", slip)
    return r"The first difference in a repeated run: step \d+: one native call differs from its layers one by one"


def logprobs_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> str:
    rank = NativeSampling.rank

    def slip(self: NativeSampling, logits: Tensor, ids: Tensor, count: int) -> Ranking:
        found = rank(self, logits, ids, count)
        return found if len(ids) == 1 or count < 2 else replace(found, chosen=found.chosen + 1e-6)  # prompts have one

    monkeypatch.setattr(NativeSampling, "rank", slip)
    return "The states of all layers and the logits are equal: ids and logprobs are computed from them differently"


def noise_of_moved_samples(monkeypatch: pytest.MonkeyPatch) -> str:
    """Samples that begin in one engine and go on in another one get other noise there."""
    begin = Scheduler.add

    def slip(self: Scheduler, message: AddRequest) -> None:
        moved = any((message.outputs or {}).values())
        begin(self, replace(message, params=replace(message.params, seed=message.params.seed + 1000)) if moved else message)

    monkeypatch.setattr(Scheduler, "add", slip)
    return "The states of all layers and the logits are equal: ids and logprobs are computed from them differently"


# promise: octavo-verify-schedules
@pytest.mark.parametrize("slip", [damaged_hits, logits_of_many_rows, logprobs_of_many_rows, *rarely(noise_of_moved_samples)])
def test_a_difference_names_the_request_and_where_the_states_part(
    folder: str, slip: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = slip(monkeypatch)
    with pytest.raises(VerifyError) as raised:
        proof(folder, 160).run(1, 12)
    token = r"request \d+, sample \d, token \d+: id \d+ with logprob \S+ alone, id \d+ with logprob \S+ under this schedule"
    assert re.fullmatch(rf"schedule 1 \(100 tokens .*\): {token}\. {where}", str(raised.value)), str(raised.value)


# promise: octavo-verify-schedules
@pytest.mark.soak
def test_a_beam_search_that_changes_when_it_is_preempted_is_named(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    park = BeamGroups.park

    def slip(self: BeamGroups, seq: Sequence) -> Sequence:
        search = self.groups[seq.request.request_id].search
        search._scores = [0.0] * len(search._scores)
        return park(self, seq)

    monkeypatch.setattr(BeamGroups, "park", slip)
    with pytest.raises(VerifyError, match=r"schedule 1 \(.*\): request (5|6|6, turn 2), sample 0, token \d+: "):
        proof(folder, 160, requests=7).run(1, 12)


@pytest.mark.soak
@pytest.mark.parametrize("name", [*FAMILIES, *MIXTURES])
def test_no_family_depends_on_the_schedule(name: str, tmp_path: Path) -> None:
    if name in FAMILIES:
        model = family_model(tmp_path, FAMILIES[name], seed=21)
    else:
        model = tiny_mixture(tmp_path, name, seed=23)
    assert proof(str(model), 250, requests=9).run(6, 9).kernels == f"native {LEVEL}"


def test_a_difference_that_does_not_come_back_is_reported_too(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, slipped = NativeProgram.compute, list[int]()

    def slip(self: NativeProgram, step: StepTensors) -> tuple[Tensor, Tensor, Tensor]:
        hidden, logits, best = compute(self, step)
        if len(logits) > 1 and not slipped:
            slipped.append(1)
            logits += torch.arange(logits.shape[1])
        return hidden, logits, best

    monkeypatch.setattr(NativeProgram, "compute", slip)
    with pytest.raises(VerifyError, match="It did not happen again when both runs were repeated, so it depends on the timing of threads"):
        proof(folder, 160).run(1, 12)


def test_schedules_without_stress_are_no_proof(folder: str) -> None:
    with pytest.raises(VerifyError, match=r"the schedules saw no .*forks.*, so they prove too little: raise --schedules or --requests"):
        proof(folder, 160, requests=1).run(1, 12)


# promise: octavo-verify-schedules
def test_what_promises_nothing_is_refused_with_the_reason(folder: str) -> None:
    with pytest.raises(ConfigError, match="torch kernels do not promise them: leave out --no-native"):
        proof(folder, native=False).run(1, 12)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, but octavo verify --schedules runs in one process"):
        proof(folder, tensor_parallel_size=2)


def test_a_context_of_one_piece_is_refused(folder: str, tmp_path: Path) -> None:
    short = Path(shutil.copytree(folder, tmp_path / "short"))
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    with pytest.raises(ConfigError, match="needs a context of 448 tokens, but the model's maximum is 256"):
        proof(str(short))
