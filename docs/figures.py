"""Draws the charts of docs/figures.md, and writes the table in README.md and the dates there and in docs/figures.md. Every number comes
from a table of docs/performance.md.

    python docs/figures.py

Run it after a change of those tables; a test compares what is written with what it would write.
"""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parent

CPU_TABLE = "single, out tok/s"  # headings that tell the tables of docs/performance.md apart
PAIRS_TABLE = "median of three pairs"
GPU_TABLE = "share of the floor"

CPU_LOADS = {
    "single": "One stream",
    "prefill": "Prompts in",
    "batch32": "32 requests at once",
    "shared32": "32 requests that share a prefix",
}
SAME_LOADS = {  # in words -> its name in the table of the CPU, and in that of the GPU
    "one stream": ("single", "one stream"),
    "many requests at once (CPU 32, GPU 256)": ("batch32", "256 requests"),
    "1,024 requests at once": ("", "1,024 requests"),
    "prompts in": ("prefill", "prompts in"),
    "requests that share a prefix": ("shared32", "shared prefix"),
}
GPU_MODELS = {  # the row of the table -> its name in a chart, and the loads that were run
    "0.6B": ("Qwen3-0.6B", ("one stream", "256 requests", "1,024 requests", "prompts in", "shared prefix")),
    "8B": ("Qwen3-8B", ("one stream", "256 requests", "1,024 requests", "prompts in", "shared prefix")),
    "30B-A3B": ("Qwen3-30B-A3B", ("one stream", "256 requests", "prompts in")),
    "gpt-oss-20b": ("gpt-oss-20b", ("one stream", "256 requests", "prompts in")),
}
NOT_RUN = "not run"
TEXT_WIDTH = 120
CPU_PEERS = {  # the row of the table -> the name in a chart
    "Octavo (15 runs)": "Octavo",
    "llama.cpp (3)": "llama.cpp",
    "llama.cpp, flash attention (3)": "llama.cpp, flash att.",
    "OpenVINO GenAI (3)": "OpenVINO GenAI",
    "vLLM CPU 0.32, compiled (3)": "vLLM CPU",
    "transformers `generate` (3)": "transformers",
}
CPU_MACHINE = "Two cores of a Xeon (Sapphire Rapids class, AVX-512 and AMX), SmolLM2-135M-Instruct"
GPU_MACHINE = "H200, random weights in the shapes of these models, bfloat16 (gpt-oss-20b: MXFP4)"

Table = dict[str, dict[str, str]]  # row -> heading -> cell


# -- the numbers


def tables(markdown: str) -> list[Table]:
    found = re.findall(r"(?:^\|.*\n)+", markdown, re.MULTILINE)
    return [_table([_cells(line) for line in text.splitlines()]) for text in found]


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("**", "") for cell in line.strip().strip("|").split(" |")]


def _table(lines: Sequence[Sequence[str]]) -> Table:
    heads, rows = lines[0], lines[2:]
    return {row[0]: dict(zip(heads, row)) for row in rows}


def table_with(heading: str, markdown: str) -> Table:
    (found,) = [table for table in tables(markdown) if any(heading in head for head in next(iter(table.values())))]
    return found


def column(row: dict[str, str], name: str) -> str:
    return next(cell for head, cell in row.items() if head.startswith(name))


def value(cell: str) -> float:
    """The first number of a cell: the median, where a range follows it."""
    found = re.match(r"[\d,.]+", cell)
    if found is None:
        raise ValueError(f"no number in {cell!r}")
    return float(found[0].replace(",", ""))


def spread(cell: str) -> tuple[float, float] | None:
    found = re.search(r"\(([\d,.]+)-([\d,.]+)\)", cell)
    return None if found is None else (float(found[1].replace(",", "")), float(found[2].replace(",", "")))


# -- charts

WIDTH, EDGE, GAP, LABEL, NUMBER = 920, 24, 36, 138, 62
ROW, HEAD, TITLE, SMALL = 22, 40, 44, 16
STYLE = """
  svg { color-scheme: light dark; font-family: system-ui, sans-serif; }
  .back { fill: #faf7f0; } text { fill: #211e1a; font-size: 12px; } .title { font-size: 17px; font-family: Georgia, serif; }
  .head { font-weight: 600; font-size: 13px; } .small { fill: #655e54; font-size: 11px; }
  .peer { fill: #b9ae99; } .ours { fill: #a3301c; } .seen { stroke: #211e1a; stroke-width: 1.2; }
  @media (prefers-color-scheme: dark) {
    .back { fill: #171513; } text { fill: #ebe5d9; } .small { fill: #a79f91; } .peer { fill: #6b6355; } .ours { fill: #ef8a70; }
    .seen { stroke: #ebe5d9; }
  }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: float
    seen: tuple[float, float] | None = None  # the least and the most of all runs


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    bars: list[Bar]


def draw(title: str, panels: Sequence[Panel], small_print: Sequence[str]) -> str:
    """An SVG with two panels in a row. Its description has every number, for readers who cannot see the bars."""
    height_of_row = HEAD + ROW * max(len(panel.bars) for panel in panels)
    body = [_text(EDGE, 32, title, "title")]
    for index, panel in enumerate(panels):
        body += _panel(panel, EDGE + index % 2 * (WIDTH / 2 - EDGE + GAP / 2), TITLE + index // 2 * height_of_row)
    bottom = TITLE + (len(panels) + 1) // 2 * height_of_row + 24
    body += [_text(EDGE, bottom + SMALL * index, line, "small") for index, line in enumerate(small_print)]
    height = bottom + SMALL * len(small_print)
    said = "; ".join(f"{panel.title}: " + ", ".join(f"{bar.label} {bar.value:,g}" for bar in panel.bars) for panel in panels)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title description">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="description">{escape(said)}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{height}"/>',
        *body,
        "</svg>\n",
    ])  # fmt: skip


def _panel(panel: Panel, x: float, y: float) -> list[str]:
    longest = max(max(bar.value, *(bar.seen or (0.0,))) for bar in panel.bars)
    left = x + LABEL
    scale = (WIDTH / 2 - EDGE - GAP / 2 - LABEL - NUMBER) / longest
    parts = [_text(x, y + HEAD - 12, panel.title, "head")]
    for index, bar in enumerate(panel.bars):
        top = y + HEAD + ROW * index
        kind = "ours" if bar.label == "Octavo" else "peer"
        parts.append(_text(left - 8, top + 12, bar.label, "label", "end"))
        parts.append(f'<rect class="{kind}" x="{left:.1f}" y="{top}" width="{bar.value * scale:.1f}" height="16" rx="2"/>')
        end = bar.value
        if bar.seen:
            low, end = bar.seen
            parts.append(f'<line class="seen" x1="{left + low * scale:.1f}" x2="{left + end * scale:.1f}" y1="{top + 8}" y2="{top + 8}"/>')
        parts.append(_text(left + max(bar.value, end) * scale + 7, top + 12, f"{bar.value:,g}", "value"))
    return parts


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def cpu_chart(markdown: str) -> str:
    rows = table_with(CPU_TABLE, markdown)
    panels = []
    for load, said in CPU_LOADS.items():
        cells = {name: column(rows[row], load) for row, name in CPU_PEERS.items()}
        panels.append(Panel(f"{said} ({load}), tokens/s", [Bar(name, value(cell), spread(cell)) for name, cell in cells.items()]))
    small = [
        f"{CPU_MACHINE}. Weights: Q4_1 (Octavo, llama.cpp), int8 (OpenVINO), bfloat16 (others).",
        f"Medians; the thin line runs from the slowest to the fastest run. Recorded {recorded(rows)}.",
    ]
    return draw("On two CPU cores", panels, small)


def gpu_chart(markdown: str) -> str:
    rows = table_with(GPU_TABLE, markdown)
    panels = []
    for pair in (("0.6B", "8B"), ("30B-A3B", "gpt-oss-20b")):
        for load in GPU_MODELS[pair[0]][1]:
            for model in pair:
                bars = [Bar(name, rate) for name, rate in rates(rows[f"{model}, {load}"]).items()]
                panels.append(Panel(f"{GPU_MODELS[model][0]}, {load}, tokens/s", bars))
    small = [f"{GPU_MACHINE}. vLLM 0.25.1, nano-vllm with FA3.", f"One round each, after a warm-up. Recorded {recorded(rows)}."]
    return draw("On one H200", panels, small)


def rates(row: dict[str, str]) -> dict[str, float]:
    """Engine -> tokens per second, of those that were run."""
    cells = {name: column(row, name) for name in ("Octavo", "vLLM", "nano-vllm")}
    return {name: value(cell) for name, cell in cells.items() if cell != NOT_RUN}


def recorded(rows: Table) -> str:
    """The first and the last day on which a row was recorded."""
    days = sorted(day for row in rows.values() for day in re.findall(r"\d{4}-\d\d-\d\d", row["recorded"]))
    return days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"


# -- tables


Cells = dict[str, tuple[float, str, float, float]]  # load -> Octavo, the fastest other engine, its rate, their ratio


def against_the_fastest(markdown: str) -> str:
    """One row a load, one column a model: Octavo, and the fastest of its peers. Below: where that one is faster, and the dates."""
    places = [_cpu_cells(markdown), *(_gpu_cells(markdown, model) for model in GPU_MODELS)]
    titles = ["two CPU cores, SmolLM2-135M", *(f"H200, {name}" for name, _ in GPU_MODELS.values())]
    lines = [f"| tokens/s | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for load, (on_cpu, on_gpu) in SAME_LOADS.items():
        cells = [_cell(places[0].get(on_cpu), "in pairs "), *(_cell(place.get(on_gpu)) for place in places[1:])]
        lines.append(f"| {load} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", textwrap.fill(f"{_slower(places, titles)} {dates(markdown)}", TEXT_WIDTH, break_on_hyphens=False)])


def _cell(found: tuple[float, str, float, float] | None, how: str = "") -> str:
    if found is None:
        return NOT_RUN
    ours, name, best, ratio = found
    return f"**{ours:,g}**, {name} {best:,g} ({how}{ratio:.2f}x)"


def _slower(places: Sequence[Cells], titles: Sequence[str]) -> str:
    """Names every load on which another engine is faster."""
    words = {name: load for load, names in SAME_LOADS.items() for name in names}
    cells = [(title, words[load], cell) for place, title in zip(places, titles) for load, cell in place.items()]
    found = [f"{load} on {title} ({name}, {ratio:.2f}x)" for title, load, (_, name, _, ratio) in cells if ratio < 1]
    return f"Another engine is faster at: {'; '.join(found)}."


def dates(markdown: str) -> str:
    cpu, gpu = (recorded(table_with(heading, markdown)) for heading in (CPU_TABLE, GPU_TABLE))
    return f"Recorded on the CPU {cpu}, on the H200 {gpu}."


def _cpu_cells(markdown: str) -> Cells:
    """The ratio is the median over runs that followed each other, so it is not the quotient of the two medians."""
    rows, pairs = table_with(CPU_TABLE, markdown), table_with(PAIRS_TABLE, markdown)
    names = {"llama.cpp": "llama.cpp (3)", "OpenVINO": "OpenVINO GenAI (3)", "vLLM": "vLLM CPU 0.32, compiled (3)"}
    cells: Cells = {}
    for load in CPU_LOADS:
        found = re.fullmatch(r"([\d.]+)x \((.*)\)", column(pairs["the best of each column"], load))
        assert found is not None
        ours, best = (value(column(rows[row], load)) for row in ("Octavo (15 runs)", names[found[2]]))
        cells[load] = ours, found[2], best, float(found[1])
    return cells


def _gpu_cells(markdown: str, model: str) -> Cells:
    rows = table_with(GPU_TABLE, markdown)
    cells: Cells = {}
    for load in GPU_MODELS[model][1]:
        found = rates(rows[f"{model}, {load}"])
        ours = found.pop("Octavo")
        name, best = max(found.items(), key=lambda peer: peer[1])
        cells[load] = ours, name, best, ours / best
    return cells


def in_place(document: str, text: str) -> str:
    """The document with `text` between its marks."""
    start, end = "<!-- figures: made by docs/figures.py -->\n", "<!-- end of figures -->"
    before, _, rest = document.partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError("the document has no marks for figures")
    return f"{before}{start}{text}\n{end}{after}"


def made() -> dict[Path, str]:
    """Every file this script writes, with its text."""
    markdown = (DOCS / "performance.md").read_text()
    readme, page = DOCS.parent / "README.md", DOCS / "figures.md"
    return {
        DOCS / "figures_cpu.svg": cpu_chart(markdown),
        DOCS / "figures_gpu.svg": gpu_chart(markdown),
        readme: in_place(readme.read_text(), against_the_fastest(markdown)),
        page: in_place(page.read_text(), dates(markdown)),
    }


if __name__ == "__main__":
    for path, text in made().items():
        path.write_text(text)
        print(path.relative_to(DOCS.parent))
