"""Turns token ids into text, a few at a time, for streams.

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
