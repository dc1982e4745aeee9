"""Grammars in EBNF, as vLLM's examples and llama.cpp write them (`root ::= "a" | "b"`), become Lark grammars."""

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from octavo.errors import RequestError
from octavo.structured_outputs import PARAM

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
