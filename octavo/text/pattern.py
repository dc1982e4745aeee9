r"""Whether a text is a regular expression as JSON schema means it, in one pass, without compiling it.

Compiling takes time a caller can choose (classes of large ranges, counts of counts), and no two engines take the same
language. This finds what none takes: groups and classes left open, repetition of nothing, a backslash at the end.
"""

import re

_TOKEN = re.compile(
    r"(?P<atoms>(?:\\[\s\S]|\[\^?+\]?+(?:\\[\s\S]|[^\]\\])*+\]|[^\\\[()|^$*+?{])++)"
    r"|(?P<open>\((?:\?(?:[:=!]|<[=!]|P?<[A-Za-z_]\w*>))?+)(?!\?)"
    r"|(?P<close>\))"
    r"|(?P<repeat>(?:[*+?]|\{(?P<least>\d{1,9})(?:,(?P<most>\d{0,9}))?\})[?+]?)"
    r"|(?P<gap>[|^$])"
    r"|(?P<brace>\{)"
)


def pattern_error(pattern: str) -> str | None:
    """What is wrong with it, and where."""
    at, groups, repeatable = 0, 0, False
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None or (token["close"] and not groups) or (token["repeat"] and not repeatable):
            return f"unexpected {pattern[at]!r} at character {at}"
        if token["most"] and int(token["most"]) < int(token["least"]):
            return f"{token['repeat']} at character {at} is at most less than at least"
        groups += bool(token["open"]) - bool(token["close"])
        repeatable = token.lastgroup in ("atoms", "close", "brace")
        at = token.end()
    return "a group is not closed" if groups else None
