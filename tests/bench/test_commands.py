"""`octavo bench` as a user runs it: a table on stdout, progress on stderr, JSON and a picture that say the same."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.figures import number
from octavo.cli.main import main
from octavo.log import logger
from tests.cli.processes import FAKE, ROOT, SECONDS, environment, octavo
from tests.support.report_file import ReportFile
from tests.support.story_folder import story_folder

MOONCAKE = str(ROOT / "tests/data/traces/mooncake_conversation.jsonl")
SVG = "{http://www.w3.org/2000/svg}"

# What a machine has that has the engine and no more.
BARE = """
import sys
for name in ("rich", "transformers", "gguf", "huggingface_hub", "hypothesis", "msgspec", "zmq", "fastapi", "uvicorn", "pydantic", "PIL"):
    sys.modules[name] = None
from octavo.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def log_handlers_of_a_test_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "handlers", [])


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return story_folder(tmp_path_factory.mktemp("bench") / "stories")


def rows(table: str) -> dict[str, list[str]]:
    """Label -> cells, of the lines that have at least two spaces between them."""
    lines = [re.split(r"\s{2,}", line.rstrip()) for line in table.splitlines()]
    return {line[0]: line[1:] for line in lines if len(line) > 1}


def report(folder: Path, command: str) -> dict[str, Any]:
    """The JSON report, after a look at what all reports and pictures have in common."""
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    assert found["command"].startswith(f"octavo bench {command} ")
    assert {"gpu", "cpu", "threads", "torch", "octavo", "model", "dtype", "python", "system"} == set(found["machine"])
    assert found["machine"]["threads"] == 1 and found["kind"] == command
    root = ET.parse(folder / "out.svg").getroot()
    small = [text.text or "" for text in root.iter(f"{SVG}text") if text.get("class") == "small"]
    assert " ".join(small).startswith(found["command"]) and found["machine"]["cpu"] in " ".join(small)
    return found


def pictured(folder: Path) -> list[str]:
    root = ET.parse(folder / "out.svg").getroot()
    return [text.text or "" for text in root.iter(f"{SVG}text") if text.get("class") == "value"]


# promise: octavo-bench-throughput
def test_throughput_of_the_text_loads(tmp_path: Path) -> None:
    words = ("bench", "throughput", "--rounds", "2", "--json", str(tmp_path / "out.json"), "--picture", str(tmp_path / "out.svg"))
    run = octavo(*words, env=FAKE)
    assert run.returncode == 0, run.stderr
    progress = re.findall(r"^single: (.*)", run.stderr, re.MULTILINE)  # beside the lines of a slow machine, every few seconds
    assert re.fullmatch(r"warm-up; round 1 of 2, \d+\.\d\d s; round 2 of 2, \d+\.\d\d s", "; ".join(progress))
    results = {result["name"]: result for result in report(tmp_path, "throughput")["results"]}
    assert list(results) == ["single", "prefill", "batch32", "shared32"]
    table = rows(run.stdout)
    assert table["requests"] == ["1", "1", "32", "32"] and table["input tokens"] == ["128", "1,024", "8,127", "17,408"]
    assert table["cache hit rate, %"] == ["0", "0", "0", "91.2"]  # a fresh cache in every round, 512 of 544 tokens of 31 requests
    assert {name for name, result in results.items() if "decode_throughput" in result["figures"]} <= {"single"}
    for index, result in enumerate(results.values()):
        figures = result["figures"]
        assert [a * b for a, b in zip(figures["output_throughput"]["samples"], figures["wall"]["samples"], strict=True)] == pytest.approx(
            [result["output_tokens"]] * 2
        )
        assert len(figures["first_token"]["samples"]) == 2 * result["requests"]
        assert table["output throughput, tokens/s"][index] == number(figures["output_throughput"]["median"])
        assert table["end to end p99, ms"][index] == number(figures["end_to_end"]["p99"])
        assert 0 <= figures["queue"]["max"] <= figures["first_token"]["max"] <= figures["end_to_end"]["max"] <= figures["wall"]["max"] * 1e3
    shown = ("output_throughput", "input_throughput", "first_token", "per_output_token")
    medians = [result["figures"][name]["median"] for name in shown for result in results.values() if name in result["figures"]]
    assert pictured(tmp_path) == [number(median) for median in medians]


# promise: octavo-bench-takes
def test_a_traces_shared_prefixes_are_found_in_the_cache(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", FAKE["OCTAVO_DEBUG"])
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "ERROR")
    assert main(["bench", "throughput", "--trace", MOONCAKE, "--num-prompts", "4", "--max-model-len", "2k", "--rounds", "2"]) == 0
    said = capsys.readouterr()
    table = rows(said.out)
    assert "mooncake_conversation: 4 of 4 requests were cut to the context of 2,048 tokens" in said.err
    assert (table["requests"], table["clipped"]) == (["4"], ["4"])
    prompts = 4 * 2048 - (500 + 490 + 794 + 316)
    assert table["input tokens"] == [f"{prompts:,}"]
    assert table["cache hit rate, %"] == [number(100 * 3 * 512 / prompts)]  # all four begin with the same 512 tokens


# promise: octavo-bench-throughput, octavo-bench-imports
def test_latency_where_only_the_engine_is_installed_and_only_a_shape_is_known(tmp_path: Path, stories: Path) -> None:
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape/config.json").write_bytes((stories / "config.json").read_bytes())  # neither weights nor a tokenizer
    words = ("bench", "latency", "--batch-size", "3", "--input-len", "20", "--output-len", "5", "--load-format", "dummy", "shape")
    files = ("--rounds", "4", "--json", "out.json", "--picture", "out.svg")
    command = [sys.executable, "-c", BARE, *words, *files]
    run = subprocess.run(command, cwd=tmp_path, env=environment({}), capture_output=True, text=True, timeout=SECONDS)
    assert run.returncode == 0, run.stderr
    (result,) = report(tmp_path, "latency")["results"]
    assert (result["requests"], result["input_tokens"], result["output_tokens"]) == (3, 60, 15)
    statistics = ("p10", "median", "p90", "p99")
    names = ("first_token", "per_output_token", "end_to_end")
    wanted = [[number(result["figures"][name][one]) for one in statistics] for name in names]
    assert list(rows(run.stdout).values()) == [list(statistics), *wanted]
    assert pictured(tmp_path) == [cell for line in wanted for cell in line]
    assert all(len(result["figures"][name]["samples"]) == 12 for name in names)
    assert 0 < result["figures"]["per_output_token"]["p10"] < result["figures"]["end_to_end"]["p10"] < 60_000


# promise: octavo-bench-throughput
@pytest.mark.soak
def test_startup_starts_processes_and_times_their_milestones(tmp_path: Path, stories: Path) -> None:
    files = ("--json", "out.json", "--picture", "out.svg", "--report", "out.html")
    run = octavo("bench", "startup", str(stories), "--rounds", "2", *files, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(r"(round \d of 2: \d+\.\d\d s to the first token\n){2}", run.stderr)
    (result,) = report(tmp_path, "startup")["results"]
    figures = result["figures"]
    assert list(figures) == [
        *("import", "ready", "first_token", "peak_memory"),
        *("reading_the_config", "tokenizer_loading", "importing_torch_and_the_engine", "checking_the_native_kernels"),
        *("reserving_the_kv_cache", "model_loading", "warm-up", "init_engine"),
    ]
    for imported, ready, first in zip(*(figures[name]["samples"] for name in ("import", "ready", "first_token")), strict=True):
        assert 0.1 < imported < ready < first < 60  # torch alone takes longer than the first bound
    assert 100 < figures["peak_memory"]["median"] < 2000  # MiB: the child's own, with torch in it
    table = rows(run.stdout)
    assert table["first token, s"] == [number(figures["first_token"][name]) for name in ("median", "min", "max")]
    assert ReportFile(tmp_path / "out.html").rows()["first token, s"] == table["first token, s"]
    assert pictured(tmp_path) == [number(figure["median"]) for figure in figures.values() if figure["unit"] == "s"]


def test_help_comes_without_torch() -> None:
    code = (
        "import contextlib, sys\nfrom octavo.cli.main import main\n"
        "for words in ([], ['throughput'], ['latency'], ['startup'], ['serve']):\n"
        "    with contextlib.suppress(SystemExit): main(['bench', *words, '--help'])\n"
        "assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], env=environment({}), capture_output=True, text=True, timeout=SECONDS)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("usage: octavo bench") == 5 and run.stdout.count("--input-len") >= 2


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["thruput"], 2, "octavo bench: error: unknown command thruput; did you mean throughput?"),
        (["throughput", "--load", "batch23"], 2, "unknown load 'batch23'; choose from single, prefill, batch32"),
        (["throughput", "--load", "batch32", "--trace", "x"], 2, "give one of --load, --trace, or --input-len"),
        (["throughput", "--load", "batch32", "--num-prompts", "3"], 2, "--num-prompts does not go with --load"),
        (["throughput", "--input-len", "0"], 2, "must be a length of at least 1, like 128, or a range like 64-512, got '0'"),
        (["throughput", "--output-len", "9-3"], 2, "must be a length of at least 1, like 128, or a range like 64-512, got '9-3'"),
        (["throughput", "--rounds", "0"], 2, "must be a number from 1 to 1000000, got '0'"),
        (["latency", "--batch-size", "-1"], 2, "must be a number from 1 to 1000000, got '-1'"),
        (["latency", "--load", "x"], 2, "octavo bench latency: error: unknown option --load"),
        (["throughput", "--trace", "absent.csv"], 1, "octavo: error: --trace absent.csv: No such file or directory"),
        (["throughput", "--temperature", "nan"], 1, "octavo: error: temperature must be a finite number of at least 0, got nan"),
        (["throughput", "--json", "absent/out.json"], 1, "octavo: error: --json absent/out.json cannot be written"),
        (["startup", "--picture", "."], 1, "octavo: error: --picture . cannot be written"),
        (["throughput", "MODEL", "--load", "nano256"], 1, "load nano256 draws token ids up to 10,000, this model's vocabulary has 512"),
        (["throughput", "MODEL"], 1, "prefill: a sequence may grow to 1,025 tokens, max_model_len is 512; choose other lengths"),
        (["latency", "MODEL", "--input-len", "500"], 1, "500 in, 64 out: a sequence may grow to 564 tokens, max_model_len is 512"),
        (["startup", "MODEL", "--kv-cache-layout", "hnd", "--rounds", "1"], 1, "the process that was started did not reach ready: "),
    ],
)
def test_what_is_wrong_is_one_line(words: list[str], code: int, said: str, stories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", *(str(stories) if word == "MODEL" else word for word in words)]
    if code == 2:
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 2
    else:
        assert main(words) == 1
    heard = capsys.readouterr()
    assert heard.out == ""
    assert said in heard.err.splitlines()[0] and len(heard.err.splitlines()) == code


def test_a_figure_is_never_made_from_requests_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=fake,forward.raise@20")
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "ERROR")
    words = ["bench", "throughput", "--num-prompts", "2", "--output-len", "40", "--json", str(tmp_path / "out.json")]
    assert main(words) == 1
    heard = capsys.readouterr()
    assert heard.out == "" and not (tmp_path / "out.json").exists()
    assert re.search(r"octavo: error: 128 in, 40 out: a request ended after \d+ of 40 tokens \(the engine failed in this step", heard.err)
