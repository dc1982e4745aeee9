"""Logprobs in the two forms of OpenAI's API.

    chat          {"content": [{"token", "logprob", "bytes", "top_logprobs": [...]}]}, a token at a time
    completions   {"text_offset", "token_logprobs", "tokens", "top_logprobs"}, four lists side by side

Both are written as JSON one token after another: to write all of a long answer at its end would stop the event loop for a second.
"""

import json
from collections.abc import Sequence

from octavo.outputs import TextDelta, TokenChoices
from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.tokenizer import Tokenizer

LEAST = -9999.0  # stands for minus infinity, which JSON does not have
_json = json.JSONEncoder(separators=(",", ":")).encode


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Returns the text of a token. For a part of a character it returns the bytes as OpenAI writes them: bytes:\\xe2\\x80."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, delta: TextDelta, most: int) -> list[str]:
    """Returns an entry of JSON for each token of a delta, with its `most` best alternatives."""
    found = zip(delta.token_ids, delta.logprobs or [], strict=True)
    return [_json(_chat_entry(tokenizer, token, choices, most)) for token, choices in found]


def _chat_entry(tokenizer: Tokenizer, token: int, choices: TokenChoices, most: int) -> dict[str, object]:
    ranked = sorted((found.rank, other) for other, found in choices.items() if found.rank is not None and found.rank <= most)
    tops = [_chat_token(tokenizer, other, choices[other].logprob) for _, other in ranked[:most]]  # two may share a rank
    return {**_chat_token(tokenizer, token, choices[token].logprob), "top_logprobs": tops}


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, object]:
    return {"token": token_text(tokenizer, token), "logprob": max(logprob, LEAST), "bytes": list(tokenizer.token_bytes(token))}


class CompletionLogprobs:
    """The four lists of one choice, which grow with its tokens."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], skip_special_tokens: bool) -> None:
        """`before`: see `shown_tail`; empty if the prompt is a part of the choice."""
        self._tokenizer = tokenizer
        self._place = 0  # characters of the choice so far
        self._detokenizer = IncrementalDetokenizer(tokenizer, before, skip_special_tokens)
        self._clear()

    def _clear(self) -> None:
        self._offsets: list[str] = []  # this list and the next three hold JSON
        self._logprobs: list[str] = []
        self._tokens: list[str] = []
        self._tops: list[str] = []

    def add(self, tokens: Sequence[int], found: Sequence[TokenChoices | None]) -> None:
        """Adds tokens with their choices. The first token of a prompt has none, because nothing comes before it."""
        for token, choices in zip(tokens, found, strict=True):
            self._offsets.append(str(self._place))
            self._place += len(self._detokenizer.push([token]))
            self._tokens.append(_json(token_text(self._tokenizer, token)))
            self._logprobs.append("null" if choices is None else _json(max(choices[token].logprob, LEAST)))
            self._tops.append("null" if choices is None else _json(self._top(choices)))

    def _top(self, choices: TokenChoices) -> dict[str, float]:
        """Returns the logprob of each text. If several tokens have the same text, the likeliest counts."""
        top: dict[str, float] = {}
        for token, found in choices.items():
            name = token_text(self._tokenizer, token)
            top[name] = max(found.logprob, top.get(name, LEAST), LEAST)
        return top

    def take(self) -> str:
        """Returns what was added since the last call, as JSON."""
        lists = {"text_offset": self._offsets, "token_logprobs": self._logprobs, "tokens": self._tokens, "top_logprobs": self._tops}
        self._clear()
        return "{" + ",".join([f'"{name}":[{",".join(written)}]' for name, written in lists.items()]) + "}"
