"""`ForwardBatch`: one step as tensors. It is a model's only input, and it is an argument, never a global.

    plan entries    row 3: 1 token        row 0: 5 tokens           T = 6 tokens, R = 2 rows
    token_ids       [ 911 |  17  4  88 23  9 ]                      [T]
    cache_index     [  40 |   0  1   2  3  4 ]   in its row         [T]
    positions       [  40 |   0  1   2  3  4 ]   in the text        [axes, T]
    query_start     [   0     1                6 ]                  [R+1]
    context_len     [  41     5 ]   keys a row may read             [R]
    slots           block * block_size + offset of each token       [T]

An index and a position differ where a row has an offset. Only the encoding of positions reads the latter, by `rope_positions`; keys are
compared by their index.

With several cache groups there is a batch for each of them, with its own lengths, tables, slots and block size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from octavo.step.shared_keys import NOTHING, SharedKeys
from octavo.step.step_tensors import StepStates
from octavo.step.team_words import Teams

Cache = dict[str, Tensor]  # the buffers of one layer: only a mixer knows their names


@dataclass(slots=True)
class ForwardBatch:
    token_ids: Tensor  # [T] int64
    cache_index: Tensor  # [T] int32
    positions: Tensor  # [axes, T] int32
    rows: Tensor  # [R] int64, row of the request table
    query_start: Tensor  # [R+1] int64
    context_len: Tensor  # [R] int64, positions in the cache of this group after this step has written its own
    tables: Tensor  # [R, B] int64, block tables, padded with the null block 0, which is also behind a freed window
    slots: Tensor  # [T] int64, the cache slot of each token
    sample_index: Tensor  # [S] int64, tokens whose logits are needed
    caches: list[Cache]  # per layer, [num_blocks, block_size, *shape] each
    block_size: int  # tokens in a block of this cache group
    max_query: int = 0  # an upper bound that the host knows, for kernels that must not synchronise
    attention: Any = field(default=None)  # the result of the backend's `prepare` for this step
    stream: Tensor | None = None  # [T, hidden], of the previous stage; None: the tokens are embedded
    shared: SharedKeys = NOTHING  # keys shared by rows with one query; backends without support read them row by row
    teams: Teams | None = None  # the same on a device
    states: StepStates | None = None  # the state slots of each row, for recurrent layers
    by_layer: Sequence["ForwardBatch"] = ()  # with several cache groups: the batch of each layer's group

    @property
    def rope_positions(self) -> Tensor:
        """[T]: the position that each token is rotated by, for a mixer whose positions have one axis."""
        assert len(self.positions) == 1
        return self.positions[0]

    def of_layer(self, layer: int) -> "ForwardBatch":
        return self.by_layer[layer] if self.by_layer else self
