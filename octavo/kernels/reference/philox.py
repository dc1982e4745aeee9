"""Philox4x32-10: random numbers that are a pure function of their position.

    key      (key0, key1)                            the stream: the seed and the sample
    counter  (token // 4, position, stream, high)    the index in it
    output   four 32-bit words, one for each token of its quad: lane = token % 4

Nothing is generated in sequence, so noise for one token of one row can be computed alone, and no row can affect another.
Words are stored in int64 tensors: a 32 x 32 bit product fits (it may wrap to a negative number, its bits are right). Counter
parts that are equal along a row stay [S, 1] and broadcast, which saves most of the first two rounds.
"""

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
LOW32 = 0xFFFFFFFF
LANES = 4
COUNTERS_AT_ONCE = 100_000  # few enough that their words stay in the cache through the rounds

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Returns the four words of each counter under its key. All are 32-bit words in int64, of shapes that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        left, right = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        # c1 and c3 may have garbage above bit 31: only their low halves are used, and one mask clears the operands of the next products
        c0, c1 = ((right >> 32) ^ (c1 ^ k0)).bitwise_and_(LOW32), right
        c2, c3 = ((left >> 32) ^ (c3 ^ k1)).bitwise_and_(LOW32), left
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW32, (k1 + KEY_STEPS[1]) & LOW32
    return c0, c1 & LOW32, c2, c3 & LOW32


def uniform(noise: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Returns noise for every token of the vocabulary, strictly inside (0, 1), [S, vocab] float32.

    noise: [S, 4] (key0, key1, stream, high); positions: [S]
    """
    quads = torch.arange((vocab + LANES - 1) // LANES, device=noise.device).unsqueeze(0)  # [1, quads]
    out = torch.empty(len(noise), quads.shape[1], LANES, device=noise.device)  # [S, quads, lanes]
    rows_at_once = max(COUNTERS_AT_ONCE // quads.shape[1], 1)
    for start in range(0, len(noise), rows_at_once):
        some = slice(start, start + rows_at_once)
        for lane, word in enumerate(_words(noise[some], positions[some], quads)):
            out[some, :, lane] = word >> 9
    return _open_unit(out).flatten(1)[:, :vocab]


def uniform_at(noise: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Returns the same numbers for selected tokens only, [S, K] float32. tokens: [S, K]"""
    words = torch.stack(_words(noise, positions, tokens // LANES), dim=-1)  # [S, K, lanes]
    word = words.gather(-1, (tokens % LANES).unsqueeze(-1)).squeeze(-1)
    return _open_unit((word >> 9).to(torch.float32))


def _words(noise: Tensor, positions: Tensor, quads: Tensor) -> Words:
    key0, key1, stream, high = noise.unsqueeze(-1).unbind(1)  # each [S, 1]
    return philox4x32((quads, positions.unsqueeze(-1), stream, high), (key0, key1))


def _open_unit(high23: Tensor) -> Tensor:
    # 23 bits and a half fit a float32 exactly, so rounding cannot produce 0 or 1
    return high23.add_(0.5).mul_(2.0**-23)
