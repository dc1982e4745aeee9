"""Grammars made by hand behind the seam of `text/guidance.py`, for machines without llguidance and models without a vocabulary of text.

A grammar is two numbers, "modulus length": a token may follow another where it is of the next class of ids, those with the same rest by
modulus, and the text is complete after so many of them. What may come depends on what was sampled last, so a mask of another row, of
another step, or of the sample beside it shows at once.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo import LLM, StructuredOutputsParams
from octavo.grammar.grammars import Grammars


@dataclass
class HandMatcher:
    modulus: int
    left: int
    last: int = 0
    failed: str = ""
    mask_seconds: float = 0.0

    def copy(self) -> "HandMatcher":
        return replace(self)

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.failed = self.failed or ("" if self.left and self.allows(token) else f"{token} after {self.last}")
            self.last, self.left = token, self.left - 1

    def allows(self, token: Any) -> Any:
        """One id, or an array of them."""
        return token % self.modulus == (self.last + 1) % self.modulus

    @property
    def ended(self) -> bool:
        return self.left == 0 and not self.failed

    accepting = ended


class HandGuide:
    def __init__(self, vocab_size: int) -> None:
        self._ids = np.arange(vocab_size)
        self.num_words = -(-vocab_size // 32)

    def compile(self, text: str) -> HandMatcher:
        modulus, length = map(int, text.split())
        return HandMatcher(modulus, length)

    def fill(self, matchers: Sequence[tuple[int, HandMatcher]], masks: NDArray[np.int32]) -> None:
        for row, matcher in matchers:
            bits = np.zeros(32 * self.num_words, bool)
            bits[: len(self._ids)] = matcher.allows(self._ids)
            masks[row] = np.packbits(bits, bitorder="little").view(np.int32)


class HandMadeGrammars(Grammars):
    def check(self) -> None:
        """Every grammar was made by hand."""

    def _compile(self, form: StructuredOutputsParams) -> "Future[Any]":
        """At once, so that two engines let a request go at the same step."""
        guide: Future[Any] = Future()
        guide.set_result(HandGuide(self._vocab_size))
        compiled: Future[Any] = Future()
        compiled.set_result(guide.result().compile(form.grammar))
        self._guide = guide
        return compiled


def use_hand_made_grammars(llm: LLM, vocab_size: int) -> None:
    llm._core.grammars = HandMadeGrammars(None, vocab_size, ())  # type: ignore[attr-defined]


def hand_made(modulus: int, length: int) -> StructuredOutputsParams:
    return StructuredOutputsParams(grammar=f"{modulus} {length}")


def obeys(token_ids: Sequence[int], modulus: int, length: int) -> bool:
    matcher = HandMatcher(modulus, length)
    matcher.advance(token_ids)
    return matcher.ended
