"""Mixtures of experts against their twins: routing, lining up by expert, and both ways to multiply, of floats and of codes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.kernels.device_codes import DeviceCodes, block_size
from octavo.kernels.gates import Gate
from octavo.kernels.reference import layer as plain
from octavo.kernels.reference.dequant import FP4_MIDDLE, FP4_TABLE
from octavo.kernels.triton.moe import products as moe
from octavo.kernels.triton.moe.route import choose_experts, choose_in_groups, sort_by_expert
from tests.support.soaked import rarely

TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}  # of the largest result
HIDDEN, INNER, COUNT, CHOSEN = 72, 40, 5, 3


def random(device: str, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device, dtype)


def guarded(stack: Tensor) -> Tensor:
    """The same, with numbers behind it that are none: a read past the end shows."""
    return torch.cat([stack, torch.full_like(stack[:2], torch.nan)])[: len(stack)]


def choices(tokens: int, count: int, device: str, skewed: bool = False) -> tuple[Tensor, Tensor]:
    """Of random experts, or all of the first ones: then some have no rows, and others several tiles."""
    dice = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, count, generator=dice) + (torch.arange(count, 0, -1) if skewed else 0)
    ids = scores.topk(CHOSEN, dim=-1).indices
    return ids.to(device), torch.rand(tokens, CHOSEN, generator=dice).to(device)


def assert_near(got: Tensor, exact: Tensor) -> None:
    assert got.dtype == exact.dtype and got.shape == exact.shape
    torch.testing.assert_close(got, exact, atol=TOLERANCE[got.dtype] * float(exact.abs().max()), rtol=0)


@pytest.mark.parametrize(("scores", "normed"), [("all", True), ("all", False), ("chosen", True)], ids=str)
def test_the_best_experts_are_chosen_and_weighed(scores: str, normed: bool, device: str) -> None:
    for count, chosen, dtype in ((5, 3, torch.float32), (128, 8, torch.bfloat16), (32, 4, torch.float32), (7, 1, torch.float32)):
        logits = random(device, torch.float32, 4, count)
        logits = logits.to(dtype) if dtype == torch.float32 else (logits.argsort(-1).argsort(-1) / 16).to(dtype)  # no two are equal
        got, exact = choose_experts(logits, chosen, scores, normed), plain.choose_experts(logits, chosen, scores, normed)
        assert torch.equal(got[0], exact[0])
        torch.testing.assert_close(got[1], exact[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("scores", "normed", "biased"), [("sigmoid", True, True), ("all", False, False), ("sigmoid", False, True)], ids=str
)
def test_experts_are_chosen_among_those_of_the_best_groups(scores: str, normed: bool, biased: bool, device: str) -> None:
    for count, chosen, groups, kept, dtype in (
        (64, 4, 1, 1, torch.bfloat16), (256, 8, 8, 4, torch.float32), (60, 5, 5, 3, torch.float32), (6, 2, 3, 1, torch.float32)
    ):  # fmt: skip
        logits = random(device, torch.float32, 4, count).argsort(-1).argsort(-1).sub(count // 2).div(16).to(dtype)  # no two are equal
        bias = random(device, torch.float32, count, seed=1) / 10 if biased else None
        given = logits, chosen, scores, normed, groups, kept, bias, 2.5
        got, exact = choose_in_groups(*given), plain.choose_in_groups(*given)
        assert torch.equal(got[0], exact[0])
        torch.testing.assert_close(got[1], exact[1], atol=1e-6, rtol=1e-6)


def test_logits_that_are_no_numbers_still_choose_experts_that_there_are(device: str) -> None:
    logits = torch.full((2, 6), torch.nan, device=device)
    logits[1, 3] = torch.inf
    chosen = [
        choose_experts(logits, 4, "all", True),
        choose_in_groups(logits, 4, "sigmoid", True, 3, 2, torch.zeros(6, device=device), 1.0),
    ]
    for ids, _ in chosen:
        assert int(ids.min()) >= 0 and int(ids.max()) < 6


@pytest.mark.parametrize(("tokens", "count", "rows", "first", "held"), [(9, 5, 4, 0, 5), (700, 7, 64, 2, 3), (1, 5, 4, 0, 5)], ids=str)
def test_choices_are_lined_up_by_expert(tokens: int, count: int, rows: int, first: int, held: int, device: str) -> None:
    """Every choice once, in tiles of one expert each, in order; the rest is filling."""
    ids, _ = choices(tokens, count, device, skewed=True)
    lined_up = sort_by_expert(ids, held, first, rows)
    tiles, flat = int(lined_up.count), ids.flatten().cpu()
    expected = []
    for expert in range(held):
        own = (flat == first + expert).nonzero().squeeze(1).tolist()
        expected += [(expert, *own[at : at + rows]) for at in range(0, len(own), rows)]
    order = lined_up.order.cpu().view(-1, rows)[:tiles]
    found = [(int(expert), *(int(one) for one in line if one < ids.numel())) for expert, line in zip(lined_up.experts.cpu(), order)]
    assert found == expected and tiles <= lined_up.tiles
    assert bool(((order <= ids.numel()) & (order >= 0)).all())


FEW = pytest.mark.parametrize("few", [True, False], ids=["few", "many"])


@pytest.mark.parametrize(
    ("dtype", "gate", "biased", "few"),
    [
        (torch.float32, "swiglu", False, True), (torch.bfloat16, "clamped", True, False), (torch.float32, "geglu", True, True),
        *rarely((torch.float32, "swiglu", False, False), (torch.bfloat16, "clamped", True, True), (torch.float32, "geglu", True, False)),
        *rarely((torch.float16, "swiglu", False, True), (torch.float16, "swiglu", False, False)),
    ],
    ids=str,
)  # fmt: skip
def test_experts_give_what_those_of_the_twin_give(dtype: torch.dtype, gate: Gate, biased: bool, few: bool, device: str) -> None:
    gate_up = guarded(random(device, dtype, COUNT * 2 * INNER, HIDDEN) * HIDDEN**-0.5)
    down = guarded(random(device, dtype, COUNT * HIDDEN, INNER) * INNER**-0.5)
    biases = (random(device, dtype, COUNT * 2 * INNER), random(device, dtype, COUNT * HIDDEN)) if biased else None
    for tokens in (1, 3) if few else (6, 41):
        x, (ids, weights) = random(device, dtype, tokens, HIDDEN), choices(tokens, COUNT, device, skewed=tokens == 41)
        got = moe.mixture(x, ids, weights, gate_up, down, biases, gate, few=few)
        if gate == "geglu":
            exact = by_hand(x, ids, weights, gate_up, down, biases)
        else:
            exact = plain.mixture(x, ids, weights, gate_up, down, biases, gate)
        assert_near(got, exact)


def by_hand(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, biases: tuple[Tensor, Tensor]) -> Tensor:
    """With a gate that no published mixture has."""
    one, two = gate_up.view(COUNT, 2 * INNER, HIDDEN)[ids], down.view(COUNT, HIDDEN, INNER)[ids]  # [T, chosen, ...]
    gates, ups = (torch.einsum("tcih,th->tci", one, x) + biases[0].view(COUNT, -1)[ids]).chunk(2, dim=-1)
    inner = torch.nn.functional.gelu(gates, approximate="tanh") * ups
    given = torch.einsum("tchi,tci->tch", two, inner) + biases[1].view(COUNT, -1)[ids]
    return (given * weights.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, INNER), (torch.bfloat16, 3 * INNER + 5), (torch.float32, 1 << 14)], ids=str)
def test_an_expert_that_all_tokens_share_is_added(dtype: torch.dtype, width: int, gated: bool, device: str) -> None:
    """Of the width of the others, wider, and too wide to be held beside them; a rank lacks some of the others."""
    gate_up, down = random(device, dtype, 2 * 2 * INNER, HIDDEN) * HIDDEN**-0.5, random(device, dtype, 2 * HIDDEN, INNER) * INNER**-0.5
    shared = guarded(random(device, dtype, 2 * width, HIDDEN) * HIDDEN**-0.5), guarded(random(device, dtype, HIDDEN, width) * width**-0.5)
    gate = random(device, dtype, 1, HIDDEN) * HIDDEN**-0.5 if gated else None
    for tokens in (1, 3):
        x, (ids, weights) = random(device, dtype, tokens, HIDDEN), choices(tokens, COUNT, device)
        got = moe.shared_mixture(x, ids, weights, gate_up, down, *shared, gate, first=1)
        assert_near(got, plain.shared_mixture(x, ids, weights, gate_up, down, *shared, gate, first=1))


@FEW
def test_experts_that_a_rank_does_not_have_add_nothing(few: bool, device: str) -> None:
    gate_up, down = random(device, torch.float32, 2 * 2 * INNER, HIDDEN), random(device, torch.float32, 2 * HIDDEN, INNER)
    x, (ids, weights) = random(device, torch.float32, 4, HIDDEN), choices(4, COUNT, device)
    got = moe.mixture(x, ids, weights, gate_up, down, first=2, few=few)
    assert_near(got, plain.mixture(x, ids, weights, gate_up, down, first=2))
    nobody = torch.zeros_like(ids)
    assert not moe.mixture(x, nobody, weights, gate_up, down, first=2, few=few).any()


def codes(rows: int, size: int, bits: int, group: int, device: str, order: bool = False, table: bool = False) -> DeviceCodes:
    """Random ones. Behind the last row stand scales that are not numbers."""
    dice = torch.Generator().manual_seed(rows + size + bits + group)
    columns = -(-size // block_size(bits, group)) * block_size(bits, group)
    words = torch.randint(-(2**15), 2**15, (rows, columns * bits // 16), generator=dice, dtype=torch.int16)
    pairs = torch.randn(rows + 2, -(-columns // group), 2, generator=dice).half()
    pairs[rows:] = torch.nan
    pairs[:, -(-size // group) :] = 0
    scales = pairs.view(torch.int32).squeeze(-1).to(device)[:rows]
    order_of = torch.randperm(size, generator=dice).to(device) if order else None
    values = torch.randint(0, 256, (16,), generator=dice, dtype=torch.uint8).to(device) if table else None
    return DeviceCodes(bits, group, size, words.to(device), scales, 2.0 ** -(12 if table else bits + 4), order_of, values)


STACKS = pytest.mark.parametrize(
    ("dtype", "bits", "group", "biased", "order", "table"),
    [
        (torch.float32, 4, 32, True, False, False), (torch.bfloat16, 8, 32, False, True, False), (torch.bfloat16, 4, 32, True, False, True),
        pytest.param(torch.bfloat16, 4, 128, False, False, False, marks=pytest.mark.soak),
        pytest.param(torch.float32, 4, 16, False, True, False, marks=pytest.mark.soak),
        pytest.param(torch.float16, 4, 64, True, False, True, marks=pytest.mark.soak),
    ],
    ids=str,
)  # fmt: skip


@pytest.mark.parametrize("few", [pytest.param(True, marks=pytest.mark.soak), False], ids=["few", "many"])
@STACKS
def test_stacks_of_codes(
    dtype: torch.dtype, bits: int, group: int, biased: bool, order: bool, table: bool, few: bool, device: str
) -> None:
    """Sizes that no block and no tile divides, where groups allow it. A program for every few rows is slow in the interpreter."""
    hidden, inner = 3 * group, 2 * group if group < 128 else group
    gate_up, down = (codes(4 * rows, size, bits, group, device, order, table) for rows, size in ((2 * inner, hidden), (hidden, inner)))
    biases = (random(device, dtype, 4 * 2 * inner), random(device, dtype, 4 * hidden)) if biased else None
    for tokens in (2 if group < 128 else 1,) if few else (5, 23):
        x, (ids, weights) = random(device, dtype, tokens, hidden), choices(tokens, 4, device)
        got = moe.mixture(x, ids, weights, gate_up, down, biases, few=few)
        assert_near(got, plain.mixture(x, ids, weights, gate_up, down, biases))


@STACKS
def test_a_few_tokens_read_stacks_of_codes_by_themselves(
    dtype: torch.dtype, bits: int, group: int, biased: bool, order: bool, table: bool, device: str
) -> None:
    """Either half alone, so that its rows can be few while they are as long as above. No program's rows divide them."""
    ids, weights = choices(2, 4, device)
    choice = moe.Choices(ids, weights, 4, 0)
    gate_up, x = codes(4 * 2 * 5, 3 * group, bits, group, device, order, table), random(device, dtype, 2, 3 * group)
    down, rows = codes(4 * 7, 2 * group, bits, group, device, order, table), random(device, dtype, 2 * CHOSEN, 2 * group)
    biases = (random(device, dtype, 4 * 2 * 5), random(device, dtype, 4 * 7)) if biased else (None, None)
    assert_near(moe.few_gate_up(x, choice, gate_up, biases[0], "swiglu")[0], gated_by_hand(x, choice, gate_up, biases[0]))
    assert_near(moe.few_down((rows, rows), choice, down, biases[1], x[:, :7]), summed_by_hand(rows, choice, down, biases[1]))


def gated_by_hand(x: Tensor, choice: moe.Choices, stack: DeviceCodes, bias: Tensor | None) -> Tensor:
    """[choices, inner]"""
    matrices, offsets = by_choice(x, choice, stack, bias)
    gates, ups = (torch.einsum("tcis,ts->tci", matrices, x.float()) + offsets).flatten(0, 1).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gates) * ups).to(x.dtype)


def summed_by_hand(x: Tensor, choice: moe.Choices, stack: DeviceCodes, bias: Tensor | None) -> Tensor:
    """[T, hidden]"""
    matrices, offsets = by_choice(x, choice, stack, bias)
    given = torch.einsum("tchs,tcs->tch", matrices, x.float().view(*choice.ids.shape, -1)) + offsets
    return (given * choice.weights.unsqueeze(-1)).sum(1).to(x.dtype)


def by_choice(x: Tensor, choice: moe.Choices, stack: DeviceCodes, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The matrix and the bias of each choice: [T, chosen, rows, size] and [T, chosen, rows], or a zero where there is none."""
    matrices = plain.unpack(stack, x.dtype).float().view(choice.count, -1, stack.size)[choice.ids]
    return matrices, torch.zeros((), device=x.device) if bias is None else bias.float().view(choice.count, -1)[choice.ids]


def test_rows_of_codes_longer_than_a_step(device: str) -> None:
    """2,080 columns of 4 bits are 17 blocks: three steps of a warp, and of each expert's rows several on their way."""
    size = 2080
    ids, weights = torch.tensor([[1, 0]], device=device), torch.tensor([[0.25, 0.5]], device=device)
    choice = moe.Choices(ids, weights, 2, 0)
    gate_up, x = codes(2 * 2 * 5, size, 4, 32, device), random(device, torch.float32, 1, size)
    assert_near(moe.few_gate_up(x, choice, gate_up, None, "swiglu")[0], gated_by_hand(x, choice, gate_up, None))
    down, rows = codes(2 * 5, size, 4, 32, device), random(device, torch.float32, 2, size)
    assert_near(moe.few_down((rows, rows), choice, down, None, x[:, :5]), summed_by_hand(rows, choice, down, None))


@pytest.mark.parametrize("few", [*rarely(True), False], ids=["few", "many"])  # of few rows the interpreter takes seconds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_floats_of_four_bits_are_what_their_table_says(dtype: torch.dtype, few: bool, device: str) -> None:
    """Every code, in rows that end inside of a block, with scales that are far apart; a token chooses an expert that is not there."""
    hidden, inner = 160, 64
    gate_up, down = (mxfp4(3 * rows, size, device) for rows, size in ((2 * inner, hidden), (hidden, inner)))
    x, ids = random(device, dtype, 2, hidden), torch.tensor([[1, 3], [2, 0]], device=device)
    weights = torch.tensor([[0.25, 2.0], [1.0, 0.5]], device=device)
    got = moe.mixture(x, ids, weights, gate_up, down, few=few)
    assert_near(got, plain.mixture(x, ids, weights, gate_up, down))


def mxfp4(rows: int, size: int, device: str) -> DeviceCodes:
    """Of random codes; scales are powers of two."""
    drawn = codes(rows, size, 4, 32, device)
    dice = torch.Generator().manual_seed(rows)
    scale = torch.exp2(torch.randint(-3, 3, drawn.scales.shape, generator=dice).float()).to(device)
    scale[:, size // 32 :] = 0
    scales = torch.stack([scale, scale * -FP4_MIDDLE], dim=-1).half().view(torch.int32).squeeze(-1)
    return replace(drawn, scales=scales, factor=2.0**-5, table=FP4_TABLE.to(device), floats=True)


def test_no_tokens_are_no_work(device: str) -> None:
    gate_up, down = random(device, torch.float32, COUNT * 2 * INNER, HIDDEN), random(device, torch.float32, COUNT * HIDDEN, INNER)
    x, ids, weights = random(device, torch.float32, 0, HIDDEN), *choices(0, COUNT, device)
    assert moe.mixture(x, ids, weights, gate_up, down).shape == (0, HIDDEN)
    assert choose_experts(random(device, torch.float32, 0, COUNT), CHOSEN, "all", True)[0].shape == (0, CHOSEN)


def test_tiles_by_rule_agree_and_both_ways_give_nearly_the_same(device: str) -> None:
    gate_up = random(device, torch.float32, COUNT * 2 * INNER, HIDDEN) * HIDDEN**-0.5
    down = random(device, torch.float32, COUNT * HIDDEN, INNER) * INNER**-0.5
    for tokens in (2, 9):
        x, (ids, weights) = random(device, torch.float32, tokens, HIDDEN), choices(tokens, COUNT, device)
        assert_near(moe.mixture(x, ids, weights, gate_up, down), plain.mixture(x, ids, weights, gate_up, down))
