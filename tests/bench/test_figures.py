"""From what was seen to what is said: percentiles, throughput, the times in a life record, tables and pictures."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.figures import STATISTICS, Figure, Result, aligned, by_result, number
from octavo.bench.measure import Round, figures_of
from octavo.bench.picture import Bar, Panel, draw
from octavo.bench.startup import PHASE
from octavo.bench.workload import Workload
from octavo.messages import LifeRecord
from octavo.outputs import CompletionOutput, RequestOutput

finite = st.floats(-1e9, 1e9)


@given(st.lists(finite, min_size=1, max_size=40), st.floats(0, 100))
def test_percentiles_are_numpys(samples: list[float], percent: float) -> None:
    figure = Figure("s", samples)
    assert figure.at(percent) == pytest.approx(np.percentile(samples, percent), rel=1e-9, abs=1e-6)
    wanted = np.percentile(samples, list(STATISTICS.values()))
    assert [figure.statistic(name) for name in STATISTICS] == pytest.approx(wanted, rel=1e-9, abs=1e-6)
    assert (figure.statistic("min"), figure.statistic("max")) == (min(samples), max(samples))


def output(prompt: int, tokens: int, times: tuple[float, float, float, float], cached: int = 0, preemptions: int = 0) -> RequestOutput:
    life = LifeRecord(*times, preemptions=preemptions)
    return RequestOutput("0", None, [0] * prompt, None, [CompletionOutput(0, token_ids=[0] * tokens)], True, cached, life)


def test_figures_follow_from_the_clock_and_the_life_records() -> None:
    workload = Workload("two", [([0] * 100, 11), ([0] * 60, 1)])
    outputs = [output(100, 11, (10.0, 10.5, 11.0, 13.0)), output(60, 1, (10.0, 11.5, 12.0, 12.0), cached=48, preemptions=2)]
    figures = figures_of(workload, [Round(4.0, outputs), Round(2.0, outputs)])
    assert {name: list(figure.samples) for name, figure in figures.items() if name != "peak_memory"} == {
        "output_throughput": [3, 6],
        "input_throughput": [40, 80],
        "request_throughput": [0.5, 1],
        "wall": [4, 2],
        "running_at_once": [0.75, 1.5],  # 2.5 s and 0.5 s of running, in 4 s and in 2 s
        "cache_hit_rate": [30, 30],
        "preemptions": [2, 2],
        "queue": [500, 1500, 500, 1500],
        "first_token": [1000, 2000, 1000, 2000],
        "per_output_token": [200, 200],  # one token has none
        "end_to_end": [3000, 2000, 3000, 2000],
    }
    assert 10 < figures["peak_memory"].samples[0] < 100_000  # MiB, of this process


def test_one_stream_decodes_without_its_prefill() -> None:
    workload = Workload("single", [([0] * 128, 128)])
    done = Round(5.08, [output(128, 128, (0.0, 0.0, 1.0, 5.0))], first_token_alone=1.0)
    noise = replace(done, first_token_alone=6.0)  # longer than the whole: no rate follows
    assert figures_of(workload, [done, noise])["decode_throughput"].samples == pytest.approx([127 / 4.08])
    assert "decode_throughput" not in figures_of(workload, [noise])


def test_a_table_has_a_column_a_result_and_says_what_was_not_measured() -> None:
    one = Result("one", {"requests": 32}, {"wall": Figure("s", [1.0, 2.0, 9.0])})
    two = Result("two", {"requests": 1024}, {"wall": Figure("s", [1234.5]), "queue": Figure("ms", [0.25, 0.75])})
    lines = by_result([one, two], ["requests"], [("wall", "median"), ("queue", "p90"), ("preemptions", "median")])
    rows = aligned(lines).splitlines()
    assert [row.split() for row in rows] == [
        ["one", "two"],
        ["requests", "32", "1,024"],
        ["wall,", "s", "2", "1,234"],
        ["queue", "p90,", "ms", "-", "0.70"],
    ]
    assert len({len(row) for row in rows}) == 1


def test_numbers_for_people_keep_about_three_digits() -> None:
    assert [number(value) for value in (0.123, 3, 12.34, 999.96, 1234567.8)] == ["0.12", "3", "12.3", "1000.0", "1,234,568"]


def test_a_picture_is_valid_says_its_numbers_in_words_and_escapes_what_it_is_given() -> None:
    bars = [Bar("a<b & 'c'", 50.0, 40.0, 100.0), Bar("x" * 60, 0.0, 0.0, 0.0)]
    root = ET.fromstring(draw("T & <U>", [Panel("speed, tokens/s", bars)], ["octavo bench " + "word " * 60, "machine"]))
    name = "{http://www.w3.org/2000/svg}"
    assert root.get("role") == "img" and root.findtext(f"{name}title") == "T & <U>"
    assert root.findtext(f"{name}desc", "").startswith("speed, tokens/s: a<b & 'c' 50, xxx")
    widths = [float(rect.get("width", "0")) for rect in root.iter(f"{name}rect") if rect.get("class") == "bar"]
    (line,) = root.iter(f"{name}line")
    assert widths[1] == 1  # nothing is still something to see
    assert float(line.get("x2", "0")) - float(line.get("x1", "0")) == pytest.approx(1.2 * widths[0], abs=0.2)
    small = [text.text or "" for text in root.iter(f"{name}text") if text.get("class") == "small"]
    assert len(small) == 4 and max(map(len, small)) <= 120
    assert "prefers-color-scheme: dark" in root.findtext(f"{name}style", "")


def test_phases_are_read_from_the_log() -> None:
    log = "12:00:00 INFO Model loading took 0.25 GiB and 0.31 seconds", "12:00:01 INFO init engine took 1.20 seconds", "12:00:01 INFO ready"
    found = [PHASE.search(line) for line in log]
    assert [(one["name"], one["seconds"]) for one in found if one] == [("Model loading", "0.31"), ("init engine", "1.20")]
