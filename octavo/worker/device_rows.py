"""`DeviceRows`: what the device knows of each running sequence, a line of words a row (`kernels/row_words.py`).

A step sends only what changed, in one upload: runs of words and where they go. Forks are copies inside the device. A sampled id is
appended there, so the next step can be planned and launched before the host has seen it. A freed row needs no message: whoever
gets it next overwrites it; what lies past a row's blocks and ids is never read.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels.ops import copy_words
from octavo.kernels.row_words import HEAD, MIN_P, NOISE, NOISE_WORDS, NUM_PROMPT, NUM_TOKENS, TEMPERATURE, TOP_K, TOP_P, RowLayout
from octavo.messages import NoiseKey, RowFork, RowWrite, StepPlan

Words = NDArray[np.int32]


class DeviceRows:
    def __init__(self, num_rows: int, layout: RowLayout, device: torch.device) -> None:
        self.layout = layout
        self.words = torch.zeros(num_rows, layout.width, dtype=torch.int32, device=device)  # [rows, width]; the rest are views
        floats = self.words.view(torch.float32)
        self.num_tokens, self.num_prompt = self.words[:, NUM_TOKENS], self.words[:, NUM_PROMPT]
        self.temperature, self.top_p, self.min_p = floats[:, TEMPERATURE], floats[:, TOP_P], floats[:, MIN_P]
        self.top_k = self.words[:, TOP_K]
        self.noise = self.words[:, NOISE : NOISE + NOISE_WORDS]  # [rows, 4]
        self.tables = self.words[:, HEAD : layout.tokens]  # [rows, max_blocks]
        self.token_ids = self.words[:, layout.tokens :]  # [rows, max_len]

    def apply(self, plan: StepPlan) -> None:
        """Everything a plan changes in the rows, in the order it was decided."""
        if plan.row_forks:
            self._copy_lines(plan.row_forks)
        runs: list[tuple[int, Words]] = []  # where they go, and what
        for fork in plan.row_forks:
            runs.append((self._at(fork.row, NOISE), _noise(fork.noise)))
        for write in plan.row_writes:
            (table,) = write.tables
            runs.append((self._at(write.row, 0), np.concatenate([_head(write), np.array(table, np.int32)])))
            runs.append((self._at(write.row, self.layout.tokens), np.array(write.token_ids, np.int32)))
        if plan.new_blocks:
            rows, groups, index, blocks = np.array(plan.new_blocks).T
            assert not groups.any(), "these rows have one table each"
            runs.extend(zip((rows * self.layout.width + HEAD + index).tolist(), blocks.astype(np.int32)[:, None], strict=True))
        if runs:
            self._write(runs)

    def _at(self, row: int, word: int) -> int:
        return row * self.layout.width + word

    def _copy_lines(self, forks: list[RowFork]) -> None:
        width = self.layout.width
        runs = np.array([(fork.source * width, fork.row * width, width) for fork in forks], np.int64)  # [N, 3]
        flat = self.words.view(-1)
        copy_words(flat, flat, _runs(upload(runs.ravel().view(np.int32), self.words.device)), width)

    def _write(self, runs: list[tuple[int, Words]]) -> None:
        counts = np.array([len(words) for _, words in runs])
        starts = 6 * len(runs) + counts.cumsum() - counts
        places = np.array([place for place, _ in runs], np.int64)
        table = np.stack([starts, places, counts], axis=1).ravel().view(np.int32)  # [N, 3] of two words each
        sent = upload(np.concatenate([table, *(words for _, words in runs)]), self.words.device)
        copy_words(sent, self.words.view(-1), _runs(sent[: table.size]), int(counts.max()))


def _runs(words: Tensor) -> Tensor:
    """Runs of `copy_words`, [N, 3] int64: all rows together may have more than 2^31 words."""
    return words.view(torch.int64).view(-1, 3)


def upload(words: Words, device: torch.device) -> Tensor:
    """To the device, without waiting for it."""
    sent = torch.empty(words.shape, dtype=torch.int32, device=device)
    send(words, sent)
    return sent


def send(words: Words, target: Tensor) -> None:
    """To the beginning of a tensor. The copy to a device reads pinned memory, which is kept until it is done."""
    host = torch.from_numpy(words)
    target[: len(host)].copy_(host.pin_memory() if target.is_cuda else host, non_blocking=True)


def _head(write: RowWrite) -> Words:
    head, params = np.zeros(HEAD, np.int32), write.params
    floats = head.view(np.float32)
    head[NUM_TOKENS], head[NUM_PROMPT], head[TOP_K] = len(write.token_ids), write.num_prompt, max(params.top_k, 0)
    floats[TEMPERATURE], floats[TOP_P], floats[MIN_P] = 0 if params.greedy else params.temperature, params.top_p, params.min_p
    head[NOISE : NOISE + NOISE_WORDS] = _noise(write.noise)
    return head


def _noise(noise: NoiseKey) -> Words:
    return np.array([*noise.key, noise.stream, noise.high], np.uint32).view(np.int32)
