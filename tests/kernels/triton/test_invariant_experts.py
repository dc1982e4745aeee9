"""Experts of `--deterministic`: a token has the same bits in a small batch, whose choices are not sorted, and in every larger one."""

import pytest
import torch

from octavo.kernels.gates import Gate
from octavo.kernels.reference import layer as plain
from octavo.kernels.triton.moe import direct, grouped
from octavo.kernels.triton.moe.products import FEW_TOKENS, mixture
from octavo.kernels.triton.moe.route import Stack
from tests.kernels.triton.test_invariant import dots_in_order  # noqa: F401 (a fixture for all tests)
from tests.kernels.triton.test_moe import assert_near, choices, codes, random
from tests.support.soaked import rarely

COUNT, SEGMENTS, TOKENS = 4, 2, 9


def assert_alike(x: torch.Tensor, gate_up: Stack, down: Stack, biases: tuple[torch.Tensor, torch.Tensor] | None, gate: Gate) -> None:
    device = str(x.device.type)
    ids, weights = choices(len(x), COUNT, device)
    whole = mixture(x, ids, weights, gate_up, down, biases, gate, in_order=True)
    assert_near(whole, plain.mixture(x, ids, weights, gate_up, down, biases, gate))
    for some in (slice(0, 1), slice(7, 8), slice(3, 3 + FEW_TOKENS), slice(2, 9)):
        given = (one[some].contiguous() for one in (x, ids, weights))
        assert torch.equal(mixture(*given, gate_up, down, biases, gate, in_order=True), whole[some]), some


# promise: deterministic
@pytest.mark.parametrize(("dtype", "gate"), [(torch.float32, "swiglu"), (torch.bfloat16, "clamped"), *rarely((torch.float16, "swiglu"))])
def test_experts_of_a_token_do_not_depend_on_the_others(dtype: torch.dtype, gate: Gate, device: str) -> None:
    hidden, inner = (2048, 768) if device == "cuda" else (72, 40)
    stacks = random(device, dtype, COUNT * 2 * inner, hidden) * hidden**-0.5, random(device, dtype, COUNT * hidden, inner) * inner**-0.5
    biases = (random(device, dtype, COUNT * 2 * inner), random(device, dtype, COUNT * hidden)) if gate == "clamped" else None
    assert_alike(random(device, dtype, TOKENS, hidden), *stacks, biases, gate)


# promise: deterministic
@pytest.mark.parametrize(
    ("dtype", "order", "table"),
    [(torch.bfloat16, False, True), *rarely((torch.float32, True, False), (torch.float16, False, False))], ids=str,
)  # fmt: skip
def test_segments_of_codes_are_added_in_one_order(
    dtype: torch.dtype, order: bool, table: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last segment is shorter; in the interpreter rows are short, too."""
    hidden, inner = (2880, 2880) if device == "cuda" else (3 * 128, 3 * 64)
    if device == "cpu":
        for module in (direct, grouped):
            monkeypatch.setattr(module, "segments_of", lambda stack: SEGMENTS)
    gate_up, down = (codes(COUNT * rows, size, 4, 32, device, order, table) for rows, size in ((2 * inner, hidden), (hidden, inner)))
    biases = random(device, dtype, COUNT * 2 * inner), random(device, dtype, COUNT * hidden)
    assert_alike(random(device, dtype, TOKENS, hidden) * hidden**-0.5, gate_up, down, biases, "swiglu")
