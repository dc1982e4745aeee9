"""What a request asks to be done to its logits, packed into one line of int32 for the device, once when its row is written.

    head, HEAD words | allowed ids | bias ids | biases, as bits | end ids | starts of the words, one more than words | ids of the words

Penalties lie in the head as bits of floats. What kernels and host agree on stands here.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from octavo.sampling_params import SamplingParams

NUM_ALLOWED, NUM_BIAS, NUM_ENDS, NUM_WORDS, LONGEST, MIN_TOKENS, REPETITION, FREQUENCY, PRESENCE = range(9)
HEAD = 16


@dataclass(frozen=True, slots=True)
class Ask:
    allowed: list[int]  # empty: every id is
    bias: dict[int, float]
    end_ids: list[int]  # not before min_tokens
    bad_words: list[list[int]]
    min_tokens: int
    repetition: float
    frequency: float
    presence: float


def pack(params: SamplingParams, end_ids: tuple[int, ...], bad_words: list[list[int]]) -> NDArray[np.int32] | None:
    """None where nothing is asked for."""
    penalised = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
    if not (penalised or params.min_tokens or params.logit_bias or params.allowed_token_ids or bad_words):
        return None
    allowed, bias = params.allowed_token_ids or (), params.logit_bias or {}
    head = np.zeros(HEAD, np.int32)
    head[: REPETITION] = len(allowed), len(bias), len(end_ids), len(bad_words), max(map(len, bad_words), default=0), params.min_tokens
    head[REPETITION : PRESENCE + 1].view(np.float32)[:] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    starts = np.cumsum([0, *map(len, bad_words)])
    ids = [token for word in bad_words for token in word]
    biases = np.array(list(bias.values()), np.float32).view(np.int32)
    parts = head, allowed, list(bias), biases, end_ids, starts, ids
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


def unpack(words: NDArray[np.int32]) -> Ask:
    head = words[:HEAD]
    num_allowed, num_bias, num_ends, num_words = head[: NUM_WORDS + 1].tolist()
    ends = np.cumsum([num_allowed, num_bias, num_bias, num_ends, num_words + 1])
    allowed, bias_ids, biases, end_ids, starts, ids = np.split(words[HEAD:], ends)
    penalties = head[REPETITION : PRESENCE + 1].view(np.float32).tolist()
    return Ask(
        allowed=allowed.tolist(),
        bias=dict(zip(bias_ids.tolist(), biases.view(np.float32).tolist(), strict=True)),
        end_ids=end_ids.tolist(),
        bad_words=[ids[start:end].tolist() for start, end in pairwise(starts)],
        min_tokens=int(head[MIN_TOKENS]),
        repetition=penalties[0],
        frequency=penalties[1],
        presence=penalties[2],
    )
