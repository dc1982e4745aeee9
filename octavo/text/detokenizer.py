"""Turns token ids into text for streams, a few at a time, and finds stop strings in it.

A token's bytes may end inside a character. They are held back until the rest arrives, so no delta ends in half a character, and
no U+FFFD stands in place of a character that later tokens complete. The deltas joined, `flush` included, are exactly
`tokenizer.decode` of all the ids. The cost of a push does not depend on what came before.
"""

import codecs
from collections.abc import Sequence
from itertools import islice

from octavo.text.tokenizer import Tokenizer

OPEN_CHARACTER_BYTES = 3  # at most, in UTF-8: an unfinished character began at most so many tokens ago


def shown_tail(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Returns the ids of a prompt that matter for the text after it: the last ones that are text, as many as may share a character."""
    shown = (token_id for token_id in reversed(ids) if token_id not in tokenizer.special_ids)
    return list(islice(shown, OPEN_CHARACTER_BYTES))[::-1]


class IncrementalDetokenizer:
    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        """With `prompt_ids`, the deltas continue that text: a first space is kept, and an open character is completed.

        The `shown_tail` of the prompt has the same effect as all of it, and is cheaper if several detokenizers are made.
        """
        self._tokenizer = tokenizer
        self._hidden: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_next = tokenizer.strips_leading_space
        self.push(shown_tail(tokenizer, prompt_ids))

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids. Returns the text that is now certain."""
        hidden, token_bytes = self._hidden, self._tokenizer.token_bytes
        data = b"".join([token_bytes(token_id) for token_id in ids if token_id not in hidden])
        if self._strip_next and data:
            data = data.removeprefix(b" ")
            self._strip_next = False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Ends the text. Returns what was held back as U+FFFD, since no token will complete it."""
        return self._decoder.decode(b"", final=True)


# -- stop strings
#
# Every character is read once, however long the strings are:
#
#   stop "aab", text "xaa"    matched 2: the text ends with "aa", the first two characters of the stop string
#                 then "a"    "aaa" is no head of it, but its end "aa" is: still matched 2
#                 then "b"    matched 3: found
#
# Each stop string has a table of fallbacks (Knuth, Morris and Pratt): how much of it is still matched when the next character differs.
# The table is made as far as a text has matched, so that long strings that never occur cost nothing.

class StopStrings:
    """The stop strings of one request. What a sample has matched so far is in its `StopSearch`."""

    __slots__ = ("fallbacks", "texts")

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.fallbacks = [[0, 0] for _ in texts]  # for the first n characters of each: the longest shorter head that they end with


class StopSearch:
    """The search through the text of one sample."""

    __slots__ = ("_length", "_matched", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._length = 0  # of the text so far
        self._matched = [0] * len(stops.texts)  # for each, how many of its first characters the text ends with

    @property
    def held_back(self) -> int:
        """The length of the longest tail of the text that a stop string starts with."""
        return max(self._matched, default=0)

    def skip(self, piece: str) -> None:
        """Takes a piece of text that, like all before it, is part of no stop string."""
        self._length += len(piece)
        self._matched = [0] * len(self._matched)

    def push(self, piece: str) -> tuple[int, str] | None:
        """Takes a piece of text. Returns where the earliest stop string begins and which it is, or None. Nothing is pushed after a find."""
        found = []
        for number, stop in enumerate(self._stops.texts):
            matched, end = _advance(stop, self._stops.fallbacks[number], self._matched[number], piece)
            self._matched[number] = matched
            if matched == len(stop):
                found.append((self._length + end - len(stop), stop))
        self._length += len(piece)
        return min(found, default=None)


def _advance(stop: str, fallbacks: list[int], matched: int, piece: str) -> tuple[int, int]:
    """Returns how many characters of the stop string are matched, and how many of the piece were read: all, or up to a find."""
    place, end = 0, len(piece)
    while place < end:
        if matched == 0:  # the usual case: nothing in the piece begins the stop string
            place = piece.find(stop[0], place)
            if place < 0:
                return 0, end
        if piece[place] == stop[matched]:
            matched, place = matched + 1, place + 1
            if matched == len(stop):
                break
        else:
            if matched >= len(fallbacks):
                _extend(fallbacks, stop, matched)
            matched = fallbacks[matched]
    return matched, place


def _extend(fallbacks: list[int], stop: str, most: int) -> None:
    """Extends the table of fallbacks to the first `most` characters."""
    for length in range(len(fallbacks), most + 1):
        char, head = stop[length - 1], fallbacks[-1]
        while head and stop[head] != char:
            head = fallbacks[head]
        fallbacks.append(head + (stop[head] == char))
