"""`Figure` is a measured quantity with its samples. `Result` has the figures of one workload. Both are shown as tables."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

STATISTICS = {"median": 50, "min": 0, "max": 100, "p10": 10, "p90": 90, "p99": 99}  # name -> percentile


@dataclass(frozen=True, slots=True)
class Figure:
    unit: str
    samples: Sequence[float]

    def statistic(self, name: str) -> float:
        """Returns one of STATISTICS, by its name."""
        return self.at(STATISTICS[name])

    def at(self, percent: float) -> float:
        """Returns a percentile. Between two samples it is interpolated, as numpy does by default."""
        return self.percentiles([percent])[0]

    def percentiles(self, percents: Iterable[float]) -> list[float]:
        ordered, found = sorted(self.samples), []
        for percent in percents:
            place = (len(ordered) - 1) * percent / 100
            below = int(place)
            above = min(below + 1, len(ordered) - 1)
            found.append(ordered[below] + (ordered[above] - ordered[below]) * (place - below))
        return found

    def as_json(self) -> dict[str, object]:
        return {"unit": self.unit, **{name: self.statistic(name) for name in STATISTICS}, "samples": list(self.samples)}


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    facts: dict[str, int]  # what was run: numbers of requests, tokens, rounds
    figures: dict[str, Figure]
    each_request: list[dict[str, object]] = field(default_factory=list)  # what a client saw of each, if a server was measured

    def as_json(self) -> dict[str, object]:
        figures = {name: figure.as_json() for name, figure in self.figures.items()}
        each = {"each_request": self.each_request} if self.each_request else {}
        return {"name": self.name, **self.facts, "figures": figures, **each}


def words(name: str) -> str:
    """Returns the name of a figure as words: "first token" for first_token."""
    return name.replace("_", " ")


def number(value: float) -> str:
    """Returns a number for people, with about three digits."""
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


# -- tables


Lines = Sequence[Sequence[str]]  # the first line is the head, and the first cell of a line is its name
NONE = "-"  # for a figure that was not measured


def by_result(results: Sequence[Result], facts: Sequence[str], figures: Sequence[tuple[str, str]]) -> Lines:
    """Returns a table with a column for each result. `figures` are the rows: the name of a figure and one of STATISTICS."""
    lines = [["", *(result.name for result in results)]]
    lines += [[words(fact), *(f"{result.facts[fact]:,}" for result in results)] for fact in facts]
    for name, statistic in figures:
        found = [result.figures.get(name) for result in results]
        unit = next((figure.unit for figure in found if figure), None)
        if unit is not None:
            cells = [NONE if figure is None else number(figure.statistic(statistic)) for figure in found]
            lines.append([_label(name if statistic == "median" else f"{name} {statistic}", unit), *cells])
    return lines


def by_statistic(figures: dict[str, Figure], statistics: Sequence[str]) -> Lines:
    """Returns a table of one result, with a column for each statistic."""
    lines = [["", *statistics]]
    for name, figure in figures.items():
        lines.append([_label(name, figure.unit), *(number(figure.statistic(statistic)) for statistic in statistics)])
    return lines


def _label(name: str, unit: str) -> str:
    return f"{words(name)}, {unit}" if unit else words(name)


def aligned(lines: Lines) -> str:
    """Returns the table as text for a terminal."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(max(width, 9)) for cell, width in zip(line[1:], widths[1:]))]) for line in lines
    )
