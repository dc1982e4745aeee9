"""The kernels around a forward against their twins: random rows, padded steps, states that are not finite."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import Tensor

from octavo.kernels.reference import rows as twin
from octavo.kernels.triton.step import rows as kernel
from octavo.step.step_tensors import NUM_TOKENS, RowLayout, StepMemory, StepTensors, part_words

LAYOUT = RowLayout(max_blocks=1200, max_len=1200, links=(1, 1))
ROWS, VOCAB = 6, 1000


def random_words(rng: Random) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    words = torch.randint(1, VOCAB, (ROWS, LAYOUT.width), dtype=torch.int32, generator=generator)
    words[:, NUM_TOKENS] = torch.tensor([rng.randint(2, 1100) for _ in range(ROWS)])
    return words


def random_entries(rng: Random, words: Tensor, padded: int, tokens: int) -> list[int]:
    """Some rows, some of their last tokens each; the rest is padding: of a token each where all entries have one.

    Where there are more tokens than entries, some of the last tokens are drafts, with the outputs of padding rows.
    """
    chosen = rng.sample(range(ROWS), rng.randint(1, min(padded, ROWS)))
    lengths = [int(words[row, NUM_TOKENS]) for row in chosen]
    counts = [1 if padded == tokens else rng.randint(1, min(length, tokens // len(chosen))) for length in lengths]
    counts += [int(padded == tokens)] * (padded - len(chosen))
    starts = [length - count for length, count in zip(lengths, counts)]
    query_start = [sum(counts[:number]) for number in range(padded + 1)]
    idle = spare = padded - len(chosen)
    outputs, first_output = [rng.randint(0, 1) for _ in chosen], [0]
    for number, count in enumerate(counts[: len(chosen)]):
        drafts = rng.randint(0, min(spare, count - 1)) if outputs[number] else 0
        outputs[number] += drafts
        spare -= drafts
        first_output.append(first_output[-1] + max(1, outputs[number]))
    first_output += [min(first_output[-1] + number, padded) for number in range(1, idle + 1)]
    some = [rng.randint(1, length) for length in lengths]  # a cache group may have fewer positions
    rests = chosen + [-1] * idle, starts + [0] * idle, outputs + [0] * idle
    parts = query_start, *rests, first_output, lengths + [0] * idle, some + [0] * idle
    return [word for part in parts for word in part + [9] * (part_words(padded) - len(part))]  # what fills a part up is not read


def filled(entries: list[int], padded: int, tokens: int, device: str) -> StepTensors:
    memory = StepMemory(LAYOUT, padded, tokens, torch.device(device))
    axes = torch.zeros(3, tokens + 5, dtype=torch.int32, device=device)[:, :tokens]  # as of an image: height, width, time
    step = replace(memory.step(padded, tokens, padded), positions=axes)
    for tensor in (step.token_ids, step.cache_index, step.positions, step.slots, step.sample_index, step.noise, step.draw_positions):
        tensor.fill_(-77)  # whatever lies there
    step.entries.copy_(torch.tensor(entries, dtype=torch.int32))
    return step


SIZES = [(1, 1), (8, 8), (4, 64), (7, 1500)]
QUICK = [(*SIZES[0], 1, "states"), (*SIZES[1], 16, "hidden"), (*SIZES[1], 1, "states"), (*SIZES[2], 1, "states")]
OTHERS = {(*size, block, spoiled) for size in SIZES for block in (1, 16) for spoiled in ("states", "hidden")} - {*QUICK}


@pytest.mark.parametrize(
    ("padded", "tokens", "block_size", "spoiled"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.soak) for one in sorted(OTHERS))]
)
def test_a_step_out_of_the_rows_and_its_results_back_into_them(
    padded: int, tokens: int, block_size: int, spoiled: str, device: str
) -> None:
    rng = Random(f"{padded} {tokens} {block_size}")
    words = random_words(rng)
    entries = random_entries(rng, words, padded, tokens)
    ids = torch.tensor([rng.randrange(VOCAB) for _ in range(padded)])
    sizes = (tokens, 96), (padded, 40)
    states, hidden = (torch.randn(size, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16) for size in sizes)
    if spoiled == "states":
        states[rng.randrange(entries[1]), 5] = rng.choice([torch.nan, -torch.inf])
    else:
        hidden[0, 39] = rng.choice([torch.nan, torch.inf])
    both_are_one = padded == tokens and spoiled == "states"
    found = []
    for module, place in ((twin, "cpu"), (kernel, device)):
        step, rows, result = filled(entries, padded, tokens, place), words.clone().to(place), torch.zeros(padded, dtype=torch.int32)
        result = result.to(place)
        module.prepare(rows, LAYOUT, block_size, step)
        given = states.to(place)
        module.finish(rows, LAYOUT, step, ids.to(place), given, given if both_are_one else hidden.to(place), result)
        found.append((step, rows, result))
    (one, *ours), (other, *theirs) = found
    for name in ("token_ids", "cache_index", "positions", "slots", "context_len", "sample_index", "noise", "draw_positions", "tables"):
        assert torch.equal(getattr(one, name), getattr(other, name).cpu()), name
    assert torch.equal(one.temperature.view(torch.int32), other.temperature.cpu().view(torch.int32))
    for mine, its in zip(ours, theirs, strict=True):
        assert torch.equal(mine, its.cpu())
    bad = (ours[1] == -1).nonzero().flatten().tolist()
    first = one.first_output.tolist()
    assert bad in [list(range(*ends)) for ends in pairwise(first)] and (spoiled == "states" or bad[0] == 0)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_drafts_are_accepted_up_to_the_first_that_differs(count: int, device: str) -> None:
    for wrong in range(-1, count):
        rng, words = Random(count), random_words(Random(wrong))
        ids = torch.tensor([rng.randrange(VOCAB) for _ in range(12)], dtype=torch.int32)
        drafted = torch.tensor([[4, 1000, 3, count], [1, 7, 0, 0]], dtype=torch.int32)
        words[4, LAYOUT.tokens + 1000 :][:count] = ids[3 : 3 + count]
        if wrong >= 0:
            words[4, LAYOUT.tokens + 1000 + wrong] += 1
            words[4, LAYOUT.tokens + 1000 + wrong + 1 :][:1] = ids[3 + wrong + 1]  # equal again behind it
        found = []
        for module, place in ((twin, "cpu"), (kernel, device)):
            found.append(words.clone().to(place))
            module.accept(found[-1], LAYOUT, drafted.to(place), ids.to(place))
        assert torch.equal(found[0], found[1].cpu())
        accepted = count if wrong < 0 else wrong
        assert found[0][[4, 1], NUM_TOKENS].tolist() == [1000 + accepted + 1, 8]
        assert found[0][4, LAYOUT.tokens + 1000 :][: accepted + 1].tolist() == ids[3 : 3 + accepted + 1].tolist()


def test_runs_of_words_go_where_they_are_told_and_nowhere_else(device: str) -> None:
    source, target = torch.arange(5000, dtype=torch.int32), torch.full((9000,), -1, dtype=torch.int32)
    runs = torch.tensor([[0, 100, 1], [10, 4000, 2500], [3000, 0, 0], [4999, 8999, 1]])
    wanted = target.clone()
    twin.copy_words(source, wanted, runs, 2500)
    mine = target.clone().to(device)
    kernel.copy_words(source.to(device), mine, runs.to(device), 2500)
    assert torch.equal(mine.cpu(), wanted) and int((wanted != -1).sum()) == 2502
