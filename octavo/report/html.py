"""`Html`: text that is HTML (or SVG) already; whatever is a plain `str` is text, and escaped where it becomes part of one."""

from dataclasses import dataclass
from html import escape

VOID = frozenset({"meta", "br"})  # never closed in HTML


@dataclass(frozen=True, slots=True)
class Html:
    text: str


def tag(name: str, /, *children: Html | str, **attributes: str | float) -> Html:
    """An element. `class_` is class, an underscore within a name a dash; characters a file cannot hold are spelled out."""
    listed = "".join(f' {key.rstrip("_").replace("_", "-")}="{_escaped(_value(value))}"' for key, value in attributes.items())
    if name in VOID:
        return Html(f"<{name}{listed}>")
    return Html(f"<{name}{listed}>{joined(*children).text}</{name}>")


def joined(*parts: Html | str) -> Html:
    return Html("".join(part.text if isinstance(part, Html) else _escaped(part) for part in parts))


def _escaped(text: str) -> str:
    kept = "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)  # also half of a pair, or bidi marks
    return escape(kept, quote=True)


def _value(value: str | float) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
