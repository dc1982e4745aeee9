"""`Report` is what a command found, section by section. `rendered` makes an HTML file of it. Commands only fill it in.

`Html` is text that is HTML or SVG already. A plain `str` is escaped when it becomes part of an element.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape

from octavo import __version__

VOID = frozenset({"meta", "br"})  # elements without an end tag


@dataclass(frozen=True, slots=True)
class Html:
    text: str


def tag(name: str, /, *children: Html | str, **attributes: str | float) -> Html:
    """Returns an element. Names of attributes have _ where HTML has -, and `class_` is class."""
    listed = "".join(f' {key.rstrip("_").replace("_", "-")}="{_escaped(_value(value))}"' for key, value in attributes.items())
    if name in VOID:
        return Html(f"<{name}{listed}>")
    return Html(f"<{name}{listed}>{joined(*children).text}</{name}>")


def joined(*parts: Html | str) -> Html:
    return Html("".join(part.text if isinstance(part, Html) else _escaped(part) for part in parts))


def _escaped(text: str) -> str:
    """Escapes text for HTML. Control characters, surrogates and bidi marks become \\x1b, \\ud800 and the like."""
    kept = "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)
    return escape(kept, quote=True)


def _value(value: str | float) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


# -- a report

POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # the file loads nothing and runs nothing


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    parts: Sequence[Html]


@dataclass(frozen=True, slots=True)
class Report:
    """What a command found."""

    kind: str  # the command, such as "octavo plan"
    title: str  # mostly the model
    verdict: str  # one sentence
    holds: bool | None  # whether the verdict is good; None if it is neither good nor bad
    sections: Sequence[Section]
    facts: Mapping[str, str]  # how it was found: the command, the machine


def rendered(report: Report) -> str:
    """Returns the report as the text of an HTML file."""
    tone = {None: "verdict", True: "verdict good", False: "verdict bad"}[report.holds]
    head = tag("header", tag("p", report.kind, class_="kind"), tag("h1", report.title), tag("p", report.verdict, class_=tone))
    sections = [tag("section", tag("h2", section.title), *section.parts) for section in report.sections]
    facts = {**report.facts, "octavo": __version__, "date": datetime.now().astimezone().isoformat(" ", "seconds")}
    found_with = [part for name, value in facts.items() for part in (tag("dt", name), tag("dd", _fact(name, value)))]
    document = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("title", f"{report.title}: {report.kind}"),
            tag("style", Html(STYLE)),
        ),
        tag("body", tag("main", head, *sections, tag("footer", tag("dl", *found_with)))),
        lang="en",
    )
    return f"<!doctype html>\n{document.text}\n"


def _fact(name: str, value: str) -> Html:
    return tag("code", value) if name == "command" else joined(value)


def paragraph(text: str) -> Html:
    return tag("p", text)


def table(lines: Sequence[Sequence[str]], name: str, words: Sequence[int] = ()) -> Html:
    """Returns a table. The first line is its head, the first cell of a line its name. `words`: columns of text, not numbers."""
    head, *rows = lines
    kinds = ["words" if column in words else "number" for column in range(len(head))]
    top = [tag("th", cell, scope="col", class_=kind) if cell else tag("td", "") for cell, kind in zip(head, kinds)]
    body = [
        tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell, class_=kind) for cell, kind in zip(row[1:], kinds[1:]))) for row in rows
    ]
    whole = tag("table", tag("thead", tag("tr", *top)), tag("tbody", *body))
    return tag("div", whole, class_="wide", role="region", aria_label=name, tabindex=0)


def pictured(drawing: Html, caption: str = "") -> Html:
    return tag("figure", drawing, *([tag("figcaption", caption)] if caption else []))


# -- the style: quiet, the type of a book, one accent; for light and dark, for a screen and for paper

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #faf7f0; --ink: #211e1a; --muted: #655e54; --line: #ddd5c6; --accent: #a3301c; --good: #2c6b3f; --bad: #a3301c; --data: #2f5d86;
  --part-0: #1d3f5e; --part-1: #2f5d86; --part-2: #6f8fae; --part-3: #b3c3d3; --part-4: #e9e1d0; --part-5: #a79f91;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #171513; --ink: #ebe5d9; --muted: #a79f91; --line: #37332d;
    --accent: #ef8a70; --good: #7fc08f; --bad: #ef8a70; --data: #9cc4ea;
    --part-0: #cfe3f7; --part-1: #9cc4ea; --part-2: #5f83a8; --part-3: #3d566f; --part-4: #2c2823; --part-5: #6b6459;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); }
body { font: 16px/1.55 "Iowan Old Style", "Palatino Linotype", Palatino, "URW Palladio L", "Book Antiqua", Georgia, serif; }
main { max-width: 52rem; margin: 0 auto; padding: 3rem 1.25rem 4rem; }
header { border-bottom: 1px solid var(--line); padding-bottom: 1.5rem; }
h1 { font-size: 2rem; line-height: 1.2; font-weight: 600; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; font-weight: 600; margin: 2.5rem 0 .5rem; }
p { margin: .5rem 0; overflow-wrap: anywhere; }
.kind { color: var(--accent); letter-spacing: .06em; font-variant-caps: all-small-caps; font-size: 1.1rem; margin: 0 0 .25rem; }
.verdict { font-size: 1.5rem; line-height: 1.3; margin: 1rem 0 0; }
.good { color: var(--good); } .bad { color: var(--bad); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { padding: .2rem .9rem .2rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { font-weight: 400; color: var(--muted); }
th[scope=row], .words { text-align: left; }
td.words { white-space: normal; }
figure { margin: 1rem 0; }
figcaption { color: var(--muted); font-size: .9rem; }
svg { display: block; width: 100%; height: auto; font-family: system-ui, sans-serif; }
svg text { fill: var(--ink); font-size: 13px; } svg .head { font-weight: 600; } svg .small { fill: var(--muted); font-size: 11px; }
.bar, .mark { fill: var(--data); } .seen, .axis { stroke: var(--ink); stroke-width: 1.5; } .axis { stroke-width: 1; }
.grid { stroke: var(--line); stroke-width: 1; }
.curve { fill: none; stroke: var(--data); stroke-width: 2; stroke-linejoin: round; } .curve-1 { stroke-dasharray: 7 4; }
.curve-2 { stroke-dasharray: 2 3; } .curve-3 { stroke: var(--ink); } .curve-4 { stroke: var(--ink); stroke-dasharray: 7 4; }
.curve-5 { stroke: var(--ink); stroke-dasharray: 2 3; }
.part-0 { fill: var(--part-0); } .part-1 { fill: var(--part-1); } .part-2 { fill: var(--part-2); }
.part-3 { fill: var(--part-3); } .part-4 { fill: var(--part-4); } .part-5 { fill: var(--part-5); }
footer { border-top: 1px solid var(--line); margin-top: 3rem; padding-top: 1rem; font-size: .85rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.25rem; margin: 0; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
code { font: .85em ui-monospace, monospace; }
@media print {
  body { font-size: 11pt; } main { max-width: none; padding: 0; }
  figure, table, section > p { break-inside: avoid; } h2 { break-after: avoid; }
  * { print-color-adjust: exact; }
}
"""
