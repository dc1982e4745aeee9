"""From samples to tables: medians, ratios of Octavo against each peer and against the best of each column, shares of the roofline."""

import statistics
from collections.abc import Mapping, Sequence

from octavo.bench.figures import number

Sample = Mapping[str, float]  # column -> value, of one process
COLUMNS = {
    "single": "single, out tok/s",
    "prefill": "prefill, in tok/s",
    "batch32": "batch32, out tok/s",
    "shared32": "shared32, out tok/s",
    "first_token": "start to first token, s",
    "memory_single": "peak memory, one stream, MiB",
    "memory": "peak memory, all loads, MiB",
}
LESS_IS_BETTER = frozenset({"first_token", "memory_single", "memory"})
AIMS = {  # against the best peer of the same run
    "x86_64": {"single": 1.2, "prefill": 1.5, "batch32": 2.3, "shared32": 2.1},
    "aarch64": {"single": 1.1, "prefill": 1.5, "batch32": 2.5, "shared32": 4.0},
}
NONE = "-"


def medians(samples: Sequence[Sample]) -> dict[str, float]:
    """Of each column that was measured at all."""
    columns = [column for column in COLUMNS if any(column in sample for sample in samples)]
    return {column: statistics.median(sample[column] for sample in samples if column in sample) for column in columns}


def ratio(ours: Sequence[Sample], theirs: Sequence[Sample], column: str) -> float | None:
    """How many times better we are: the median over pairs, which ran one after the other. Above 1 is better in every column."""
    pairs = [(a[column], b[column]) for a, b in zip(ours, theirs) if column in a and column in b]
    each = [b / a if column in LESS_IS_BETTER else a / b for a, b in pairs]
    return statistics.median(each) if each else None


def best(peers: Mapping[str, Sequence[Sample]], column: str) -> str | None:
    """The peer with the best median."""
    found = {name: medians(samples)[column] for name, samples in peers.items() if column in medians(samples)}
    if not found:
        return None
    return min(found, key=found.__getitem__) if column in LESS_IS_BETTER else max(found, key=found.__getitem__)


def figures_table(samples: Mapping[str, Sequence[Sample]], failed: Mapping[str, str]) -> str:
    """`samples` by the engine's name; `failed`: why an engine has none."""
    rows = [[name, *(_cell(medians(found).get(column)) for column in COLUMNS)] for name, found in samples.items()]
    rows += [[name, reason, *[NONE] * (len(COLUMNS) - 1)] for name, reason in failed.items()]
    return markdown(["", *COLUMNS.values()], rows)


def ratios_table(name: str, machine: str, ours: Mapping[str, Sequence[Sample]], peers: Mapping[str, Sequence[Sample]]) -> str:
    """`ours`: for each peer, the samples of ours that ran right before the peer's; then the best of each column, and the machine's aim."""
    wanted = AIMS.get(machine, {})
    rows = [[f"against {peer}", *(_times(ratio(ours[peer], theirs, column)) for column in COLUMNS)] for peer, theirs in peers.items()]
    against_best, aims = [], []
    for column in COLUMNS:
        peer = best(peers, column)
        found = None if peer is None else ratio(ours[peer], peers[peer], column)
        against_best.append(NONE if found is None else f"**{_times(found)}** ({peer})")
        aims.append(f"{wanted[column]}x" + _verdict(found, wanted[column]) if column in wanted else NONE)
    return markdown([name, *COLUMNS.values()], [*rows, ["against the best", *against_best], ["aim", *aims]])


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _verdict(found: float | None, aim: float) -> str:
    return "" if found is None else ", reached" if found >= aim else ", missed"


def _cell(value: float | None) -> str:
    return NONE if value is None else number(value)


def _times(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}x"
