"""What a benchmark found, as sections of a report: the table, bars, how times are spread, and what happened when."""

from collections.abc import Iterable, Sequence

from octavo.bench.figures import Result, words
from octavo.bench.picture import Panel, within_report
from octavo.bench.table import Lines
from octavo.report.charts import Curve, curves
from octavo.report.document import Section, pictured, said, table

PERCENTS = [half / 2 for half in range(201)]
ENOUGH = 3  # samples below which a spread says nothing
MOST_POINTS = 400  # of a curve


def sections(results: Sequence[Result], head: str, lines: Lines, panels: Sequence[Panel]) -> list[Section]:
    figures = Section("Figures", [said(head), table(lines, "figures"), pictured(within_report(panels))])
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
    """Of requests that were seen from outside."""
    asked = result.each_request
    lines = [_counted("arrived", (one["due"] for one in asked))]
    lines.append(_counted("answered", (one["ended"] for one in asked if one["error"] is None)))
    if any("within_slo" in one for one in asked):
        lines.append(_counted("answered within the SLO", (one["ended"] for one in asked if one["within_slo"])))
    text = "How far answers lie behind arrivals is how many requests are under way; what keeps within the SLO is goodput."
    return Section(f"{result.name}: the course of the run", [pictured(curves(lines, "seconds", "requests so far"), text)])


def _counted(label: str, times: Iterable[object]) -> Curve:
    """How many there were by each moment."""
    ordered = sorted(time for time in times if isinstance(time, float | int))
    every = -(-len(ordered) // MOST_POINTS) or 1
    kept = [(time, float(number)) for number, time in enumerate(ordered, 1) if number % every == 0 or number == len(ordered)]
    return Curve(f"{label}: {len(ordered):,}", [(0.0, 0.0), *kept])
