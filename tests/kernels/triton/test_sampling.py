"""Sampling on the device: the noise of the reference bit for bit, and the id it leads to."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.reference import philox
from octavo.kernels.reference import sampling as plain
from octavo.kernels.triton.sampling.sample import TILE, sample, uniform

ROWS, VOCAB = 6, 2 * TILE + 7  # a last block that is nearly empty, and a last quad that is not whole


@triton.jit
def write_uniform(noise, positions, out, TILE: tl.constexpr):
    row = tl.program_id(0)
    numbers = uniform(noise + row * 4, tl.load(positions + row).to(tl.uint32), 0, TILE)
    tl.store(out + row * TILE + tl.arange(0, TILE), numbers)


def draws(device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    noise = torch.randint(0, 2**32, (ROWS, 4), generator=generator)
    noise[0], noise[1] = 0, 2**32 - 1
    return noise.to(device), torch.tensor([0, 2**20, 1, 7, 2**31 + 5, 9], device=device)


def test_uniform_numbers_are_those_of_the_reference_bit_for_bit(device: str) -> None:
    noise, positions = draws(device)
    got = torch.empty(ROWS, 64, device=device)
    write_uniform[(ROWS,)](noise, positions, got, TILE=64)
    assert torch.equal(got, philox.uniform(noise, positions, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["float32", "float16", "bfloat16"])
def test_ids_are_those_of_the_twin(dtype: torch.dtype, device: str) -> None:
    noise, positions = draws(device)
    logits = (torch.randn(ROWS, VOCAB + 9, generator=torch.Generator().manual_seed(3)) * 4).to(device, dtype)[:, :VOCAB]
    logits[4, 100:600], logits[4, 700] = 49.75, 50  # noise would choose among the many, at any but the coldest
    logits[5, -1] = 90  # the very last token
    temperature = torch.tensor([0, 1, 0.3, 5, 1e-42, 1], device=device)  # one is below the smallest normal number
    assert sample(logits, temperature, noise, positions).tolist() == plain.sample(logits, temperature, noise, positions).tolist()


def test_equal_logits_go_to_the_lower_id_within_a_block_and_between_blocks(device: str) -> None:
    noise, positions = draws(device)
    logits = torch.zeros(ROWS, VOCAB, device=device)
    for row, ids in enumerate([(5, 6), (40, TILE + 1), (TILE, 2 * TILE), (0, VOCAB - 1), (TILE - 1, TILE), (3, 1000)]):
        logits[row, list(ids)] = 2
    assert sample(logits, torch.zeros(ROWS, device=device), noise, positions).tolist() == [5, 40, TILE, 0, TILE - 1, 3]


@pytest.mark.parametrize("bad", [torch.nan, *(pytest.param(bad, marks=pytest.mark.soak) for bad in (-torch.inf, torch.inf))])
def test_a_row_that_is_not_finite_yields_a_valid_id_and_disturbs_no_other(bad: float, device: str) -> None:
    noise, positions = draws(device)
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(4)).to(device)
    temperature = torch.tensor([0.0, 1, 1, 0, 1, 0], device=device)
    before = sample(logits, temperature, noise, positions)
    logits[:2] = bad
    after = sample(logits, temperature, noise, positions)
    assert (0 <= after).all() and (after < VOCAB).all()
    assert torch.equal(after[2:], before[2:])
