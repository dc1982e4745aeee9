"""llguidance, as the engine needs it; the one module that imports it.

    guide(tokenizer, ...) -> Guide      the vocabulary as bytes, made once: some 0.4 s for 50,000 tokens
    Guide.compile(text)   -> Matcher    refuses what has no meaning, or allows no text at all
    Matcher               copy   advance(tokens)   ended   failed   accepting          one for each sample
    Guide.fill(matchers, masks)         a bit for each id that may come next, least significant first

A matcher never fails open: where it is in error, or allows nothing, it says so, and never that the text may end.

The step loop waits for masks, so their work has bounds. The library's limits hold for each mask. A grammar's first masks are timed
one by one, over all its samples (`Cost`), and one that takes too long fails, and no other. The others are filled together, in
batches; after a slow batch its grammars are timed again.
"""

import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.structured_outputs import PARAM
from octavo.text.tokenizer import Tokenizer

MOST_THREADS = 8  # that fill masks
MOST_LETTERS = 300  # of a complaint
MASK_SECONDS = 0.01  # of CPU time, for one mask of a grammar on average; 150,000 tokens and a heavy regex take 3 to 5 ms
GRACE_SECONDS = 0.25  # beyond that average, while a call of `fill` has time
FILL_SECONDS = 0.5  # of a call; then grammars that are above the average have no grace left
TIMED_MASKS = 16  # of a grammar, before its masks are filled together with others
FORCED_BYTES = 256  # of a text that must follow, spelled in tokens
ROUNDS = 2  # of all threads, in a batch: a batch cannot be stopped

LIMITS = llguidance.LLParserLimits(
    max_items_in_row=5_000,  # an object takes four for each property that may be left out
    step_max_items=60_000,  # of a mask: 12 ms for 500 optional properties and 150,000 tokens; 0.3 s for the most ambiguous grammar
    initial_lexer_fuel=200_000,  # some 0.3 s of a compilation
    step_lexer_fuel=50_000,  # some 90 ms of a mask, and 2 MB
    max_lexer_states=25_000,  # of a sample, each some 1.5 kB; a counted text, such as .{0,20000}, takes two for each character
    max_grammar_size=500_000,
    verbose_errors=False,
)


@dataclass(slots=True)
class Cost:
    """The CPU time that a grammar takes while it is timed, for its masks, its copies, and its samples' tokens."""

    seconds: float = 0.0
    masks: int = 0
    to_time: int = TIMED_MASKS  # masks that are still to be timed; none: the grammar is trusted
    too_much: bool = False

    def add(self, since: float) -> None:
        """Adds the work of this thread since then. After slow work, the grammar's next masks are timed."""
        taken = time.thread_time() - since
        if taken > MASK_SECONDS:
            self.to_time = TIMED_MASKS
        if self.to_time:
            self.seconds += taken

    def judge(self, grace: float) -> None:
        self.too_much = self.too_much or self.seconds > grace + MASK_SECONDS * self.masks


class Matcher:
    """The state of one sample in its grammar."""

    __slots__ = ("_inner", "cost")

    def __init__(self, inner: llguidance.LLMatcher, cost: Cost) -> None:
        self._inner = inner
        self.cost = cost  # all copies share it

    def copy(self) -> "Matcher":
        start = time.thread_time()
        copied = Matcher(self._inner.deep_copy(), self.cost)
        self.cost.add(start)
        return copied

    def advance(self, tokens: Sequence[int]) -> None:
        """Takes the tokens of a sample. `failed` is set afterwards if the grammar does not allow them."""
        start = time.thread_time()
        self._inner.consume_tokens(list(tokens))
        self.cost.add(start)

    @property
    def failed(self) -> str:
        """The reason why the sample cannot go on. It is empty if it can, or if it has ended."""
        if self.cost.too_much:
            return f"it is too much work, more than {1000 * MASK_SECONDS:.0f} ms of CPU time for a token"
        return _first_line(self._inner.get_error() or "it went wrong") if self._inner.is_error() else ""

    @property
    def mask_seconds(self) -> float:
        """What a mask takes, on average over those of this grammar that were timed."""
        return self.cost.seconds / max(1, self.cost.masks)

    @property
    def dead_end(self) -> bool:
        """Whether it failed because no text can follow here, and not because of a limit."""
        return not self.cost.too_much and self._inner.is_error() and _is_dead_end(self._inner.get_error())

    @property
    def ended(self) -> bool:
        """Whether the text is complete and nothing may follow."""
        return self._inner.is_stopped() and not self._inner.is_error()

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        return self._inner.is_accepting()


class Guide:
    def __init__(self, tokens: list[bytes], special_ids: Collection[int], end_ids: Collection[int], encode: Callable[[bytes], list[int]]):
        """`encode`: turns text into tokens. A vocabulary without an end id gets one after its last id, which no mask shows."""
        ends = sorted(end_ids) or [len(tokens)]
        tokens = tokens + [b"<end>"] * (not end_ids)
        words = _Words(tokens, sorted({*special_ids, *ends}), ends[0], encode)
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(words), eos_token=ends)
        self._threads = min(len(os.sched_getaffinity(0)), MOST_THREADS)
        self._executor = llguidance.LLExecutor(self._threads)
        self.num_words = -(-len(tokens) // 32)  # of a mask
        self._own_end = None if end_ids else ends[0]

    def compile(self, text: str) -> Matcher:
        inner = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        cost = Cost(masks=1)
        start = time.thread_time()
        allowed = b"" if inner.is_error() else inner.compute_bitmask()  # what it finds out now, copies know
        cost.add(start)
        if inner.is_error():
            error = inner.get_error()
            why = "no text can match it" if _is_dead_end(error) else _first_line(error)
            raise RequestError(f"{PARAM} cannot be compiled: {why}", PARAM)
        if not any(allowed) and not inner.is_accepting():
            raise RequestError(f"{PARAM} cannot be compiled: no text can match it", PARAM)
        return Matcher(inner, cost)

    def fill(self, matchers: Sequence[tuple[int, Matcher]], masks: NDArray[np.int32]) -> None:
        """Writes what may come next into the masks, for each (row, matcher). masks: [rows, num_words]

        Matchers of a grammar that has become too costly fail, and their masks stay as they are.
        """
        assert masks.flags.c_contiguous and masks.shape[1] == self.num_words
        until, size = time.monotonic() + FILL_SECONDS, ROUNDS * self._threads
        trusted = [each for each in matchers if not each[1].cost.to_time]
        timed = [each for each in matchers if each[1].cost.to_time]
        for start in range(0, len(trusted), size):
            batch = trusted[start : start + size]
            timed += [each for each in batch if each[1].cost.to_time]  # their grammar was in a batch that was slow
            if still := [each for each in batch if not each[1].cost.to_time]:
                self._fill_batch(still, masks)
        for row, matcher in timed:
            _fill_timed(matcher, masks, row, GRACE_SECONDS if time.monotonic() < until else 0)
        if self._own_end is not None:  # it stands behind the last id, so that bits above it mean nothing
            masks[:, -1] &= (1 << (self._own_end & 31)) - 1

    def _fill_batch(self, batch: Sequence[tuple[int, Matcher]], masks: NDArray[np.int32]) -> None:
        """Fills a batch. If it is slow, all of its grammars are timed from here on, since any of them may be the cause."""
        start = time.monotonic()
        rows = [(matcher._inner, row) for row, matcher in batch]
        self._executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks.strides[0], len(masks))
        if time.monotonic() - start > ROUNDS * MASK_SECONDS:
            for _, matcher in batch:
                matcher.cost.to_time = TIMED_MASKS


def _fill_timed(matcher: Matcher, masks: NDArray[np.int32], row: int, grace: float) -> None:
    """Fills one mask and times it. A grammar that was too costly for one sample is not run for the others."""
    cost = matcher.cost
    cost.judge(grace)
    if not cost.too_much:
        start = time.thread_time()
        matcher._inner.unsafe_compute_mask_ptr(masks.ctypes.data + row * masks.strides[0], masks.strides[0])
        cost.add(start)
        cost.masks, cost.to_time = cost.masks + 1, max(cost.to_time - 1, 0)
        cost.judge(grace)


def guide(tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]) -> Guide:
    """Returns the guide of a model with this many ids and these end ids."""
    tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
    return Guide(tokens, tokenizer.special_ids, end_ids, lambda data: tokenizer.encode(data.decode(), add_special_tokens=False))


class _Words:
    """A vocabulary in the form that the library wants."""

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
        """Returns tokens of exactly these bytes: those of the tokenizer, unless it adds a space or finds a special token in them.

        The library asks at every mask for all the text that must follow, and needs the first token: of a long text, that of its start.
        """
        data = _start(data)
        ids = self._encode(data)
        if all(self._ids.get(self.tokens[token]) is not None for token in ids) and b"".join(self.tokens[token] for token in ids) == data:
            return ids
        return self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """Returns the longest token that fits, then the next, until no token fits."""
        ids, start = [], 0
        while start < len(data):
            pieces = (data[start:end] for end in range(min(start + self._longest, len(data)), start, -1))
            piece = next((piece for piece in pieces if piece in self._ids), None)
            if piece is None:
                break
            ids.append(self._ids[piece])
            start += len(piece)
        return ids


def _start(data: bytes) -> bytes:
    """Returns the first bytes of a text: at most FORCED_BYTES, and whole characters."""
    end = min(len(data), FORCED_BYTES)
    while 0 < end < len(data) and data[end] & 0xC0 == 0x80:
        end -= 1
    return data[:end]


def _is_dead_end(error: str) -> bool:
    return error.startswith("NoExtension")


def _first_line(text: str) -> str:
    return " ".join(text.partition("<state>")[0].replace("<non-verbose/>", "").split())[:MOST_LETTERS]


# -- EBNF

# strings and sets of characters stay as they are; a comment goes
_PIECE = re.compile(r'(?P<kept>"(?:\\.|[^"\\\n])*+"|\[(?:\\.|[^\]\\\n])*+\])|#[^\n]*+|(?P<bar>[ \t\r]*+\n\s*+\|)')

_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)")


def as_lark(grammar: str) -> str:
    try:
        return gbnf_to_lark(_PIECE.sub(_on_one_line, grammar))
    except Exception as error:  # of the library, which raises various ones; RecursionError for deep groups
        why = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())[:300]
        raise RequestError(f"{PARAM}: grammar is not valid EBNF: {why}", PARAM) from None


def _on_one_line(found: re.Match[str]) -> str:
    """An alternative may begin on a line of its own: the library reads it at the end of the line before."""
    return _ESCAPE.sub(_unescaped, found["kept"]) if found["kept"] else " |" if found["bar"] else ""


def _unescaped(found: re.Match[str]) -> str:
    """The library loses zeros of \\u and \\U, so letters stand for themselves, and the first 256 characters are written as \\x."""
    digits = found[1] or found[2]
    if not digits:
        return found[0]
    code = int(digits, 16)
    return f"\\x{code:02x}" if code < 256 else chr(code)
