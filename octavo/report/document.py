"""`Report`: what a command found, section by section, and the file of HTML that says it. Each command only fills it in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from octavo import __version__
from octavo.report.html import Html, joined, tag
from octavo.report.style import STYLE

POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # it asks nobody for anything, and runs nothing


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    parts: Sequence[Html]


@dataclass(frozen=True, slots=True)
class Report:
    kind: str  # octavo plan
    title: str  # the model, as a rule
    verdict: str  # one sentence
    holds: bool | None  # whether the verdict is a good one, where it is one
    sections: Sequence[Section]
    facts: Mapping[str, str]  # what it was found with: the command, the machine


def rendered(report: Report) -> str:
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


def said(text: str) -> Html:
    return tag("p", text)


def table(lines: Sequence[Sequence[str]], name: str, words: Sequence[int] = ()) -> Html:
    """The first line is the head, the first column names the rows; `words`: further columns that are no numbers."""
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
