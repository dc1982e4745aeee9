"""Phrases that users did not understand, and that must not come back: in help, messages, documents and on the page."""

import re
from collections.abc import Iterable, Iterator

from tests.docs.sources import Said, documents, helps, literals, notes, page

# phrase -> what to write instead
PHRASES = {
    "nobody watching costs nothing": "when nobody is watching, it costs nothing",
    "codes stay codes": "quantised weights stay quantised",
    "codes of floats": "quantised weights",
    "floats of codes": "dequantised weights",
    "codes of 8 bits": "8-bit weights, int8",
    "numbers that codes stand for": "dequantised weights",
    "be had": "say what is missing: no GPU can be used, there was no answer",
    "most tokens": "max tokens",
    "ended by its length": "stopped at max tokens",
    "as OpenAI's clients expect": "an OpenAI-compatible server",
    "paging is invisible": "paging changes no bit of the result",
    "as the makers recommend": "the model's recommended values",
    "come back later": "gets 429, or 503",
    "begins anew": "starts again, resets",
    "means nothing here": "is unknown and ignored",
    "which wants": "which needs",
    "COMMAND --help says more": "lists the options of a command",
    "nobody answers at": "no server answers at",
    "are not ours alone": "are shared with others",
    "fits in the head": "is small",
    "is to be fixed": "needs fixing",
    "asks nobody for anything": "loads nothing",
    "beside its peers": "compared with other engines",
    "the policy room": "policy/, the scheduler",
    "hardened at the door": "checked when it arrives",
    "a GPU wants": "a GPU needs",
    "wants a server": "needs a server",
    "are for the eye": "are not run",
    "dealt out": "divided, split",
    "are no whole": "are not whole",
    "by way of the host": "through the host",
}
# docstrings and comments of these folders: pattern -> what to write instead. Names of the code stand in backticks.
FOLDERS = (
    *("attention", "bench", "cli", "client", "engine", "kernels", "layers", "loading", "models", "native", "policy", "quant", "report"),
    *("server", "text", "worker"),
)
PRIVATE_WORDS = {
    r"\btwins?\b": "reference",
    r"\b(nobody|somebody|whoever)\b": "the name of the subject",
    r"\bwho (asks|comes|has|waits|wants)\b": "the name of the subject",
    r"\b(gives?|gave|given|giving) (it |them )?back\b": "frees",
    r"\b(deals?|dealt|dealing) out\b": "divides, assigns",
    r"\bnews\b": "updates",
    r"\bin teams\b": "in shared-prefix groups",
}
OLD_WORDS = "docs/decisions.md"  # reasons as they were written down when they were decided


def sources() -> Iterator[Said]:
    yield from (Said(f"{command} --help", text) for command, text in helps().items())
    yield from literals()
    yield from (Said(path.as_posix(), path.read_text()) for path in [*documents(), *page()])


def offences(texts: Iterable[Said]) -> Iterator[str]:
    """Every listed phrase, in any case, also where a line breaks in it."""
    for said in texts:
        plain = " ".join(said.text.lower().split())
        for phrase, instead in PHRASES.items():
            if phrase.lower() in plain:
                yield f"{said.where}: {phrase!r}; write instead: {instead}"


# promise: docs-checked-against
def test_phrases_that_nobody_understood_do_not_come_back() -> None:
    texts = list(sources())
    assert list(offences(said for said in texts if not said.where.endswith(OLD_WORDS))) == []
    every_kind = ("Octavo runs large language models", "port to listen on", " is not a multiple of ", "<title>Octavo</title>")
    assert [text for text in every_kind if not any(text in said.text for said in texts)] == [], "some kind of text was not read"


def test_a_phrase_is_found_across_lines_with_what_to_write() -> None:
    said = Said("a.md", "It runs.\nNobody watching\n  costs nothing.")
    assert list(offences([said])) == [
        "a.md: 'nobody watching costs nothing'; write instead: when nobody is watching, it costs nothing"
    ]


def private_words(texts: Iterable[Said]) -> Iterator[str]:
    for said in texts:
        plain = re.sub(r"`[^`]*`", "", " ".join(said.text.lower().split()))
        for pattern, instead in PRIVATE_WORDS.items():
            if found := re.search(pattern, plain):
                yield f"{said.where}: {found[0]!r}; write instead: {instead}"


def test_docstrings_and_comments_use_the_terms_of_the_field() -> None:
    texts = [said for folder in FOLDERS for said in notes(folder)]
    assert list(private_words(texts)) == []
    every_kind = ("Scheduling policy", "keys remembered after eviction", "The C ABI of Octavo's CPU kernels")
    assert [text for text in every_kind if not any(text in said.text for said in texts)] == [], "some kind of text was not read"


def test_a_private_word_is_found_unless_it_is_a_name_of_the_code() -> None:
    said = [Said("a.py:1", "The twin of a\n    kernel"), Said("a.py:2", "# `news` of a row")]
    assert list(private_words(said)) == ["a.py:1: 'twin'; write instead: reference"]
