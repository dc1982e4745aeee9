"""`--report`: a file of HTML that says what the terminal and the JSON say, whatever models are called."""

import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.figures import number
from octavo.cli.main import _typed, main
from octavo.engine import verify as proof
from octavo.errors import VerifyError
from octavo.log import logger
from octavo.report.charts import LABELS, WIDTH, Curve, Part, curves, parts_bar, strip
from octavo.report.document import Html, tag
from octavo.sizing.memory_plan import shown
from tests.cli.processes import FAKE
from tests.support.models import stories260k, tiny_model
from tests.support.report_file import HOSTILE, ReportFile
from tests.support.scripted_server import Script, ScriptedServer, spoken


@pytest.fixture(autouse=True)
def log_handlers_of_a_test_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "handlers", [])


# promise: octavo-plan-octavo
def test_a_plan_says_where_the_memory_goes_and_how_many_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.html"
    assert main(["plan", "--memory", "2g", "--json", "--report", str(file)]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    report = ReportFile(file)
    rows = report.rows()
    for name, key in (("weights", "weights_bytes"), ("KV cache", "kv_cache_bytes"), ("rows", "rows_bytes"), ("total", "total_bytes")):
        assert rows[name][0] == shown(record[key])
    assert f"KV cache {shown(record['kv_cache_bytes'])}, {record['kv_cache_bytes'] / 2**31:.0%}" in report.labels[0]
    held = record["num_blocks"] - 1
    assert rows["16"] == [f"{held:,}", str(record["max_num_seqs"])]
    assert rows[f"{record['max_model_len']:,}"] == [str(held // (record["max_model_len"] // 16))] * 2
    assert report.of("p")[1].startswith("It fits: ") and report.of("h1") == ["SmolLM2-135M-Instruct"]
    facts = dict(zip(report.of("dt"), report.of("code") + report.of("dd"), strict=True))
    assert facts["command"] == f"octavo plan --memory 2g --json --report {file}"
    assert list(facts) == ["command", "model", "machine", "octavo", "date"]
    assert main(["plan", "--memory", "200m", "--report", str(file)]) == 1
    assert ReportFile(file).of("p")[1].startswith("It does not fit: ")


# promise: octavo-plan-octavo
def test_a_name_is_text_whatever_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, file = tmp_path / f"{HOSTILE}\x1b[31m\u202e\udcff", tmp_path / "plan.html"
    folder.mkdir()
    shutil.copy(stories260k(tmp_path / "stories") / "config.json", folder)
    assert main(["plan", str(folder), "--memory", "2g", "--report", str(file)]) == 0
    report = ReportFile(file)
    assert report.of("h1") == [HOSTILE + r"\x1b[31m\u202e\udcff"]
    assert HOSTILE in report.of("title")[0] and HOSTILE in report.of("code")[0]


def figures_of(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "out.json").read_text())["results"]
    return found


# promise: octavo-plan-octavo
def test_a_benchmark_shows_its_figures_and_how_times_are_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in FAKE.items():
        monkeypatch.setenv(name, value)
    files = ["--json", str(tmp_path / "out.json"), "--report", str(tmp_path / "out.html")]
    lengths = ["--input-len", "16", "--output-len", "4", "--rounds", "2"]
    assert main(["bench", "throughput", *lengths, "--num-prompts", "5", *files]) == 0
    (result,), report = figures_of(tmp_path), ReportFile(tmp_path / "out.html")
    rows = report.rows()
    for label, name, statistic in (
        ("output throughput, tokens/s", "output_throughput", "median"),
        ("first token p90, ms", "first_token", "p90"),
        ("end to end p99, ms", "end_to_end", "p99"),
    ):
        assert rows[label] == [number(result["figures"][name][statistic])]
    assert report.of("p")[1] == f"16 in, 4 out: {number(result['figures']['output_throughput']['median'])} tokens/s"
    spread = next(label for label in report.labels if "end to end, ms" in label)
    assert f"100 at {result['figures']['end_to_end']['max']:.3g}" in spread.replace(",", "")
    assert main(["bench", "latency", *lengths, "--batch-size", "3", *files]) == 0
    (result,), report = figures_of(tmp_path), ReportFile(tmp_path / "out.html")
    assert report.rows()["first token, ms"][1] == number(result["figures"]["first_token"]["median"])


# promise: octavo-plan-octavo
def test_a_server_of_any_name_is_shown_with_arrivals_and_goodput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = Script(status=429, error={"message": "too many", "code": "overloaded"})
    scripts = iter([spoken(0), spoken(0, 0, 0), spoken(1.6, 0, 0), refused, spoken(0, 0, 0)])
    words = ["--num-prompts", "4", "--concurrency", "1", "--output-len", "3", "--slo", "ttft:1500ms", "--api-key", "secret"]
    files = ["--json", str(tmp_path / "out.json"), "--report", str(tmp_path / "out.html")]
    with ScriptedServer(lambda _body: next(scripts), models=("<script>alert(1)</script>",)) as server:
        assert main(["bench", "serve", "--url", server.url, *words, *files]) == 0
    (result,) = figures_of(tmp_path)
    assert [one["within_slo"] for one in result["each_request"]] == [True, False, False, True]
    (tmp_path / "out.html").write_text((tmp_path / "out.html").read_text().replace(server.url, "SERVER"))  # which is no link
    report = ReportFile(tmp_path / "out.html")
    assert report.of("h1") == ["<script>alert(1)</script>"]
    assert report.rows()["goodput, requests/s"] == [number(result["figures"]["goodput"]["median"])]
    course = next(label for label in report.labels if "requests so far" in label)
    assert "arrived: 4" in course and "answered: 3" in course and "answered within the SLO: 2" in course
    assert "secret" not in report.source + (tmp_path / "out.json").read_text()


# promise: octavo-plan-octavo
def test_a_proof_shows_its_verdict_and_its_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tiny_model(tmp_path / "model", "Qwen3ForCausalLM", seed=5))
    file = tmp_path / "proof.html"
    words = ["verify", folder, "--dtype", "float32", "--requests", "30", "--block-size", "4", "--report", str(file)]
    assert main(words) == 0
    told = {line[:32].strip(): line[32:].split() for line in capsys.readouterr().out.splitlines()[2:]}
    report = ReportFile(file)
    assert report.of("p")[1] == "Verified: paged and contiguous caches agree bit for bit."
    assert report.rows() == told
    strips = [label for label in report.labels if label.startswith("over ")]
    for depth, label in enumerate(strips):
        assert f"copies on write {told['blocks copied on write'][depth]}" in label and f"forks {told['sequences forked'][depth]}" in label
        assert f"evictions {told['blocks evicted'][depth]}" in label and f"preemptions {told['preemptions'][depth]}" in label
    assert len(strips) == 2

    def differs(*_: object) -> None:
        raise VerifyError("the <caches> differ: step 3")

    monkeypatch.setattr(proof, "verify", differs)
    assert main(words) == 1
    assert ReportFile(file).of("p")[1] == "NOT VERIFIED at pipeline depth 1: the <caches> differ: step 3"


@pytest.mark.parametrize("words", [["plan"], ["verify"], ["bench", "throughput"], ["bench", "serve", "--url", "http://127.0.0.1:9"]])
def test_a_file_that_cannot_be_written_is_refused_first(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target in (tmp_path, tmp_path / "absent/out.html"):
        named = [*words, str(tmp_path / "no model")] if "serve" not in words else words
        assert main([*named, "--report", str(target)]) == 1
        assert capsys.readouterr().err == f"octavo: error: --report {target} cannot be written\n"


def test_keys_are_left_out_of_the_command() -> None:
    assert _typed(["octavo", "bench", "--api-key", "a b", "--x=1", "--api-key=c", "--api-key"]) == (
        "octavo bench --api-key '***' --x=1 '--api-key=***' --api-key"
    )


def numbers(drawing: Html, kind: str, name: str) -> list[float]:
    return [float(element.get(name, "")) for element in ET.fromstring(drawing.text).iter() if (element.get("class") or "").startswith(kind)]


AMOUNTS = st.floats(0, 1e12, allow_subnormal=False)


@given(st.lists(AMOUNTS, min_size=1, max_size=6).filter(any))
def test_parts_fill_the_bar(values: list[float]) -> None:
    drawing = parts_bar([Part(f"part {index}", value, "") for index, value in enumerate(values)])
    widths = numbers(drawing, "part", "width")[: sum(value > 0 for value in values)]
    assert sum(widths) == pytest.approx(WIDTH, abs=len(values) * 1.1)  # what is there at all is seen


@given(st.lists(st.tuples(AMOUNTS, AMOUNTS), min_size=1, max_size=20), st.booleans())
def test_curves_stay_within_their_axes(points: list[tuple[float, float]], logarithmic: bool) -> None:
    root = ET.fromstring(curves([Curve("one", sorted(points))], "x", "y", logarithmic).text)
    height = float(root.get("viewBox", "").split()[-1])
    (line,) = (element for element in root.iter() if element.tag == "polyline")
    drawn = [tuple(map(float, point.split(","))) for point in line.get("points", "").split()]
    assert len(drawn) == sum(min(point) > 0 or not logarithmic for point in points)
    assert all(0 <= x <= WIDTH and 0 <= y <= height for x, y in drawn)


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=700), min_size=1, max_size=3))
def test_a_strip_shows_whatever_happened_in_its_place(lanes: list[list[int]]) -> None:
    drawing = strip([(f"lane {index}", counts) for index, counts in enumerate(lanes)], "steps")
    places = numbers(drawing, "mark", "x")
    assert bool(places) == any(map(any, lanes)) and all(LABELS <= place < WIDTH for place in places)
    if max(map(len, lanes)) <= 300:
        assert len(places) == sum(count > 0 for counts in lanes for count in counts)
    assert all(f"{sum(counts):,}" in drawing.text for counts in lanes)


def test_html_is_made_of_text() -> None:
    assert tag("p", "a<b", tag("b", "&"), class_="x\"y", aria_label="\x00").text == (
        '<p class="x&quot;y" aria-label="\\x00">a&lt;b<b>&amp;</b></p>'
    )
