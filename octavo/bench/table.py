"""Tables of figures: workloads side by side, or one workload with a column for each statistic; `aligned` for the terminal."""

from collections.abc import Sequence

from octavo.bench.figures import Figure, Result, number, words

Lines = Sequence[Sequence[str]]  # the first is the head, the first cell of each its name
NONE = "-"  # not measured here


def by_result(results: Sequence[Result], facts: Sequence[str], figures: Sequence[tuple[str, str]]) -> Lines:
    """A column for each result; `figures` are the rows: the name of a figure and which statistic of it."""
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
    lines = [["", *statistics]]
    for name, figure in figures.items():
        lines.append([_label(name, figure.unit), *(number(figure.statistic(statistic)) for statistic in statistics)])
    return lines


def _label(name: str, unit: str) -> str:
    return f"{words(name)}, {unit}" if unit else words(name)


def aligned(lines: Lines) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(max(width, 9)) for cell, width in zip(line[1:], widths[1:]))]) for line in lines
    )
