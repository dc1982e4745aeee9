"""Sizes that kernels define and memory plans count: of packed weights, of the fields of rows and steps, of what is computed at once.

They are here because the plans (`policy/`) import neither kernels nor torch. Words are int32.
"""

# packed weights of the native library (`native/octavo.h`)
PANEL = 16  # rows of a panel
K_PAD = 64  # columns are padded to a multiple of it

# quantised weights on a GPU (`kernels/device_codes.py`)
WORD_BITS = 16
MAX_SPAN = 32  # columns that are interleaved
SLAB = 1 << 24  # weights that are dequantised at once, for steps of many tokens

# words of a row, before its block tables (`step/step_tensors.py`)
ROW_HEAD = 8
NOISE_WORDS = 4  # key, key, stream, high

# words of a step (`step/step_tensors.py`)
ENTRY_WORDS = 9 + NOISE_WORDS  # of a scheduled row: an index of two words, seven fields of one, the noise key
LENGTH_WORDS = 1  # of a scheduled row, for each cache group, besides its block table
TOKEN_WORDS = 4  # an id of two words, its index in the cache, its position
SLOT_WORDS = 2  # of a token, for each cache group

# words of the work items and of the shared-prefix groups of decode attention (`step/share_words.py`, `step/team_words.py`)
SHARE_LINE = 16
TEAM_ENTRY, TEAM_LINE = 2, 128  # of a scheduled row, and of a group: there are at most as many groups as rows
TEAM_LEVELS = 8  # results of groups, per row

INVARIANT_PIECE = 256  # keys with a softmax of their own in the attention of `--deterministic`

SCORES = 1 << 20  # that the reference kernels compute at once, where they materialise scores
