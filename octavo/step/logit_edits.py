"""The logit edits of a request: allowed ids, bans, bias, penalties.

They are packed into one int32 array when the request's row is written. GPU kernels read the array; their torch reference reads
`LogitEdits`, which is unpacked from it once.

    head, HEAD words | allowed ids | bias ids | biases, as bits | end ids | starts of the words, one more than words | ids of the words

Penalties are in the head as the bits of floats. This module defines the layout for kernels and host.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.sampling_params import SamplingParams

NUM_ALLOWED, NUM_BIAS, NUM_ENDS, NUM_WORDS, LONGEST, MIN_TOKENS, REPETITION, FREQUENCY, PRESENCE = range(9)
HEAD = 16


def pack(params: SamplingParams, end_ids: tuple[int, ...], bad_words: list[list[int]]) -> NDArray[np.int32]:
    """Returns the packed array of one request. `bad_words`: those of the parameters, as ids"""
    allowed, bias = params.allowed_token_ids or (), params.logit_bias or {}
    head = np.zeros(HEAD, np.int32)
    head[:REPETITION] = len(allowed), len(bias), len(end_ids), len(bad_words), max(map(len, bad_words), default=0), params.min_tokens
    head[REPETITION : PRESENCE + 1].view(np.float32)[:] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    starts = np.cumsum([0, *map(len, bad_words)])
    ids = [token for word in bad_words for token in word]
    biases = np.array(list(bias.values()), np.float32).view(np.int32)
    parts = head, allowed, list(bias), biases, end_ids, starts, ids
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


@dataclass(frozen=True, slots=True)
class LogitEdits:
    allowed: frozenset[int]  # empty: every id is allowed
    allowed_ids: Tensor  # [allowed] int64
    bias_ids: Tensor  # [biases] int64
    biases: Tensor  # [biases] float32
    end_ids: frozenset[int]  # banned before min_tokens
    single_words: frozenset[int]  # bad words of one id
    longer_words: dict[int, list[list[int]]]  # the others, by their last id but one
    longest_word: int
    min_tokens: int
    repetition: float
    frequency: float
    presence: float


def unpack(words: NDArray[np.int32]) -> LogitEdits:
    head = words[:HEAD]
    num_allowed, num_bias, num_ends, num_words = head[: NUM_WORDS + 1].tolist()
    ends = np.cumsum([num_allowed, num_bias, num_bias, num_ends, num_words + 1])
    allowed, bias_ids, biases, end_ids, starts, ids = np.split(words[HEAD:], ends)
    bad_words = [ids[start:end].tolist() for start, end in pairwise(starts)]
    longer: dict[int, list[list[int]]] = {}
    for word in bad_words:
        if len(word) > 1:
            longer.setdefault(word[-2], []).append(word)
    repetition, frequency, presence = head[REPETITION : PRESENCE + 1].view(np.float32).tolist()
    return LogitEdits(
        allowed=frozenset(allowed.tolist()),
        allowed_ids=torch.from_numpy(allowed.astype(np.int64)),
        bias_ids=torch.from_numpy(bias_ids.astype(np.int64)),
        biases=torch.from_numpy(biases.view(np.float32).copy()),
        end_ids=frozenset(end_ids.tolist()),
        single_words=frozenset(word[0] for word in bad_words if len(word) == 1),
        longer_words=longer,
        longest_word=int(head[LONGEST]),
        min_tokens=int(head[MIN_TOKENS]),
        repetition=repetition,
        frequency=frequency,
        presence=presence,
    )
