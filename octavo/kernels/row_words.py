"""The words of a request's row: everything a step has to know of a sequence is one line of int32.

    | 8 words: lengths, temperature, noise key | block tables, max_blocks words for each cache group | token ids, max_len words |

A line is copied, written and read as words; floats lie in it as their bits. What kernels and host agree on stands here.

Lengths, ids and blocks are below 2^31: a line has no more than MOST_WORDS words, and settings, vocabulary and pool are checked where they
are read. The words of noise have no sign, and use all 32 bits. Where a line lies among all lines may be beyond 2^31, and is an int64.
"""

from dataclasses import dataclass

from octavo.errors import ConfigError

NUM_TOKENS, NUM_PROMPT, TEMPERATURE, NOISE = range(4)
NOISE_WORDS = 4  # key, key, stream, high
HEAD = 8  # where the first block table begins
MOST_WORDS = 65_535 * 1024  # of a line: a run of words is copied by programs that stand in the second dimension of a grid


@dataclass(frozen=True, slots=True)
class RowLayout:
    max_blocks: int  # of one table
    max_len: int
    links: tuple[int, ...] = (1,)  # of each cache group: a block of its table has this many times `block_size` tokens

    def __post_init__(self) -> None:
        if self.width > MOST_WORDS:
            raise ConfigError(
                f"max_model_len is too large: a row of {self.max_len:,} tokens in {self.max_blocks:,} blocks takes "
                f"{self.width:,} words, at most {MOST_WORDS:,}"
            )

    @property
    def groups(self) -> int:
        return len(self.links)

    def table(self, group: int) -> int:
        """Where the block table of a group begins."""
        return HEAD + group * self.max_blocks

    @property
    def tokens(self) -> int:
        """Where the token ids begin."""
        return self.table(self.groups)

    @property
    def width(self) -> int:
        return self.tokens + self.max_len
