"""Philox against its published answers and against itself in plain Python."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.reference import philox
from octavo.kernels.reference.philox import _open_unit, philox4x32, uniform, uniform_at

LOW32 = 0xFFFFFFFF
word32 = st.integers(0, LOW32)


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    c, (k0, k1) = counter, key
    for _ in range(10):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(right >> 32) ^ c[1] ^ k0, right & LOW32, (left >> 32) ^ c[3] ^ k1, left & LOW32]
        k0, k1 = (k0 + 0x9E3779B9) & LOW32, (k1 + 0xBB67AE85) & LOW32
    return c


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [  # the known-answer vectors of Random123
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([LOW32] * 4, [LOW32] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    c0, c1, c2, c3 = torch.tensor(counter)
    k0, k1 = torch.tensor(key)
    assert [int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))] == answer
    assert scalar_philox(counter, key) == answer


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(word32, word32, word32, word32, st.integers(0, 2**20)), min_size=1, max_size=12),
    vocab=st.integers(1, 40),
    data=st.data(),
)
def test_each_token_gets_its_lane_of_its_own_counter(rows: list[tuple[int, ...]], vocab: int, data: st.DataObject) -> None:
    noise, positions = torch.tensor([row[:4] for row in rows]), torch.tensor([row[4] for row in rows])
    want = [
        [((scalar_philox([t // 4, pos, stream, high], [key0, key1])[t % 4] >> 9) + 0.5) / 2**23 for t in range(vocab)]
        for key0, key1, stream, high, pos in rows
    ]
    with patch.object(philox, "COUNTERS_AT_ONCE", 24):  # several rounds of rows
        full = uniform(noise, positions, vocab)
    assert full.tolist() == want

    width = data.draw(st.integers(1, 9))
    tokens = torch.tensor([data.draw(st.lists(st.integers(0, vocab - 1), min_size=width, max_size=width)) for _ in rows])
    assert torch.equal(uniform_at(noise, positions, tokens), full.gather(1, tokens))


def test_numbers_are_even_over_the_open_unit_interval() -> None:
    ends = _open_unit(torch.tensor([0.0, 2.0**23 - 1]))
    assert ends[0] > 0 and ends[1] < 1
    numbers = uniform(torch.tensor([[2024, 7, 0, 0]] * 4), torch.arange(4), 25_000)
    counts = torch.histc(numbers, bins=64, min=0, max=1)
    expected = numbers.numel() / 64
    assert ((counts - expected) ** 2 / expected).sum() < 122.9  # chi-square of 63 degrees: one fair run in 10,000 is above
