"""The words of a request's row on the device: everything a step has to know of a sequence is one line of int32.

    | 16 words: lengths, sampling, noise key | block table, max_blocks words | token ids, max_len words |

A line is copied, written and read as words; floats lie in it as their bits. What kernels and host agree on stands here.
"""

from dataclasses import dataclass

NUM_TOKENS, NUM_PROMPT, TEMPERATURE, TOP_K, TOP_P, MIN_P, NOISE = range(7)
NOISE_WORDS = 4  # key, key, stream, high
HEAD = 16  # where the block table begins


@dataclass(frozen=True, slots=True)
class RowLayout:
    max_blocks: int
    max_len: int

    @property
    def tokens(self) -> int:
        """Where the token ids begin."""
        return HEAD + self.max_blocks

    @property
    def width(self) -> int:
        return self.tokens + self.max_len
