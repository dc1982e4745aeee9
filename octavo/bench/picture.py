"""Draws figures as horizontal bars, in an SVG file of their own or in a report, which also has curves of them.

    panel title, unit
      label  ██████████████├──┤  12.3        the thin line goes from the least to the greatest sample
    small print: the command and the machine

The description of a picture has all its numbers, for people who cannot see the bars.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from octavo.bench.figures import Figure, Lines, Result, number, words
from octavo.report.charts import Curve, curves
from octavo.report.document import Html, Section, paragraph, pictured, table, tag

WIDTH, MARGIN, LEFT, RIGHT = 760, 24, 220, 70  # widths of the picture, its margin, the labels, the numbers
ROW, HEAD, SMALL = 26, 44, 16  # heights of a row with a bar, the title of a panel, a line of small print
LONGEST_LABEL = 28  # characters

STYLE = """
  svg { color-scheme: light dark; font-family: system-ui, sans-serif; }
  .back { fill: #ffffff; } text { fill: #1b1f24; font-size: 13px; } .title { font-size: 17px; font-weight: 600; }
  .head { font-weight: 600; } .small { fill: #57606a; font-size: 11px; }
  .bar { fill: #2f6f9f; } .seen { stroke: #1b1f24; stroke-width: 1.5; }
  @media (prefers-color-scheme: dark) {
    .back { fill: #15181d; } text { fill: #e6e8eb; } .small { fill: #9aa4ae; } .bar { fill: #4d94c8; } .seen { stroke: #e6e8eb; }
  }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    low: float  # where the thin line begins
    high: float  # where it ends


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    bars: list[Bar]


def bar(label: str, figure: Figure) -> Bar:
    """Returns a bar of the median, with a thin line from the least to the greatest sample."""
    return Bar(label, *(figure.statistic(name) for name in ("median", "min", "max")))


def heading(name: str, figure: Figure) -> str:
    return f"{words(name)}, {figure.unit}"


def draw(title: str, panels: Sequence[Panel], small_print: Sequence[str]) -> str:
    """Returns the text of an SVG file."""
    bars, y = _panels(panels, 48)
    body = [_text(MARGIN, 36, title, "title"), *bars]
    lines = [line for text in small_print for line in textwrap.wrap(text, 120, break_on_hyphens=False)]
    body += [_text(MARGIN, y + 20 + SMALL * index, line, "small") for index, line in enumerate(lines)]
    height = y + 20 + SMALL * len(lines)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title description">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="description">{escape(_description(panels))}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{height}"/>',
        *body,
        "</svg>\n",
    ])  # fmt: skip


def within_report(panels: Sequence[Panel]) -> Html:
    """Returns the same bars for a report, which has its own title, small print and colours."""
    bars, height = _panels(panels, 0)
    return tag("svg", Html("".join(bars)), viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=_description(panels))


def _panels(panels: Sequence[Panel], y: int) -> tuple[list[str], int]:
    """Draws the panels below each other, from `y` on. Returns them and the place where they end."""
    body = []
    for panel in panels:
        body += _panel(panel, y)
        y += HEAD + ROW * len(panel.bars)
    return body, y


def _description(panels: Sequence[Panel]) -> str:
    """Returns the description: all numbers of the panels."""
    return "; ".join(f"{panel.title}: " + ", ".join(f"{bar.label} {number(bar.value)}" for bar in panel.bars) for panel in panels)


def _panel(panel: Panel, y: int) -> list[str]:
    most = max((max(bar.value, bar.high) for bar in panel.bars), default=0.0) or 1.0
    scale = (WIDTH - MARGIN - LEFT - RIGHT) / most
    parts = [_text(MARGIN, y + HEAD - 14, panel.title, "head")]
    for index, bar in enumerate(panel.bars):
        top = y + HEAD + ROW * index
        low, high = LEFT + bar.low * scale, LEFT + bar.high * scale
        parts.append(_text(LEFT - 10, top + 13, _short(bar.label), "label", anchor="end"))
        parts.append(f'<rect class="bar" x="{LEFT}" y="{top}" width="{max(bar.value * scale, 1):.1f}" height="18" rx="2"/>')
        if high - low > 1:
            parts.append(f'<line class="seen" x1="{low:.1f}" x2="{high:.1f}" y1="{top + 9}" y2="{top + 9}"/>')
        parts.append(_text(LEFT + max(bar.value, bar.high) * scale + 8, top + 13, number(bar.value), "value"))
    return parts


def _short(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "…"


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


# -- sections of a report

PERCENTS = [half / 2 for half in range(201)]
ENOUGH = 3  # samples that a curve of their spread needs
MOST_POINTS = 400  # that a curve may have


def sections(results: Sequence[Result], head: str, lines: Lines, panels: Sequence[Panel]) -> list[Section]:
    """Returns a report's sections: the figures, how times are spread, and the course of each run."""
    figures = Section("Figures", [paragraph(head), table(lines, "figures"), pictured(within_report(panels))])
    return [figures, *_spreads(results), *(_course(result) for result in results if result.each_request)]


def _spreads(results: Sequence[Result]) -> list[Section]:
    names = list(dict.fromkeys(name for result in results for name, figure in result.figures.items() if figure.unit == "ms"))
    drawn = []
    for name in names:
        found = [(result.name, result.figures[name]) for result in results if name in result.figures]
        spread = [(label, figure) for label, figure in found if len(figure.samples) >= ENOUGH]
        if spread:
            lines = [Curve(label, list(zip(figure.percentiles(PERCENTS), PERCENTS))) for label, figure in spread]
            drawn.append(pictured(curves(lines, f"{words(name)}, ms", "% of samples that took at most this")))
    return [Section("How times are spread", drawn)] if drawn else []


def _course(result: Result) -> Section:
    """Returns a section on when requests came and when they were answered, for a server that was measured from outside."""
    requests = result.each_request
    lines = [_counted("arrived", (one["due"] for one in requests))]
    lines.append(_counted("answered", (one["ended"] for one in requests if one["error"] is None)))
    if any("within_slo" in one for one in requests):
        lines.append(_counted("answered within the SLO", (one["ended"] for one in requests if one["within_slo"])))
    text = "How far answers lie behind arrivals is how many requests are under way; what keeps within the SLO is goodput."
    return Section(f"{result.name}: the course of the run", [pictured(curves(lines, "seconds", "requests so far"), text)])


def _counted(label: str, times: Iterable[object]) -> Curve:
    """Returns a curve of how many of the times have passed."""
    ordered = sorted(time for time in times if isinstance(time, float | int))
    every = -(-len(ordered) // MOST_POINTS) or 1
    kept = [(time, float(number)) for number, time in enumerate(ordered, 1) if number % every == 0 or number == len(ordered)]
    return Curve(f"{label}: {len(ordered):,}", [(0.0, 0.0), *kept])
