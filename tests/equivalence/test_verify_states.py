"""The proof of recurrent states: it holds on small models under stress, and it catches what it is there to catch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from octavo.cli.verify import LEAST_REQUESTS, verified_text
from octavo.engine import schedule_runs
from octavo.engine.verify import Verified
from octavo.errors import VerifyError
from octavo.layers import delta_net as layers
from octavo.llm import LLM
from octavo.messages import StepPlan
from octavo.policy.request import Sequence
from octavo.policy.state_pool import NULL_STATE, StatePool
from octavo.policy.states import States
from octavo.sampling_params import SamplingParams
from octavo.worker.kv_store import PagedStore
from octavo.worker.native_layers import NativeAttention
from tests.equivalence.test_schedules import difference, proof
from tests.equivalence.test_verify import BOTH, run
from tests.support.families import family_model
from tests.support.hybrids import HYBRIDS, SMALLEST
from tests.support.places import PLACES, Place
from tests.support.soaked import rarely

Monkey = pytest.MonkeyPatch
FEW: dict[str, Any] = {"requests": LEAST_REQUESTS, "state_cache_share": 0.0}  # a small share of a small pool has no room for a state


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(family_model(tmp_path_factory.mktemp("hybrid") / "model", SMALLEST, seed=5))


def proven(folder: str, **settings: Any) -> Verified:
    """A difference is an assertion, which seeded bugs must fail."""
    try:
        return run(folder, **FEW | settings)
    except VerifyError as error:
        raise AssertionError(str(error)) from None


# promise: octavo-verify
@pytest.mark.parametrize(
    ("depth", "block_size", "native"), [(2, 4, True), (1, 4, False), *rarely((1, 16, True), (2, 16, False), (1, 1, True), (2, 1, False))]
)
def test_states_agree_at_both_depths(folder: str, depth: int, block_size: int, native: bool) -> None:
    verified = proven(folder, depth=depth, block_size=block_size, native=native)
    assert verified.compared.state_values > 100_000 and verified.compared.restored > 5 and verified.compared.forks > 5
    assert verified.kernels.startswith("native ") == native and verified.compared.rejected == 0
    text = verified_text("model", block_size, [verified])
    assert "\nstate values, bit for bit " in text and f"\nrows begun with a kept state {verified.compared.restored:>19}\n" in text


# promise: octavo-verify
@PLACES
@pytest.mark.parametrize("depth", [2, *rarely(1)])
def test_states_of_a_device_agree(folder: str, depth: int, place: Place, monkeypatch: Monkey) -> None:
    """Steps are padded, and computed once layer by layer and once as an engine does: on a GPU, by replaying graphs."""
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=device")
    verified = proven(folder, depth=depth, block_size=4, native=False, device=place)
    assert verified.compared.state_values > 100_000 and verified.compared.restored > 5 and verified.compared.cache_values > 10_000


@pytest.mark.soak
@pytest.mark.parametrize("name", HYBRIDS)
@BOTH
def test_every_hybrid_agrees(name: str, native: bool, tmp_path: Path) -> None:
    model = str(family_model(tmp_path / "model", HYBRIDS[name], seed=6))
    for depth in (1, 2):
        assert proven(model, depth=depth, native=native).compared.restored > 5


def test_a_schedule_that_finds_no_state_is_no_proof(folder: str, monkeypatch: Monkey) -> None:
    monkeypatch.setattr(schedule_runs, "CHECKPOINTS", 0)
    with pytest.raises(VerifyError, match="saw no prefix hits, hits of a state, evictions of a state, so it proves too little"):
        run(folder, block_size=4, **FEW)


# --- what is caught


def overwritten(monkeypatch: Monkey) -> str:
    """Somebody writes a slot that a row is going to read."""
    apply = PagedStore.apply

    def slip(self: PagedStore, plan: StepPlan) -> None:
        apply(self, plan)
        if plan.step > 8 and plan.states and plan.states[-1][0]:
            self.states[0]["recurrent"][plan.states[-1][0], 1, 2, 3] += 1e-3

    monkeypatch.setattr(PagedStore, "apply", slip)
    return r"the states differ: step \d+, row \d+, layer 0, recurrent of slot \d+ \(before its tokens\)"


def of_another_row(monkeypatch: Monkey) -> str:
    plan_one = States.plan

    def swapped(self: States, seq: Sequence, start: int, plan: StepPlan) -> None:
        plan_one(self, seq, start, plan)
        if len(plan.states) == 2 and NULL_STATE not in plan.states[0] + plan.states[1]:
            (one, to), (other, there) = plan.states
            plan.states[:] = (other, to), (one, there)

    monkeypatch.setattr(States, "plan", swapped)
    return r"the states differ: .* \(before its tokens\)|row \d+ begins with the state after other tokens|and its state is that after"


def kept_too_late(monkeypatch: Monkey) -> str:
    seal = States._seal
    monkeypatch.setattr(States, "_seal", lambda self, seq, position, slot: seal(self, seq, position, seq.states[-1][1]))
    return r"state slot \d+ is kept as the state after \d+ tokens, and holds that after \d+"


def of_other_tokens(monkeypatch: Monkey) -> str:
    use = StatePool.use
    monkeypatch.setattr(StatePool, "use", lambda self, key: use(self, next(reversed(self.index))))
    return r"begins with the state after other tokens|and its state is that after"


# promise: octavo-verify
@BOTH
@pytest.mark.parametrize("slip", [overwritten, of_another_row, kept_too_late, of_other_tokens])
def test_a_slip_of_slots_is_caught(folder: str, native: bool, slip: Callable[[Monkey], str], monkeypatch: Monkey) -> None:
    message = slip(monkeypatch)
    with pytest.raises(VerifyError, match=message):
        run(folder, native, depth=2, block_size=4, **FEW)


def result_of_a_slot(states: dict[str, Tensor], out: Tensor, step: Any) -> None:
    out[0, 0] += 1e-3 * (int(step.read[0]) % 2)


def lost_convolution(states: dict[str, Tensor], out: Tensor, step: Any) -> None:
    if len(step.checkpoints):
        states["conv"][int(step.checkpoints[0, 1])] = 0


def in_place(states: dict[str, Tensor], out: Tensor, step: Any) -> None:
    if int(step.read[0]):
        states["recurrent"][int(step.read[0])] = states["recurrent"][int(step.write[0])]


SLIPS = {
    result_of_a_slot: r"the recurrence differs over equal states: step \d+, layer 0",
    lost_convolution: r"the states differ: step \d+, row \d+, layer 0, conv of slot \d+ \(written after \d+ tokens\)",
    in_place: r"a step in one call differs from its layers one by one",
}


@BOTH
@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_of_the_kernel_is_caught(folder: str, native: bool, slip: Callable[..., None], monkeypatch: Monkey) -> None:
    if native:
        recur = NativeAttention.recur

        def native_slip(self: NativeAttention, layer: int, qkvz: Tensor, gates: Tensor) -> Tensor:
            out, (_, _, states) = recur(self, layer, qkvz, gates), self._held
            if len(states[layer]["conv"]) == 1 + 2 * 12 + 8:  # those of the engine
                slip(states[layer], out, self._tensors.states)
            return out

        monkeypatch.setattr(NativeAttention, "recur", native_slip)
    else:
        delta_net = layers.delta_net

        def torch_slip(*inputs: Any) -> Tensor:
            out = delta_net(*inputs)
            conv, recurrent, _, states = inputs[-4:]
            if len(conv) == 1 + 2 * 12 + 8:
                slip({"conv": conv, "recurrent": recurrent}, out.flatten(1), states)
            return out

        monkeypatch.setattr(layers, "delta_net", torch_slip)
    with pytest.raises(VerifyError, match=SLIPS[slip]):
        run(folder, native, block_size=4, **FEW)


# --- in debug mode


@BOTH
def test_a_slot_that_is_read_before_it_is_written_is_noticed(folder: str, native: bool, monkeypatch: Monkey) -> None:
    """A slot that was never written has zeros, as the null slot does."""
    monkeypatch.setenv("OCTAVO_DEBUG", "check=1")
    plan_one = States.plan

    def hasty(self: States, seq: Sequence, start: int, plan: StepPlan) -> None:
        plan_one(self, seq, start, plan)
        if start == 0:
            self.pool.release(taken := self.pool.take())
            plan.states[-1] = taken, plan.states[-1][1]

    with LLM(folder, native=native, dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=20) as llm:
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        assert llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)[0].outputs[0].finish_reason == "length"
        monkeypatch.setattr(States, "plan", hasty)
        assert llm.generate([{"prompt_token_ids": [5, 6, 8]}], params)[0].outputs[0].finish_reason == "error"


# --- schedules


# promise: octavo-verify-schedules
def test_schedules_change_no_answer_of_a_recurrent_model(folder: str) -> None:
    assert difference(proof(folder, 160, 9, state_cache_share=0.0)) is None


@pytest.mark.soak
@pytest.mark.parametrize("name", ["qwen3.5 moe", "qwen3-next, some mlps"])
def test_no_hybrid_depends_on_the_schedule(name: str, tmp_path: Path) -> None:
    assert proof(str(family_model(tmp_path, HYBRIDS[name], seed=21)), 250, requests=9).run(6, 9).tokens > 100


# promise: octavo-verify-schedules
def test_a_difference_names_the_recurrent_layer(folder: str, monkeypatch: Monkey) -> None:
    apply = PagedStore.apply

    def slip(self: PagedStore, plan: StepPlan) -> None:
        apply(self, plan)
        for write in plan.row_writes:
            if write.start and write.row in plan.row:
                self.states[0]["recurrent"][plan.states[plan.row.index(write.row)][0], 0] += 1e-2

    monkeypatch.setattr(PagedStore, "apply", slip)
    found = difference(proof(folder, 160, 9))
    assert found is not None and "The first difference in a repeated run: step " in found and ", layer 0, recurrence, position " in found
