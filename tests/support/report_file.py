"""A report, read strictly: every element closed, nothing that runs or asks anybody for anything."""

import re
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "br"}
HOSTILE = "<img src=x onerror=alert(1)>&\"'"  # a name that a folder may have


class ReportFile(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []  # of which element, what it says
        self.labels: list[str] = []  # what pictures say in words
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == [], "not closed"
        assert "http" not in re.sub(r"http-equiv", "", self.source) and "url(" not in self.source and "@import" not in self.source

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in {"script", "img", "link", "iframe", "object", "embed", "form", "a", "base"}
        assert not any(name.startswith("on") or name in {"src", "href", "style"} for name, _ in attrs)
        self.labels += [value or "" for name, value in attrs if name == "aria-label"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.open, "only SVG closes itself"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.append((self.open[-1], data))

    def of(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]

    def rows(self) -> dict[str, list[str]]:
        """Of all tables: the name of a row, and its cells."""
        found: dict[str, list[str]] = {}
        for row in re.findall(r"<tr>(.*?)</tr>", self.source):
            name = re.match(r'<th scope="row">(.*?)</th>', row)
            if name:
                found[name[1]] = re.findall(r"<td[^>]*>(.*?)</td>", row)
        return found
