"""llguidance in the few words the engine needs; the one module that imports it.

    guide(tokenizer, ...) -> Guide      the vocabulary as bytes, made once: some 0.4 s for 50,000 tokens
    Guide.compile(text)   -> Matcher    refuses what has no meaning, or allows no text at all
    Matcher               copy   advance(tokens)   ended   failed   accepting          one for each sample
    Guide.fill(matchers, masks)         a bit for each id that may come next, least significant first

A matcher never fails open: where it is in error, or allows nothing, it says so, and never that the text may end.
"""

import os
from collections.abc import Callable, Collection, Sequence

import llguidance
import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.structured_outputs import PARAM
from octavo.text.tokenizer import Tokenizer

MOST_THREADS = 8  # that fill masks
MOST_LEXER_STATES = 50_000  # of a grammar, each some 1.5 kB
MOST_LETTERS = 300  # of a complaint


class Matcher:
    """Where one sample stands in its grammar."""

    __slots__ = ("_inner",)

    def __init__(self, inner: llguidance.LLMatcher) -> None:
        self._inner = inner

    def copy(self) -> "Matcher":
        return Matcher(self._inner.deep_copy())

    def advance(self, tokens: Sequence[int]) -> None:
        """The sample has said this; `failed` afterwards where the grammar does not allow it."""
        self._inner.consume_tokens(list(tokens))

    @property
    def failed(self) -> str:
        """Why it can go no further; empty where it can, or where it has ended."""
        return _first_line(self._inner.get_error() or "it went wrong") if self._inner.is_error() else ""

    @property
    def ended(self) -> bool:
        """The text is complete, and nothing may follow."""
        return self._inner.is_stopped() and not self._inner.is_error()

    @property
    def accepting(self) -> bool:
        """The text may end here."""
        return self._inner.is_accepting()


class Guide:
    def __init__(self, tokens: list[bytes], special_ids: Collection[int], end_ids: Collection[int], encode: Callable[[bytes], list[int]]):
        """`encode`: spells text in tokens. A vocabulary without an end gets one behind its last id, which no mask shows."""
        ends = sorted(end_ids) or [len(tokens)]
        tokens = tokens + [b"<end>"] * (not end_ids)
        words = _Words(tokens, sorted({*special_ids, *ends}), ends[0], encode)
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(words), eos_token=ends)
        self._limits = llguidance.LLParserLimits(max_lexer_states=MOST_LEXER_STATES, verbose_errors=False)
        self._executor = llguidance.LLExecutor(min(len(os.sched_getaffinity(0)), MOST_THREADS))
        self.num_words = -(-len(tokens) // 32)  # of a mask
        self._own_end = None if end_ids else ends[0]

    def compile(self, text: str) -> Matcher:
        inner = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        allowed = b"" if inner.is_error() else inner.compute_bitmask()  # what it finds out now, copies know
        if inner.is_error():
            said = inner.get_error()
            why = "no text can match it" if said.startswith("NoExtension") else _first_line(said)
            raise RequestError(f"{PARAM} cannot be compiled: {why}", PARAM)
        if not any(allowed) and not inner.is_accepting():
            raise RequestError(f"{PARAM} cannot be compiled: no text can match it", PARAM)
        return Matcher(inner)

    def fill(self, matchers: Sequence[tuple[int, Matcher]], masks: NDArray[np.int32]) -> None:
        """What may come next, for each (row of masks, matcher). masks: [rows, num_words]"""
        assert masks.flags.c_contiguous and masks.shape[1] == self.num_words
        if matchers:
            self._executor.unsafe_compute_mask_ptr(
                [(matcher._inner, row) for row, matcher in matchers], masks.ctypes.data, masks.strides[0], len(masks)
            )
        if self._own_end is not None:  # it stands behind the last id, so that bits above it mean nothing
            masks[:, -1] &= (1 << (self._own_end & 31)) - 1


def guide(tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]) -> Guide:
    """For a model with this many ids, which end a text with these."""
    tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
    return Guide(tokens, tokenizer.special_ids, end_ids, lambda data: tokenizer.encode(data.decode(), add_special_tokens=False))


class _Words:
    """A vocabulary as the library asks for it."""

    def __init__(self, tokens: list[bytes], special_ids: list[int], end_id: int, encode: Callable[[bytes], list[int]]) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = end_id
        self.bos_token_id = None
        self._encode = encode
        special = frozenset(special_ids)
        self._ids = {data: token for token, data in enumerate(tokens) if data and token not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, data: bytes) -> list[int]:
        """Tokens of exactly these bytes: as the tokenizer spells them, unless it adds a space or sees a special token in them."""
        ids = self._encode(data)
        if all(self._ids.get(self.tokens[token]) is not None for token in ids) and b"".join(self.tokens[token] for token in ids) == data:
            return ids
        return self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token first; it ends where no token goes on."""
        ids, start = [], 0
        while start < len(data):
            pieces = (data[start:end] for end in range(min(start + self._longest, len(data)), start, -1))
            piece = next((piece for piece in pieces if piece in self._ids), None)
            if piece is None:
                break
            ids.append(self._ids[piece])
            start += len(piece)
        return ids


def _first_line(text: str) -> str:
    return " ".join(text.partition("<state>")[0].split())[:MOST_LETTERS]
