"""`RequestTable`: what the worker knows of each running sequence, in stable rows on the device.

    row   token_ids                 num_tokens   table            sampling
     0    [ 12  7 99  4 .. ]             4       [ 5  9  0 .. ]   temperature, top_p, noise key, ...
     1    [ 12  7 31 .. ]                3       [ 5  2  0 .. ]

A step sends only what changed: rows written at admission, rows forked, blocks appended. A sampled id goes straight into
its row, so the next step can be planned and launched before the host has seen it. A freed row needs no message: whoever
gets it next overwrites it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.messages import NoiseKey, RowFork, RowWrite, StepPlan
from octavo.policy.block_pool import NULL_BLOCK
from octavo.sampling_params import SamplingParams

# columns of `values`, the float parameters a batch of rows is drawn with
TEMPERATURE, TOP_P, MIN_P = range(3)


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What a request asks to be done to its logits, as tensors: made once when its row is written, and read in every step."""

    allowed: frozenset[int]  # empty: every id is
    allowed_ids: Tensor  # [allowed]
    bias_ids: Tensor  # [biases]
    biases: Tensor  # [biases]
    single_words: frozenset[int]  # bad words of one id
    longer_words: dict[int, list[list[int]]]  # the others, by their last id but one
    longest_word: int

    @classmethod
    def of(cls, params: SamplingParams, bad_words: list[list[int]]) -> "LogitEdits":
        allowed, bias = params.allowed_token_ids or (), params.logit_bias or {}
        longer: dict[int, list[list[int]]] = {}
        for word in bad_words:
            if len(word) > 1:
                longer.setdefault(word[-2], []).append(word)
        return cls(
            allowed=frozenset(allowed),
            allowed_ids=torch.tensor(allowed, dtype=torch.int64),
            bias_ids=torch.tensor(list(bias), dtype=torch.int64),
            biases=torch.tensor(list(bias.values()), dtype=torch.float32),
            single_words=frozenset(word[0] for word in bad_words if len(word) == 1),
            longer_words=longer,
            longest_word=max(map(len, bad_words), default=0),
        )


NO_EDITS = LogitEdits.of(SamplingParams(), [])


class RequestTable:
    def __init__(self, num_rows: int, max_len: int, max_blocks: int) -> None:
        self.token_ids = torch.zeros(num_rows, max_len, dtype=torch.int64)  # [rows, positions]
        self.num_tokens = torch.zeros(num_rows, dtype=torch.int64)
        self.num_prompt = torch.zeros(num_rows, dtype=torch.int64)
        self.tables = torch.zeros(num_rows, max_blocks, dtype=torch.int64)  # [rows, blocks], null block past the end
        self.values = torch.zeros(num_rows, 3)
        self.top_k = torch.zeros(num_rows, dtype=torch.int64)
        self.noise = torch.zeros(num_rows, 4, dtype=torch.int64)  # key, key, stream, high
        self.params: list[SamplingParams] = [SamplingParams()] * num_rows
        self.end_ids: list[tuple[int, ...]] = [()] * num_rows
        self.edits: list[LogitEdits] = [NO_EDITS] * num_rows

    def apply(self, plan: StepPlan) -> None:
        """Everything a plan changes in the rows, in the order it was decided."""
        for fork in plan.row_forks:
            self._fork(fork)
        for write in plan.row_writes:
            self._write(write)
        if plan.new_blocks:
            rows, groups, index, blocks = torch.tensor(plan.new_blocks).unbind(1)
            assert not groups.any(), "these rows have one table each"
            self.tables[rows, index] = blocks

    def append(self, rows: Tensor, ids: Tensor) -> None:
        """Sampled ids join their rows. rows and ids: [S]. In numpy, which is quicker at small arrays."""
        places, lengths = rows.numpy(), self.num_tokens.numpy()
        ends = lengths[places]
        self.token_ids.numpy()[places, ends] = ids.numpy()
        lengths[places] = ends + 1

    def _write(self, write: RowWrite) -> None:
        row, count = write.row, len(write.token_ids)
        self.token_ids[row, :count] = torch.tensor(write.token_ids, dtype=torch.int64)
        self.num_tokens[row] = count
        self.num_prompt[row] = write.num_prompt
        self.tables[row] = NULL_BLOCK
        (table,) = write.tables
        self.tables[row, : len(table)] = torch.tensor(table, dtype=torch.int64)
        self.end_ids[row] = write.end_ids
        named = write.bad_words or write.params.allowed_token_ids or write.params.logit_bias
        self.edits[row] = LogitEdits.of(write.params, write.bad_words) if named else NO_EDITS
        self._write_params(row, write.params, write.noise)

    def _write_params(self, row: int, params: SamplingParams, noise: NoiseKey) -> None:
        self.params[row] = params
        self.values[row] = torch.tensor([params.temperature, params.top_p, params.min_p])
        self.top_k[row] = max(params.top_k, 0)
        self.noise[row] = torch.tensor([*noise.key, noise.stream, noise.high])

    def _fork(self, fork: RowFork) -> None:
        for tensor in (self.token_ids, self.num_tokens, self.num_prompt, self.tables):
            tensor[fork.row] = tensor[fork.source]
        self.end_ids[fork.row], self.edits[fork.row] = self.end_ids[fork.source], self.edits[fork.source]
        self._write_params(fork.row, self.params[fork.source], fork.noise)
