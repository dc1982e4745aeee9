"""The packed int32 fields of a request's row: all data that a step needs of a sequence.

    | 8 words: lengths, temperature, noise, offset | block tables, max_blocks words for each cache group | token ids, max_len words |

A row is copied, written and read as int32; floats are stored as their bits. This module defines the layout for kernels and host.

Lengths, ids and blocks are below 2^31: a row has at most MOST_WORDS fields, and settings, vocabulary and pool are checked when they
are read. The noise words are unsigned, and use all 32 bits. The offset of a row in the table may exceed 2^31, and is an int64.
"""

from dataclasses import dataclass

from octavo import layout
from octavo.errors import ConfigError

NUM_TOKENS, NUM_PROMPT, TEMPERATURE, NOISE = range(4)
NOISE_WORDS = layout.NOISE_WORDS
OFFSET = NOISE + NOISE_WORDS  # the position of a token is its index in the row plus this
HEAD = layout.ROW_HEAD  # start of the first block table
MOST_WORDS = 65_535 * 1024  # of a row: a run is copied by programs in the second dimension of a grid, which is limited


@dataclass(frozen=True, slots=True)
class RowLayout:
    max_blocks: int  # of one table
    max_len: int
    links: tuple[int, ...] = (1,)  # per cache group: a block of its table has this many times `block_size` tokens

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
        """Returns the start of the block table of a group."""
        return HEAD + group * self.max_blocks

    @property
    def tokens(self) -> int:
        """The start of the token ids."""
        return self.table(self.groups)

    @property
    def width(self) -> int:
        return self.tokens + self.max_len
