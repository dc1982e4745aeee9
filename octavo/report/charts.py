"""Draws the pictures of reports as SVG: a bar of parts, curves over two axes, and a strip of what happened when.

Every picture also says in words what it shows, for people who cannot see it. No two things differ by colour alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.report.document import Html, tag

WIDTH = 760
LEFT, RIGHT, TOP, BOTTOM, PLOT = 64, 20, 30, 44, 200  # margins around curves, and the height of their plot
LABELS = 120  # width of the labels left of a strip
LANE = 26
COLUMNS = 300  # of a strip at most; if there are more steps, several share a column
STYLES = 6  # that parts and curves have; then they repeat


@dataclass(frozen=True, slots=True)
class Part:
    label: str
    value: float
    shown: str  # the value as text


@dataclass(frozen=True, slots=True)
class Curve:
    label: str
    points: Sequence[tuple[float, float]]  # from left to right


def parts_bar(parts: Sequence[Part]) -> Html:
    """Draws one bar that is divided into parts, and a legend below it."""
    parts = [part for part in parts if part.value > 0]
    whole = sum(part.value for part in parts)
    rects, legend, x = [], [], 0.0
    for index, part in enumerate(parts):
        width, kind = WIDTH * part.value / whole, f"part-{index % STYLES}"
        rects.append(tag("rect", tag("title", f"{part.label}: {part.shown}"), class_=kind, x=x, y=0, width=max(width, 1.0), height=40))
        column, line = index % 3, index // 3
        at, y = column * WIDTH / 3, 58.0 + line * 22
        legend.append(tag("rect", class_=kind, x=at, y=y - 10, width=12, height=12))
        legend.append(tag("text", f"{part.label}: {part.shown}", x=at + 18, y=y))
        x += width
    description = "; ".join(f"{part.label} {part.shown}, {part.value / whole:.0%}" for part in parts)
    return _svg([*rects, *legend], 64 + 22 * ((len(parts) - 1) // 3), description)


def curves(drawn: Sequence[Curve], across: str, up: str, logarithmic: bool = False) -> Html:
    """Draws curves over two axes. `logarithmic`: both axes are, and points at or below zero are left out."""
    shown = [Curve(one.label, [p for p in one.points if not logarithmic or min(p) > 0]) for one in drawn]
    points = [point for one in shown for point in one.points]
    axis = _Logarithmic if logarithmic else _Linear
    xs, ys = axis([x for x, _ in points]), axis([y for _, y in points])
    height = TOP + PLOT + BOTTOM - 16 + 20 * len(shown)

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - RIGHT) * xs.share(point[0]), TOP + PLOT * (1 - ys.share(point[1]))

    body = []
    for tick in ys.ticks:
        y = place((xs.low, tick))[1]
        body.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
        body.append(tag("text", _number(tick), class_="small", x=LEFT - 8, y=y + 4, text_anchor="end"))
    for tick in xs.ticks:
        body.append(tag("text", _number(tick), class_="small", x=place((tick, ys.low))[0], y=TOP + PLOT + 16, text_anchor="middle"))
    body.append(tag("line", class_="axis", x1=LEFT, x2=WIDTH - RIGHT, y1=TOP + PLOT, y2=TOP + PLOT))
    body.append(tag("text", up, class_="small", x=LEFT, y=TOP - 14))
    body.append(tag("text", across, x=WIDTH - RIGHT, y=TOP + PLOT + 36, text_anchor="end"))
    for index, one in enumerate(shown):
        kind, y = f"curve curve-{index % STYLES}", TOP + PLOT + BOTTOM - 12.0 + 20 * index
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, one.points))
        body.append(tag("polyline", class_=kind, points=path))
        body.append(tag("line", class_=kind, x1=LEFT, x2=LEFT + 30, y1=y, y2=y))
        body.append(tag("text", one.label, x=LEFT + 40, y=y + 4))
    description = "; ".join(f"{one.label}: {_ends(one.points)}" for one in shown)
    return _svg(body, height, f"{up} over {across}. {description}")


def strip(lanes: Sequence[tuple[str, Sequence[int]]], across: str) -> Html:
    """Draws a lane for each kind of event, with a mark for each step in which it happened. More events make a taller mark."""
    steps = max(len(counts) for _, counts in lanes)
    columns = min(COLUMNS, steps)
    width = (WIDTH - LABELS - 60) / columns
    body = []
    for index, (label, counts) in enumerate(lanes):
        base = LANE * (index + 1)
        sums = [0] * columns
        for step, count in enumerate(counts):
            sums[step * columns // steps] += count
        most = max(sums) or 1
        body.append(tag("text", label, x=LABELS - 8, y=base - 6, text_anchor="end"))
        body.append(tag("line", class_="grid", x1=LABELS, x2=WIDTH - 60, y1=base, y2=base))
        for column, count in enumerate(sums):
            if count:
                tall = 4 + 16 * count / most
                x = LABELS + column * width
                body.append(tag("rect", class_="mark", x=x, y=base - tall, width=max(width - 0.5, 0.8), height=tall))
        body.append(tag("text", f"{sum(counts):,}", class_="small", x=WIDTH - 54, y=base - 6))
    body.append(tag("text", f"{across}, {steps:,} in all", class_="small", x=LABELS, y=LANE * len(lanes) + 18))
    description = ", ".join(f"{label} {sum(counts):,}" for label, counts in lanes)
    return _svg(body, LANE * len(lanes) + 26, f"over {steps:,} {across}: {description}")


class _Linear:
    """An axis from zero to a little above the greatest value."""

    def __init__(self, values: Sequence[float]) -> None:
        most = max(values, default=0.0) or 1.0
        power = 10.0 ** math.floor(math.log10(most))
        step = next(power * part for part in (0.2, 0.5, 1.0, 2.0) if power * part * 6 >= most)
        self.low, self.high = 0.0, step * math.ceil(most / step - 1e-9)
        self.ticks = [step * number for number in range(round(self.high / step) + 1)]

    def share(self, value: float) -> float:
        return value / self.high


class _Logarithmic:
    """An axis from one power of two to another, with at most nine ticks."""

    def __init__(self, values: Sequence[float]) -> None:
        powers = [math.log2(value) for value in values] or [0.0]
        low, high = math.floor(min(powers)), math.ceil(max(powers))
        high = max(high, low + 1)
        every = -(-(high - low) // 8)
        self.low, self._low, self._high = 2.0**low, low, high
        self.ticks = [2.0**power for power in range(low, high + 1, every)]

    def share(self, value: float) -> float:
        return (math.log2(value) - self._low) / (self._high - self._low)


def _ends(points: Sequence[tuple[float, float]]) -> str:
    return " to ".join(f"{_number(y)} at {_number(x)}" for x, y in (points[0], points[-1])) if points else "nothing"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _svg(body: Sequence[Html], height: float, description: str) -> Html:
    return tag("svg", *body, viewBox=f"0 0 {WIDTH} {height:.0f}", role="img", aria_label=description)
