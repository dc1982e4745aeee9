"""Comparisons with peers, without peers: what ratios, tables and shares say, and that an engine in another process is timed and checked."""

import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import roofline
from bench.cpu_peers import shares, work
from bench.cpu_scaling import median_point, point
from bench.peers import report
from bench.peers.dummy_gguf import BLOCKS, Shape, write
from bench.peers.lines import Curve, Plot, draw
from bench.peers.process import EngineFailed, EngineProcess, Reply
from octavo import LLM, SamplingParams
from octavo.bench.figures import Figure
from octavo.loading.resolve import resolve_model

RUNNERS = Path(__file__).resolve().parents[2] / "bench/peers"
TOY = f"""
import sys, time
sys.path.insert(0, {str(RUNNERS)!r})
from serve import serve
class Toy:
    def __init__(self, settings):
        print("a library's noise")
        self.room, self.times = settings["room"], []
    def prepare(self, requests):
        time.sleep(0.2)
    def generate(self, requests):
        start = time.perf_counter()
        self.times = [[start + 0.5] * count for _, count in requests]
        if any(7 in ids for ids, _ in requests):
            raise ValueError("seven is unlucky")
        return [ids[: min(count, self.room)] for ids, count in requests]
serve(Toy)
"""


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


@given(st.lists(st.tuples(st.floats(0.1, 1e4), st.floats(0.1, 1e4)), min_size=1, max_size=9))
def test_a_ratio_above_one_is_better_whatever_the_column(pairs: list[tuple[float, float]]) -> None:
    for column in ("single", "memory"):
        ours, theirs = ([{column: pair[side]} for pair in pairs] for side in (0, 1))
        found = report.ratio(ours, theirs, column)
        assert found is not None and min(a / b for a, b in pairs) <= (1 / found if column == "memory" else found) * 1.0000001
        if all(a > b for a, b in pairs):
            assert (found > 1) == (column == "single")
    assert report.ratio([{"single": 1.0}], [{"memory": 1.0}], "single") is None


def test_the_tables_of_a_comparison() -> None:
    ours = [{"single": 200.0, "first_token": 1.5}, {"single": 100.0, "first_token": 2.5}, {"single": 190.0, "first_token": 1.0}]
    quick = [{"single": 100.0, "first_token": 0.5}, {"single": 100.0, "first_token": 0.5}, {"single": 190.0, "first_token": 0.5}]
    slow = [{"single": 20.0, "prefill": 9.0, "first_token": 10.0}] * 3
    samples = {"Octavo": ours, "quick": quick, "slow": slow}
    head, _, *rows = cells(report.figures_table(samples, {"absent": "it did not install"}))
    assert head[1:3] == ["single, out tok/s", "prefill, in tok/s"] and head[5] == "start to first token, s"
    assert [row[:3] + row[5:6] for row in rows] == [
        ["Octavo", "190", "-", "1.50"],
        ["quick", "100", "-", "0.50"],
        ["slow", "20", "9", "10"],
        ["absent", "it did not install", "-", "-"],
    ]
    compared = {"quick": ours, "slow": ours}, {"quick": quick, "slow": slow}
    _, _, *rows = cells(report.ratios_table("Octavo", "x86_64", *compared))
    assert [row[:3] + row[5:6] for row in rows] == [
        ["against quick", "1.00x", "-", "0.33x"],  # of pairs that ran together: 2, 1 and 1, not 190 / 100
        ["against slow", "9.50x", "-", "6.67x"],
        ["against the best", "**1.00x** (quick)", "-", "**0.33x** (quick)"],
        ["aim", "1.2x, missed", "1.5x", "-"],
    ]
    assert cells(report.ratios_table("Octavo", "aarch64", *compared))[-1][:3] == ["aim", "1.1x, missed", "1.5x"]


def test_the_roofline_is_read_and_shared_out() -> None:
    limits = roofline.parse("read_96_mb 20.0\nread_96_mb 30.0\nread_96_mb 25.0\namx_bf16 2.5\navx512_vnni absent\n")
    assert {name: (figure.unit, list(figure.samples)) for name, figure in limits.items()} == {
        "read_96_mb": ("GB/s", [20, 30, 25]),
        "amx_bf16": ("TOP/s", [2.5]),
    }
    lines = roofline.report(limits).splitlines()
    assert lines[0].split() == ["read,", "buffer", "of", "96", "MB", "25", "GB/s", "(20", "to", "30)"]
    assert lines[-1].endswith("not on this machine") and len(lines) == len(roofline.LABELS)
    source = resolve_model(None)
    bytes_read, operations = work(source)
    assert operations == pytest.approx(253e9, rel=0.01) and bytes_read == pytest.approx(source.path.stat().st_size, rel=0.05)
    single, prefill = shares(source, {"single": 100.0, "prefill": 5000.0}, limits)
    assert single.endswith(f"{100 * bytes_read / 25e9:.0%} of a buffer of 96 MB")
    assert prefill.endswith(f"{5000 * operations / 1024 / 2.5e12:.0%} of AMX bfloat16 from registers")
    assert shares(source, {"single": 100.0}, {}) == []


def test_no_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", ["roofline.py"])
    assert roofline.main() == 1
    assert capsys.readouterr().err == "no roofline: there is no C++ compiler (g++) to build bench/roofline.cpp with\n"


def test_an_engine_in_a_process_of_its_own_is_timed_and_checked() -> None:
    with EngineProcess([sys.executable, "-c", TOY], {"room": 3}, {}) as process:
        start = time.perf_counter()
        reply = process.call([([1, 2, 3, 4], 2), ([5], 1)])
        assert reply.answers == [[1, 2], [5]] and reply.seconds < time.perf_counter() - start - 0.2  # to prepare is not counted
        assert [len(times) for times in reply.times] == [2, 1] and 0.5 <= reply.times[1][0] <= 0.5 + reply.seconds
        assert 2**20 < process.peak_memory() < 2**30
        with pytest.raises(EngineFailed, match="an answer has 3 of 4 tokens"):
            process.call([([1, 2, 3, 4], 4)])
        with pytest.raises(EngineFailed, match="exit code 1; its last line: ValueError: seven is unlucky"):
            process.call([([7], 1)])


def test_points_of_the_scaling_curves() -> None:
    reply = Reply(2.0, [[1, 2, 3], [4, 5, 6]], [[1.0, 1.1, 1.3], [1.0, 1.1, 1.2]])
    gaps = Figure("ms", [100, 200, 100, 100])
    assert point(reply, decode_only=False) == pytest.approx({"tokens_per_second": 3, "p50_ms": 100, "p95_ms": gaps.at(95)})
    alone = point(Reply(2.0, [[1, 2, 3]], [[1.0, 1.1, 1.5]]), decode_only=True)
    assert alone == pytest.approx({"tokens_per_second": 4, "p50_ms": 250, "p95_ms": 385})
    assert median_point([{"p50_ms": 3.0}, {"p50_ms": 1.0}, {"p50_ms": 2.0}]) == {"p50_ms": 2.0}


def test_curves_say_their_numbers() -> None:
    plot = Plot("tokens/s", [1, 2], [Curve("A & B", [10.0, 20.0], [15.0, 40.0]), Curve("C", [5.0, 5.0])])
    root = ET.fromstring(draw("title", [[plot, plot]], "small"))
    description = next(root.iter("{http://www.w3.org/2000/svg}desc")).text or ""
    assert description.startswith("tokens/s: A & B 10 at 1, 20 at 2; tokens/s: C 5 at 1, 5 at 2")
    first, second, *_ = [line.get("points", "") for line in root.iter("{http://www.w3.org/2000/svg}polyline")]
    grid = [float(line.get("y1", "")) for line in root.iter("{http://www.w3.org/2000/svg}line")]
    heights = [float(place.split(",")[1]) for place in f"{first} {second}".split()]
    assert heights == pytest.approx([max(grid) - (max(grid) - min(grid)) * value / 40 for value in (10, 20, 15, 40)], abs=0.2)


def test_scales_of_curves_are_round_and_just_above_the_most() -> None:
    plots = [Plot("", [1, 2], [Curve("A", [0.0, most])]) for most in (653.6, 382.7, 152.7, 40.0, 0.0)]
    root = ET.fromstring(draw("", [plots], ""))
    labels = [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text") if text.get("text-anchor") == "end"]
    assert labels[:5] == ["0", "200", "400", "600", "800"] and labels[9::5] == ["400", "160", "40", "1"]


@pytest.mark.soak
@pytest.mark.parametrize("kind", BLOCKS)
def test_dummy_models_read_as_many_bytes_of_matrices_a_token_and_stay_finite(kind: str, tmp_path: Path) -> None:
    shape = Shape(layers=3, hidden=256, heads=4, kv_heads=2, head_dim=64, vocab=512, experts=8, chosen=2, inner=256)
    read = {}
    for word in ("mixture", "dense"):
        path = write(tmp_path / f"{word}.gguf", shape, kind, word == "mixture")
        tensors = resolve_model(str(path)).gguf.tensors.values()
        matrices = [tensor for tensor in tensors if tensor.kind == kind and not tensor.name.startswith("token_embd")]
        read[word] = sum(tensor.num_bytes // (4 if "_exps" in tensor.name else 1) for tensor in matrices)
        with LLM(str(path), skip_tokenizer_init=True, num_gpu_blocks_override=20) as llm:  # a row that is not finite would end in an error
            (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4
    assert read["mixture"] == read["dense"] == shape.active_bytes(kind)
