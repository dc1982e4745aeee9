"""The scripts that show what the engine does with a GPU's time and memory, as far as they run without one."""

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench import beam_search, block_sizes, capacity, copies, gpu_budget, gpu_hybrid, gpu_loads, gpu_memory, gpu_ready, gpu_verify
from bench.capacity import Lengths, fit
from bench.gpu_budget import REST, SAMPLING, Event, budget
from octavo import LLM, BeamSearchParams
from octavo.bench import loads
from octavo.config import EngineConfig
from octavo.loading.shape import ModelShape
from octavo.models.registry import cache_specs, describe, read_config
from octavo.sizing.auto import resolved
from octavo.sizing.memory_plan import GIB, Memory, plan_memory
from tests.support.story_folder import story_folder

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """What a script prints, on the twins of the kernels."""
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=device")
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "ERROR")

    def call(script: Any, *words: str) -> str:
        monkeypatch.setattr("sys.argv", [script.__name__, *words])
        script.main()
        return capsys.readouterr().out

    return call


def cells(table: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
    return {line[0]: line[1:] for line in lines}


def step_events(start: float) -> list[Event]:
    """100 us: two kernels that overlap, a gap of 5, and 10 after the last one."""
    times = [
        ("prepare_entries", 0, 10), ("write", 10, 20), ("decode", 15, 40), ("nvjet_tst_128x8", 45, 60), ("gate_rows", 60, 64),
        ("add_norm", 64, 70), ("nvjet_tst_64x8", 70, 80), ("best_of_blocks", 80, 85), ("finish_entries", 85, 88), ("Memcpy DtoH", 88, 90),
    ]  # fmt: skip
    return [Event(name, start + begin, start + end) for name, begin, end in times]


def test_kinds_and_gaps_add_up_to_the_step() -> None:
    found = budget([event for step in range(5) for event in step_events(100.0 * step)][::-1], skipped=1)
    assert found.kinds == {
        "attention": 20, "products": 15, SAMPLING: 15, "norms, rotation, KV writes": 16, REST: 15, "gate": 4
    }  # fmt: skip
    assert (found.gaps, found.between, found.step) == (5, 10, 100)
    assert sum(found.kinds.values()) + found.gaps + found.between == pytest.approx(found.step)
    assert found.kernels["decode"] == 20  # from the end of the one before
    with pytest.raises(AssertionError, match="no two steps"):
        budget(step_events(0))


def test_the_hosts_part_of_a_step_is_measured_in_the_running_engine(run: Run, tmp_path: Path) -> None:
    files = ("--json", str(tmp_path / "b.json"), "--picture", str(tmp_path / "b.svg"))
    table = cells(run(gpu_budget, "--device", "cpu", "--rows", "1,4", "--context", "30", "--steps", "6", *files))
    assert table["us of one step"] == ["0.6B, 1 row", "0.6B, 4 rows"]
    for parts in json.loads((tmp_path / "b.json").read_text()).values():
        own = {part: parts[f"host: {part}"] for part in gpu_budget.HOST_PARTS}
        assert sum(own.values()) == pytest.approx(parts["step"]) and all(us > 0 for us in own.values())
        assert own["launch"] > own["plan"]  # on the CPU, launching a step computes it
    assert ET.parse(tmp_path / "b.svg").getroot().tag.endswith("svg")


@pytest.mark.soak
def test_small_blocks_waste_nothing_and_find_everything(run: Run, tmp_path: Path) -> None:
    folder = story_folder(tmp_path / "stories")
    files = ("--json", str(tmp_path / "s.json"), "--picture", str(tmp_path / "s.svg"))
    table = cells(run(block_sizes, "--tiny", "--model", str(folder), "--pool", "4096", "--sizes", "1,16,256", "--rounds", "1", *files))
    assert [table[size][1:3] for size in ("1", "16")] == [["0.0%", "100.0%"], ["17.3%", "97.7%"]]
    found = {int(size): one for size, one in json.loads((tmp_path / "s.json").read_text()).items()}
    assert found[256]["unused"] > 0.8 and found[256]["served"] < 0.7
    assert {size: one["table_bytes"] for size, one in found.items()} == {size: 2 * 64 * 4 * 512 // size for size in (1, 16, 256)}
    assert all(one["tokens_per_second"][0] > 0 for one in found.values())


def test_what_fits_follows_from_what_is_reserved() -> None:
    lengths = [Lengths(prompt=65, answer=31, limit=95)]  # 96 tokens at the end, of which the last is never in the cache
    blocks = 120 + 1
    whole, limit, paged = (fit(way, lengths, blocks, max_len=320) for way in ("model", "limit", "blocks"))
    assert whole.sequences == 120 // 20 and limit.sequences == 120 // 10
    assert 120 / 6 <= paged.sequences <= 120 / 5 and paged.filled > 0.8  # each holds five blocks, then six
    assert whole.preemptions == limit.preemptions == 0
    assert whole.filled == pytest.approx(limit.filled / 2, rel=0.05)


@pytest.mark.soak
def test_the_loads_are_those_at_hand_and_blocks_hold_the_most(run: Run, tmp_path: Path) -> None:
    found = capacity.load_lengths()
    assert [len(found[name]) for name in ("nano256", "azure", "mooncake")] == [256, 8, 6]
    assert sum(one.answer for one in found["nano256"]) == 133_966  # as published
    assert all(one.limit >= one.answer for each in found.values() for one in each)
    files = ("--json", str(tmp_path / "c.json"), "--picture", str(tmp_path / "c.svg"))
    assert run(capacity, "--gpu", "40", "--loads", "azure", *files).count("\n| Qwen3-") == 2
    for by_load in json.loads((tmp_path / "c.json").read_text()).values():
        sequences = [by_load["azure"][way]["sequences"] for way in capacity.WAYS]
        assert sequences == sorted(sequences) and sequences[2] > 2 * sequences[1] > 4 * sequences[0]


SHAPE = dict(loads.QWEN3_06B, num_hidden_layers=2, vocab_size=2000, bos_token_id=1, eos_token_id=2)


@pytest.mark.soak
def test_whole_engines_say_the_same_in_either_layout_and_without_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=device")
    (tmp_path / "config.json").write_text(json.dumps(gpu_verify.SMALL | {"hidden_size": 64, "num_hidden_layers": 1}))
    gpu_verify.compare_engines(str(tmp_path), "cpu", [("float32", True)])
    assert capsys.readouterr().out == "float32   eager : the same tokens and logprobs from nhd, hnd, contiguous\n"


def test_loads_and_the_start_are_timed(run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(gpu_loads.MODELS, "0.6B", SHAPE)
    monkeypatch.setitem(loads.GPU, "prefill", lambda: [([5] * 20, 1), ([6] * 30, 1)])
    settings = ("device=cpu", "max_num_seqs=4", "max_num_batched_tokens=64", "kv_cache_memory_bytes=20000000", "max_model_len=256")
    ready, timed = run(gpu_loads, "--loads", "prefill", "--temperatures", "0", "--rounds", "1", "--set", *settings).splitlines()
    assert "ready after" in ready and re.match(r"0\.6B prefill greedy +[\d,]+ tok/s   aim  450,000 +\d", timed)
    gpu_ready.start("tiny", check=False, device="cpu")
    assert capsys.readouterr().out.splitlines() == ["ready", "first token"]


def test_tensors_that_stay_are_those_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=device")
    settings: dict[str, Any] = {"num_gpu_blocks_override": 100, "max_num_seqs": 40, "max_num_batched_tokens": 512, "max_model_len": 2000}
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    with LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, device="cpu", dtype="bfloat16", **settings) as llm:
        parts = gpu_memory.held_parts(llm._core.executor)  # type: ignore[attr-defined]
    model = read_config(SHAPE, "a test")
    needs = ModelShape("", model).needs("bfloat16", device="cuda")
    use = plan_memory(needs, resolved(EngineConfig(**settings), "cuda"), Memory.of_gpu(80 * GIB, 80 * GIB, 0.9)).use
    assert (parts["weights"], parts["kv_cache"]) == (use.weights, use.kv_cache)
    assert parts["rows"] == pytest.approx(use.rows, rel=0.05) and parts["logits"] < use.activations


def test_the_table_of_memory_leaves_nothing_out() -> None:
    mib = 2**20
    planned = {"weights": 100 * mib, "kv_cache": 200 * mib, "activations": 50 * mib, "graphs": 0, "rows": 10 * mib, "other": 600 * mib}
    parts = {"weights": 100 * mib, "kv_cache": 200 * mib, "activations": 40 * mib, "graphs": 30 * mib, "rows": 10 * mib}
    said = {"parts": parts, "reserved": 400 * mib, "graphs_in_torch": 20 * mib}
    table = cells(gpu_memory.table(planned, 1010 * mib, said))
    assert table["graphs"] == ["0", "30", "-"] and table["activations"] == ["50", "40", "0.800"]
    assert table["other"] == ["600", "600", "1.000"]  # 1010 held, 400 of torch, 10 of the graphs' outside it
    assert table["kept by torch"][1] == "30" and table["all"] == ["960", "1,010", "1.052"]


@pytest.mark.soak
def test_beam_search_is_timed_beside_transformers_with_the_same_random_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=device")
    shape = dict(gpu_verify.SMALL, hidden_size=64, num_hidden_layers=1)
    with ExitStack() as stack:
        searches, ids = beam_search.of_random_weights(stack, shape, "cpu", ("float32",))
        beam_search.compare(searches, beam_search.prompts_of(ids, 3, 20), BeamSearchParams(4, 8, ignore_eos=True), rounds=1)
    head, theirs, ours, equal = capsys.readouterr().out.splitlines()
    assert head == "3 prompts of 20 tokens, 8 tokens each, width 4" and theirs.endswith(" 1.00x") and ours.startswith("  octavo, float32")
    assert equal == "  best answers in float32 that are the same: 3 of 3"


@pytest.mark.parametrize("shape", gpu_hybrid.MODELS.values(), ids=gpu_hybrid.MODELS)
def test_the_least_time_of_a_hybrid_counts_its_matrices_and_states(shape: gpu_hybrid.Shape) -> None:
    config = read_config(shape.config(), "a test")
    matrices = [one for one in describe(config).matrices if one.layer is not None]
    every = 1e6 if shape.experts else 1  # rows that choose all experts
    assert shape.numbers(every) == pytest.approx(sum(one.numbers for one in matrices), rel=1e-5)  # but for the gate of the shared expert
    assert {spec.state_bytes for spec in cache_specs(config, "bfloat16")} == {0, shape.state_bytes}
    one_step = gpu_hybrid.least_seconds(shape, [([], 1)], 1)
    assert one_step * gpu_hybrid.READ == pytest.approx(2 * describe(config).active_parameters, rel=0.15)  # and a state of a row, twice


def test_a_script_times_a_hybrid_on_published_loads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=device")
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "ERROR")
    monkeypatch.setitem(loads.GPU, "single", lambda: [([5] * 20, 4)])
    settings = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 20_000_000, "max_model_len": 256}
    gpu_hybrid.print_loads("tiny", gpu_hybrid.TINY, ["single"], 2, False, settings)
    assert re.match(r"tiny single +[\d,]+ tok/s   rounds \S+ \S+ s of 4 steps, least 0.00 s: +0%", capsys.readouterr().out)
    monkeypatch.setattr(gpu_hybrid, "KNOWN", 100)
    monkeypatch.setattr(loads, "QWEN3_8B", SHAPE)
    gpu_hybrid.print_hits("tiny", gpu_hybrid.TINY, settings)
    assert re.match(r".*tiny first token after a hit [\d.]+ ms, [\d.]+ of Qwen3-8B's [\d.]+ ms\n$", capsys.readouterr().out, re.DOTALL)


def test_costs_of_copies_are_told_with_their_bytes(run: Run) -> None:
    head, *lines = run(copies, "--tokens", "40", "--rows", "2").splitlines()
    assert head == "40 tokens, 2 at once, 360 KiB a block of 16 tokens, cpu float16"
    sizes = {line[2:40].strip(): line.split(" us")[1].strip() for line in lines}
    assert len(sizes) == 5 and sizes["a block that is copied on write"] == "0.35 MiB"
    assert sizes["a fork of a contiguous cache"] == "1.05 MiB"
