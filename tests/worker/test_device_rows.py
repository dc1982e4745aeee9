"""`DeviceRows`: what the host sends arrives where it belongs, also where all rows together have more than 2^31 words."""

from array import array

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.kernels.row_words import HEAD, MOST_WORDS, NOISE, NUM_PROMPT, NUM_TOKENS, TOP_K, RowLayout
from octavo.messages import NoiseKey, RowFork, RowWrite, StepPlan
from octavo.sampling_params import SamplingParams
from octavo.worker import device_rows
from octavo.worker.device_rows import DeviceRows, Words

LARGEST = 2**31 - 1
NOISE_KEY = NoiseKey((2**32 - 1, 2**31), 2**31 + 5, 2**32 - 2)  # words of noise have no sign


def write(row: int, params: SamplingParams) -> RowWrite:
    return RowWrite(row, row, array("i", [1, LARGEST]), 1, 0, [[7, LARGEST]], params, (), [], NOISE_KEY, b"")


def test_the_largest_numbers_lie_in_a_row_as_they_are() -> None:
    rows = DeviceRows(3, RowLayout(4, 8), torch.device("cpu"))
    params = SamplingParams(top_k=LARGEST)
    rows.apply(StepPlan(1, row_writes=[write(1, params)], new_blocks=[(1, 0, 2, LARGEST)]))
    rows.apply(StepPlan(2, row_forks=[RowFork(2, 1, 9, NoiseKey((1, 2), 3, 4))]))
    for row, noise in ((1, (2**32 - 1, 2**31, 2**31 + 5, 2**32 - 2)), (2, (1, 2, 3, 4))):
        assert rows.words[row, [NUM_TOKENS, NUM_PROMPT, TOP_K]].tolist() == [2, 1, LARGEST]
        assert rows.tables[row].tolist() == [7, LARGEST, LARGEST, 0] and rows.token_ids[row, :2].tolist() == [1, LARGEST]
        assert tuple(rows.noise[row].numpy().view(np.uint32).tolist()) == noise
    assert not rows.words[0].any()


def test_places_beyond_2_31_words_are_told_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of 40 GB that nobody reserves: what a copy would be told is looked at."""
    told: list[list[list[int]]] = []

    def upload(words: Words, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(words.copy())

    def copy_words(source: torch.Tensor, target: torch.Tensor, runs: torch.Tensor, longest: int) -> None:
        assert runs.dtype == torch.int64 and longest == int(runs[:, 2].max())
        told.append(runs.tolist())

    monkeypatch.setattr(device_rows, "upload", upload)
    monkeypatch.setattr(device_rows, "copy_words", copy_words)
    layout = RowLayout(2**20, 2**24 - 2**20 - HEAD)
    width = layout.width
    rows = DeviceRows(640, layout, torch.device("meta"))
    plan = StepPlan(1, row_forks=[RowFork(639, 300, 1, NOISE_KEY)], row_writes=[write(200, SamplingParams())])
    plan.new_blocks += [(127, 0, 5, 3), (128, 0, 0, 4)]
    rows.apply(plan)
    (fork,), (noise, head, tokens, *blocks) = told
    assert width == 2**24 and fork == [300 * width, 639 * width, width]
    words = 6 * 5  # of the runs themselves, two for each number
    assert noise == [words, 639 * width + NOISE, 4] and head == [words + 4, 200 * width, HEAD + 2]
    assert tokens == [words + 4 + HEAD + 2, 200 * width + layout.tokens, 2]
    assert [place for _, place, _ in blocks] == [127 * width + HEAD + 5, 128 * width + HEAD] and 128 * width == 2**31


def test_a_row_that_no_copy_could_reach_the_end_of_is_refused() -> None:
    RowLayout(1, MOST_WORDS - HEAD - 1)
    with pytest.raises(ConfigError, match=r"max_model_len is too large .* 67,107,841 words, at most 67,107,840"):
        RowLayout(1, MOST_WORDS - HEAD)
