"""`RequestTable`: what a plan changes arrives where it belongs, also where all rows together have more than 2^31 words."""

from array import array

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.messages import NoiseKey, RowFork, RowWrite, StepPlan
from octavo.sampling_params import SamplingParams
from octavo.step.step_tensors import HEAD, MOST_WORDS, NOISE, NOISE_WORDS, NUM_PROMPT, NUM_TOKENS, TEMPERATURE, RowLayout
from octavo.worker import request_table
from octavo.worker.request_table import RequestTable, Words

LARGEST = 2**31 - 1
NOISE_KEY = NoiseKey((2**32 - 1, 2**31), 2**31 + 5, 2**32 - 2)  # words of noise have no sign


def write(row: int, params: SamplingParams) -> RowWrite:
    return RowWrite(row, row, array("i", [1, LARGEST]), 1, 0, [[7, LARGEST]], params, (), [], NOISE_KEY, b"")


def test_the_largest_numbers_lie_in_a_row_as_they_are() -> None:
    rows = RequestTable(3, RowLayout(4, 8), torch.device("cpu"))
    params = SamplingParams(temperature=0.7)
    rows.apply(StepPlan(1, row_writes=[write(1, params)], new_blocks=[(1, 0, 2, LARGEST)]))
    rows.apply(StepPlan(2, row_forks=[RowFork(2, 1, 9, NoiseKey((1, 2), 3, 4))]))
    for row, noise in ((1, (2**32 - 1, 2**31, 2**31 + 5, 2**32 - 2)), (2, (1, 2, 3, 4))):
        assert rows.words[row, [NUM_TOKENS, NUM_PROMPT]].tolist() == [2, 1]
        assert rows.words[row, TEMPERATURE].view(torch.float32) == np.float32(0.7)
        assert rows.words[row, HEAD : HEAD + 4].tolist() == [7, LARGEST, LARGEST, 0] and rows.token_ids[row, :2].tolist() == [1, LARGEST]
        assert tuple(rows.words[row, NOISE : NOISE + NOISE_WORDS].numpy().view(np.uint32).tolist()) == noise
    assert not rows.words[0].any()


def test_places_beyond_2_31_words_are_told_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of 40 GB that nobody reserves: what a copy would be told is looked at."""
    told: list[list[list[int]]] = []

    def upload(words: Words, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(words.copy())

    def copy_words(source: torch.Tensor, target: torch.Tensor, runs: torch.Tensor, longest: int) -> None:
        assert runs.dtype == torch.int64 and longest == int(runs[:, 2].max())
        told.append(runs.tolist())

    monkeypatch.setattr(request_table, "upload", upload)
    monkeypatch.setattr(request_table, "copy_words", copy_words)
    layout = RowLayout(2**20, 2**24 - 2**20 - HEAD)
    width = layout.width
    rows = RequestTable(640, layout, torch.device("meta"))
    plan = StepPlan(1, row_forks=[RowFork(639, 300, 1, NOISE_KEY)], row_writes=[write(200, SamplingParams())])
    plan.new_blocks += [(127, 0, 5, 3), (128, 0, 0, 4)]
    rows.apply(plan)
    (fork,), (noise, head, tokens, table, *blocks) = told
    assert width == 2**24 and fork == [300 * width, 639 * width, width]
    words = 6 * 6  # of the runs themselves, two for each number
    assert noise == [words, 639 * width + NOISE, 4] and head == [words + 4, 200 * width, HEAD]
    assert tokens == [words + 4 + HEAD, 200 * width + layout.tokens, 2] and table[1:] == [200 * width + HEAD, 2]
    assert [place for _, place, _ in blocks] == [127 * width + HEAD + 5, 128 * width + HEAD] and 128 * width == 2**31


def test_a_row_that_no_copy_could_reach_the_end_of_is_refused() -> None:
    RowLayout(1, MOST_WORDS - HEAD - 1)
    with pytest.raises(ConfigError, match=r"max_model_len is too large: .* 67,107,841 words, at most 67,107,840"):
        RowLayout(1, MOST_WORDS - HEAD)


def write_of(params: SamplingParams, bad_words: list[list[int]] | None = None) -> RowWrite:
    return RowWrite(0, 0, array("i", [1]), 1, 0, [[]], params, (), bad_words or [], NOISE_KEY, b"")


@pytest.mark.parametrize(
    ("params", "bad_words", "temperature"),
    [
        (SamplingParams(temperature=0.5), [], 0.5),
        (SamplingParams(temperature=0.5, logprobs=3, seed=1), [], 0.5),
        (SamplingParams(temperature=0), [], 0),
        (SamplingParams(temperature=0.5, top_k=5), [], 0),
        (SamplingParams(temperature=0.5, min_p=0.1), [], 0),
        (SamplingParams(temperature=0.5, presence_penalty=1.0), [], 0),
        (SamplingParams(temperature=0.5, bad_words=["a"]), [[5]], 0),
        (SamplingParams(temperature=0.5, bad_words=["a"]), [], 0.5),  # its words came to nothing: nobody draws the row again
        (SamplingParams(temperature=0.5, structured_outputs={"regex": "a"}), [], 0),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_a_step_draws_only_rows_that_nobody_draws_again(params: SamplingParams, bad_words: list[list[int]], temperature: float) -> None:
    rows = RequestTable(1, RowLayout(4, 8), torch.device("cpu"))
    rows.apply(StepPlan(1, row_writes=[write_of(params, bad_words)]))
    assert rows.words[0, TEMPERATURE].view(torch.float32) == temperature
