"""The mixture layer by itself: what it gives each token is what its experts give it one by one, however they are kept or dealt out."""

import pytest
import torch
from torch import Tensor

from octavo.kernels.device_codes import DeviceCodes
from octavo.kernels.reference.layer import choose_experts, mixture, unpack
from octavo.quant.packed import quantize
from octavo.quant.schemes import repack

HIDDEN, INNER, COUNT = 48, 21, 6  # an inner size that no tile divides


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def token_by_token(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, biases: tuple[Tensor, Tensor], kind: str
) -> Tensor:
    """By the formulas, without sorting: gate and up of an expert are rows of one stack."""
    gates, ups = gate_up.view(COUNT, 2, INNER, -1).unbind(1)
    gate_bias, up_bias = biases[0].view(COUNT, 2, INNER).unbind(1)
    downs, down_bias = down.view(COUNT, HIDDEN, INNER), biases[1].view(COUNT, HIDDEN)
    out = torch.zeros_like(x)
    for token, row in enumerate(x):
        for expert, weight in zip(ids[token].tolist(), weights[token]):
            gate, up = gates[expert] @ row + gate_bias[expert], ups[expert] @ row + up_bias[expert]
            if kind == "clamped":
                gate, up = gate.clamp(max=7), up.clamp(-7, 7) + 1
            opened = gate / (1 + torch.exp(-gate * (1.702 if kind == "clamped" else 1)))
            out[token] += weight * (downs[expert] @ (opened * up) + down_bias[expert])
    return out


@pytest.mark.parametrize("kind", ["swiglu", "clamped"])
@pytest.mark.parametrize(("tokens", "chosen"), [(1, COUNT), (2, 5), (17, 2)])
def test_a_token_gets_what_its_experts_give_it_one_by_one(tokens: int, chosen: int, kind: str) -> None:
    x = drawn(tokens, HIDDEN, seed=1) * 4  # so that the clamps are reached
    logits = drawn(tokens, COUNT, seed=2)
    logits[:, 3] -= 100 * (chosen < COUNT)  # an expert that nobody chooses
    ids, weights = choose_experts(logits, chosen, "all", normed=True)
    stacks = drawn(COUNT * 2 * INNER, HIDDEN, seed=3), drawn(COUNT * HIDDEN, INNER, seed=4)
    biases = drawn(COUNT * 2 * INNER, seed=5), drawn(COUNT * HIDDEN, seed=6)
    assert chosen == COUNT or 3 not in ids.flatten().tolist()
    torch.testing.assert_close(
        mixture(x, ids, weights, *stacks, biases, kind), token_by_token(x, ids, weights, *stacks, biases, kind), rtol=1e-4, atol=1e-3
    )


def test_ranks_with_whole_experts_add_up_to_all_of_them() -> None:
    x, (ids, weights) = drawn(9, HIDDEN), choose_experts(drawn(9, COUNT), 3, "chosen", normed=True)
    gate_up, down = drawn(COUNT * 2 * INNER, HIDDEN, seed=3), drawn(COUNT * HIDDEN, INNER, seed=4)
    parts = [
        mixture(x, ids, weights, gate_up.chunk(3)[rank], down.chunk(3)[rank], None, "swiglu", first=2 * rank) for rank in range(3)
    ]
    torch.testing.assert_close(sum(parts), mixture(x, ids, weights, gate_up, down, None, "swiglu"))


def test_a_stack_of_codes_is_the_stack_of_what_they_stand_for() -> None:
    x, (ids, weights) = drawn(5, 64), choose_experts(drawn(5, COUNT), 2, "all", normed=False)

    def packed(rows: int, columns: int, seed: int) -> tuple[DeviceCodes, Tensor]:
        codes = repack(quantize(drawn(rows, columns, seed=seed), 4, 16), torch.device("cpu"))
        return codes, unpack(codes, torch.float32)

    (gate_up, wide_gate_up), (down, wide_down) = packed(COUNT * 2 * 16, 64, 3), packed(COUNT * 64, 16, 4)
    assert torch.equal(
        mixture(x, ids, weights, gate_up, down, None, "swiglu"), mixture(x, ids, weights, wide_gate_up, wide_down, None, "swiglu")
    )


def test_scores_are_those_of_all_experts_or_of_the_chosen_ones() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -50.0]])
    of_all, of_chosen = logits.softmax(-1)[0], torch.tensor([3.0, 2.0]).softmax(0)
    for scores, normed, expected in [("all", False, of_all[[1, 2]]), ("all", True, of_chosen), ("chosen", True, of_chosen)]:
        ids, weights = choose_experts(logits, 2, scores, normed)
        assert ids.tolist() == [[1, 2]]
        torch.testing.assert_close(weights, expected.unsqueeze(0))


def test_a_token_gets_the_same_alone_and_in_a_batch() -> None:
    """Experts add to it in their own order, not in that of the batch."""
    x, (ids, weights) = drawn(12, HIDDEN), choose_experts(drawn(12, COUNT), 4, "all", normed=True)
    stacks = drawn(COUNT * 2 * INNER, HIDDEN, seed=3), drawn(COUNT * HIDDEN, INNER, seed=4)
    together = mixture(x, ids, weights, *stacks, None, "swiglu")
    shuffled = mixture(x, ids.flip(1), weights.flip(1), *stacks, None, "swiglu")
    assert torch.equal(together, shuffled)
