"""Curves over a doubling number, as SVG, in the colours of octavo/bench/picture.py: panels side by side, a line for each engine.

A curve may have a fainter second one above it: p95 beside the median. Every number also stands in the description.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from octavo.bench.figures import number
from octavo.bench.picture import STYLE

WIDTH, HEIGHT, MARGIN, TOP, GAP = 440, 220, 60, 64, 90  # of a panel's plot; the left edge; the title; between rows
COLOURS = ("#2f6f9f", "#c8693a", "#5b8c3a", "#8a5fb0")


@dataclass(frozen=True, slots=True)
class Curve:
    label: str
    values: list[float]
    upper: list[float] | None = None  # dashed


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    points: list[int]  # along the bottom, evenly spaced
    curves: list[Curve]


def draw(title: str, rows: Sequence[Sequence[Plot]], small_print: str) -> str:
    width = MARGIN + max(len(row) for row in rows) * (WIDTH + MARGIN)
    height = TOP + len(rows) * (HEIGHT + GAP) + 24
    body = [_text(20, 34, title, "title"), _text(20, height - 12, small_print, "small")]
    for line, row in enumerate(rows):
        for column, plot in enumerate(row):
            body += _plot(plot, MARGIN + column * (WIDTH + MARGIN), TOP + 24 + line * (HEIGHT + GAP))
    said = "; ".join(
        f"{plot.title}: {curve.label} " + ", ".join(f"{number(value)} at {point}" for point, value in zip(plot.points, curve.values))
        for row in rows
        for plot in row
        for curve in plot.curves
    )
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        'aria-labelledby="title description">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="description">{escape(said)}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{width}" height="{height}"/>',
        *body,
        "</svg>\n",
    ])  # fmt: skip


def _plot(plot: Plot, left: float, top: float) -> list[str]:
    most = _round_above(max(value for curve in plot.curves for value in [*curve.values, *(curve.upper or [])]))
    step = WIDTH / max(len(plot.points) - 1, 1)
    parts = [_text(left, top - 10, plot.title, "head")]
    for part in range(5):
        y = top + HEIGHT * (1 - part / 4)
        parts.append(f'<line class="seen" opacity="0.15" x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(left - 6, y + 4, number(most * part / 4), "small", "end"))
    parts += [_text(left + step * index, top + HEIGHT + 16, f"{point:,}", "small", "middle") for index, point in enumerate(plot.points)]
    for index, (curve, colour) in enumerate(zip(plot.curves, COLOURS)):
        for values, look in ((curve.values, ""), (curve.upper or [], ' stroke-dasharray="3 4" opacity="0.7"')):
            places = " ".join(f"{left + step * at:.1f},{top + HEIGHT * (1 - value / most):.1f}" for at, value in enumerate(values))
            parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2"{look} points="{places}"/>')
        key = left + index * 120
        parts.append(f'<rect x="{key}" y="{top + HEIGHT + 26}" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(_text(key + 18, top + HEIGHT + 36, curve.label, "label"))
    return parts


def _round_above(value: float) -> float:
    """The top of a scale whose quarters are round numbers."""
    quarter = value / 4 or 0.25
    power = 10.0 ** math.floor(math.log10(quarter))
    return 4 * power * next(step for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= quarter)


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
