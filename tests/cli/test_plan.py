"""`octavo plan`: the table, the bar, what-ifs and exit codes, from a config and headers alone."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.config_file import size
from octavo.cli.main import main
from octavo.cli.plan import MARKS, WIDTH, _cells
from octavo.sizing.memory_plan import GIB, MIB, Memory
from octavo.worker import device, memory
from tests.cli.processes import ROOT, SECONDS, Typist, environment
from tests.models.test_hybrid_configs import QWEN35_35B
from tests.support.models import stories260k, to_gguf
from tests.support.quantized_models import Kind, write_both

# torch cannot be imported here: a plan that needs it fails
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from octavo.cli.main import main; sys.exit(main(sys.argv[1:]))"


def run(*words: str, encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, "plan", *words]
    env = environment({"PYTHONIOENCODING": encoding})
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, encoding="utf-8", timeout=SECONDS)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    code = main(["plan", "--json", *words])
    record: dict[str, object] = json.loads(capsys.readouterr().out)
    assert code == (0 if record["fits"] else 1)
    return record


# promise: octavo-plan
def test_the_default_model_is_planned_without_torch_and_drawn_to_scale() -> None:
    packed = run("--memory", "2GiB", "--dtype", "bfloat16")
    assert re.search(r"^  weights +93\.8 MiB   92\.1 MiB on disk, kept quantised$", packed.stdout, re.MULTILINE)
    done = run("--memory", "2GiB", "--dtype", "bfloat16", "--no-native")
    assert (done.returncode, done.stderr) == (0, "")
    head = "SmolLM2-135M-Instruct: LlamaForCausalLM, 134,515,008 parameters, bfloat16, on the CPU by"
    assert re.match(rf"{head} native kernels \(\w+\)\n", packed.stdout) and done.stdout.startswith(f"{head} torch\n")
    assert run("--dtype", "bfloat16", "--cpu-isa", "portable").stdout.startswith(f"{head} native kernels (portable)\n")
    assert re.search(r"^  weights +256\.6 MiB   92\.1 MiB on disk, converted to floats at load$", done.stdout, re.MULTILINE)
    assert re.search(r"^  KV cache +511\.9 MiB   1,456 blocks of 16 tokens, 23,040 bytes per token", done.stdout, re.MULTILINE)
    bar = next(line.strip() for line in done.stdout.splitlines() if set(line.strip()) <= set("█▓▒░·") and "█" in line)
    assert len(bar) == WIDTH
    assert bar.count("█") == round(WIDTH * 256.6 / 2048) and bar.count("▓") == round(WIDTH * 512 / 2048)
    assert done.stdout.splitlines()[-1].startswith("It fits: ")


# promise: octavo-plan
def test_what_does_not_fit_says_what_to_turn_and_exits_1_also_where_blocks_cannot_be_drawn() -> None:
    done = run("--memory", "1g", "--max-model-len", "8k", "--dtype", "float32", encoding="ascii")
    assert done.returncode == 1
    assert re.match(r"It does not fit: .*the largest --max-model-len that fits is \d+; lower it", done.stdout.splitlines()[-1])
    longest = re.findall(r"fits is (\d+)", done.stdout)[0]
    assert run("--memory", "1g", "--max-model-len", longest, "--dtype", "float32").returncode == 0
    assert done.stdout.isascii() and "W weights" in done.stdout


def test_colours_are_for_terminals_without_no_color(tmp_path: Path) -> None:
    for env, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        with Typist("plan", "--memory", "2g", cwd=ROOT, env=env) as typist:
            shown = typist.expect("It fits: .*\n")
            assert typist.process.wait(SECONDS) == 0
        assert ("\033[34m" in shown) is coloured
        assert MARKS["weights"][0] in shown


@given(st.lists(st.integers(0, 2**45), min_size=6, max_size=6).filter(any))
def test_the_bar_is_always_as_wide_and_leaves_nothing_out(sizes: list[int]) -> None:
    cells = _cells(dict(zip(MARKS, sizes)))
    assert sum(cells.values()) == WIDTH
    assert all((count > 0) == (size > 0) for count, size in zip(cells.values(), sizes))


# promise: octavo-plan
def test_a_folder_a_gguf_and_a_config_alone_are_planned_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stories260k(tmp_path / "stories")
    gguf = to_gguf(folder, tmp_path / "stories.gguf", "F16")
    sharded, alone = tmp_path / "sharded", tmp_path / "config.json"
    sharded.mkdir()
    for copy in (sharded / "config.json", alone):
        copy.write_text((folder / "config.json").read_text())
    for name, count in (("a", 300), ("b", 40), ("unlisted", 7)):
        (sharded / f"{name}.safetensors").write_bytes(bytes(count))
    index = {"weight_map": {"one": "a.safetensors", "two": "a.safetensors", "three": "b.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    plans = [planned(capsys, str(path), "--memory", "1g", "--dtype", "float32") for path in (folder, gguf, alone, sharded)]
    stored, half, none, shards = (plan["stored_bytes"] for plan in plans)
    assert stored == (folder / "model.safetensors").stat().st_size and none is None and shards == 340
    assert isinstance(half, int) and 0.45 < half / int(str(stored)) < 0.55
    for name in ("weights_bytes", "kv_cache_bytes", "kv_bytes_per_token", "num_blocks", "max_model_len", "total_bytes"):
        assert len({plan[name] for plan in plans}) == 1, name


# promise: what-if-plan
def test_what_ifs_change_what_they_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(stories260k(tmp_path / "stories"))
    base = planned(capsys, folder, "--memory", "1g", "--dtype", "float32")
    eight = planned(capsys, folder, "--memory", "1g", "--dtype", "float32", "--kv-cache-dtype", "int8")
    assert (base["kv_cache_dtype"], eight["kv_cache_dtype"]) == ("float32", "int8")
    assert (base["kv_bytes_per_token"], eight["kv_bytes_per_token"]) == (5 * 2 * 4 * 8 * 4, 5 * 2 * 4 * (8 + 4))
    few = planned(capsys, folder, "--memory", "1g", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "1.5m", "--block-size", "32")
    assert few["num_blocks"] == 1.5 * MIB // (32 * 1280) and few["rows_bytes"] < base["rows_bytes"]  # type: ignore[operator]
    main(["plan", "--memory", "2GiB", "--dtype", "bfloat16", "--kv-cache-dtype", "int8"])
    assert re.search(r"KV cache +511\.\d MiB   2,741 blocks of 16 tokens, 12,240 bytes per token in int8;", capsys.readouterr().out)


def test_states_are_planned_and_bound_the_sequences_unless_they_were_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN35_35B))
    words = [str(file), "--device", "cpu", "--memory", "128g", "--dtype", "bfloat16", "--no-native"]
    main(["plan", *words])
    out = capsys.readouterr().out
    auto, asked = planned(capsys, *words), planned(capsys, *words, "--max-num-seqs", "64")
    rows, state, kept = (int(str(auto[name])) for name in ("max_num_seqs", "state_bytes", "state_checkpoints"))
    assert 4 < rows < 64 and 2 * rows * state <= int(str(auto["kv_cache_bytes"])) / 2 < 2 * (rows + 1) * state
    assert auto["state_slots"] == 2 * rows + kept and kept == int(str(auto["kv_cache_bytes"])) * 0.2 // state
    assert asked["max_num_seqs"] == 64 and asked["state_slots"] == 128 + kept
    assert f"\n  max_num_seqs is {rows} instead of 256: a sequence has two states of 62.8 MiB, and those of all sequences may" in out
    assert re.search(rf"\n {{19}} +\d+\.\d MiB   of it {kept} states of 62\.8 MiB for prompts to continue from\n", out)
    assert re.search(rf"\n {{19}} +[\d.]+ GiB   of it {2 * rows} states of 62\.8 MiB, two of each sequence\n", out)
    assert planned(capsys, *words, "--kv-cache-memory-bytes", "64m")["max_num_seqs"] == 4


# promise: decode-context-parallel-size
def test_a_rank_plans_for_the_tokens_that_it_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 4 heads of k and v it has 2, or all 4 of every second token: the same bytes hold the same tokens."""
    words = [str(stories260k(tmp_path / "stories")), "--memory", "2g", "--dtype", "float32", "-tp", "2", "--no-native"]
    heads = planned(capsys, *words, "--kv-cache-memory-bytes", str(20 * 16 * 640))
    tokens = planned(capsys, *words, "-dcp", "2", "--kv-cache-memory-bytes", str(10 * 16 * 1280))
    assert (heads["num_blocks"], heads["block_size"], heads["kv_bytes_per_token"], heads["max_model_len"]) == (20, 16, 640, 19 * 16 + 1)
    assert (tokens["num_blocks"], tokens["block_size"], tokens["kv_bytes_per_token"], tokens["max_model_len"]) == (10, 32, 1280, 9 * 32 + 1)
    assert heads["kv_cache_bytes"] == tokens["kv_cache_bytes"] and tokens["decode_context_parallel_size"] == 2
    assert int(str(heads["weights_bytes"])) < int(str(tokens["weights_bytes"]))  # twice the rows of k and v
    main(["plan", *words, "-dcp", "2", "--num-gpu-blocks-override", "10"])
    out = capsys.readouterr().out
    assert re.search(r"KV cache +0\.2 MiB   10 blocks of 32 tokens, 16 of them on each rank, 1,280 bytes per token;", out)


# promise: octavo-plan
def test_a_gpu_that_is_not_here_is_planned_for_without_torch() -> None:
    done = run("--device", "cuda", "--memory", "4g")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("SmolLM2-135M-Instruct: LlamaForCausalLM, 134,515,008 parameters, bfloat16, on a GPU\n")
    assert re.search(r"^  weights +99\.0 MiB   92\.1 MiB on disk, kept quantised$", done.stdout, re.MULTILINE)
    assert re.search(r"^ +68\.6 MiB   of it 4-bit weights in groups of 32: 30 qkv, 30 output, .* \(from Q4_1\)$", done.stdout, re.MULTILINE)
    assert re.search(r"^  activations .* steps of 8,192 tokens, 512 sequences$", done.stdout, re.MULTILINE)
    assert re.search(r"^  graphs +[\d.]+ MiB   CUDA graphs, estimated$", done.stdout, re.MULTILINE)
    assert re.search(r"^  total +3\.60 GiB   of 3\.60 GiB \(--gpu-memory-utilization 0\.9 of 4\.00 GiB\)$", done.stdout, re.MULTILINE)
    half = run("--device", "cuda", "--memory", "4g", "--gpu-memory-utilization", "0.5", "--enforce-eager")
    assert "of 2.00 GiB (--gpu-memory-utilization 0.5 of 4.00 GiB)" in half.stdout and "graphs" not in half.stdout
    refused = run("--device", "cuda", "--memory", "512m")
    assert refused.returncode == 1 and "460.8 MiB of the GPU's 512.0 MiB (--gpu-memory-utilization): " in refused.stdout


def test_a_cache_in_the_dtype_that_the_model_decides_on_is_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = ("--device", "cuda", "--memory", "4g", "--kv-cache-dtype")
    assert planned(capsys, *gpu, "bfloat16")["kv_cache_dtype"] == "bfloat16"
    assert main(["plan", *gpu, "float16"]) == 1
    said = "kv_cache_dtype is float16, dtype is bfloat16, and attention backend triton keeps the KV cache in the dtype of the run: "
    assert said in capsys.readouterr().err


@pytest.mark.soak
def test_a_gpu_without_a_size_has_to_be_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "GPU_SIGNS", ())
    monkeypatch.setattr(device, "torch_gpu", lambda: (None, "none"))
    assert main(["plan", "--device", "cuda"]) == 1
    said = "octavo: error: --device is cuda, but no GPU can be used: no NVIDIA GPU was found; .*; add --memory 80g to plan for a GPU"
    assert re.match(said, capsys.readouterr().err)
    gpu = device.Gpu("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB)
    monkeypatch.setattr(device, "find", lambda: device.Found(device.TorchBuild("2.13", "13.0", None), True, gpu, triton="3.6.0"))
    monkeypatch.setattr(memory, "gpu_memory", lambda share: Memory.of_gpu(140 * GIB, 139 * GIB, share))
    record = planned(capsys, "--device", "cuda")
    assert (record["device"], record["gpu_bytes"], record["memory_bytes"]) == ("cuda", 140 * GIB, 126 * GIB)
    assert record["other_processes_bytes"] == GIB and record["dtype"] == "bfloat16"
    assert record["unified_memory"] is False
    with monkeypatch.context() as board:
        board.setattr(memory, "gpu_memory", lambda share: Memory.of_gpu(62 * GIB, 60 * GIB, share, unified=True))
        assert planned(capsys, "--device", "cuda")["unified_memory"] is True and main(["plan", "--device", "cuda"]) == 0
        shown = capsys.readouterr().out
        assert "of 55.80 GiB (--gpu-memory-utilization 0.9; GPU and CPU share 62.00 GiB of memory), 2.00 GiB of it held by" in shown
        assert "MiB   CUDA and its libraries; Python, libraries, tokenizer" in shown
    assert planned(capsys)["device"] == "cpu"  # nothing points to a GPU, so torch is not asked
    monkeypatch.setattr(device, "GPU_SIGNS", (ROOT,))
    assert planned(capsys)["device"] == "cuda" and planned(capsys, "--device", "cpu")["device"] == "cpu"


# promise: quantization-q-auto
def test_a_plan_says_what_becomes_of_each_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stories260k(tmp_path / "stories")  # 5 layers of rows of 64 and, in the MLP, of 172: no whole groups
    plain = planned(capsys, str(folder), "--dtype", "bfloat16")
    four = planned(capsys, str(folder), "--dtype", "bfloat16", "-q", "int4")
    assert plain["matrices"] == [] and four["quantization"] == "int4" and four["weights_bytes"] < plain["weights_bytes"]  # type: ignore[operator]
    assert [(form["kept"], form["matrices"]) for form in four["matrices"]] == [  # type: ignore[attr-defined]
        ("4-bit weights in groups of 32", {"qkv": 5, "output": 5, "gate_up": 5}),
        ("bfloat16", {"down": 5}),
        ("8-bit weights in groups of 64", {"head": 1}),
    ]
    mixed = to_gguf(folder, tmp_path / "mixed.gguf", "Q4_0", kinds={"attn_v": "F16", "ffn_up": "Q8_0", "ffn_down": "F16"})
    assert main(["plan", str(mixed), "--dtype", "bfloat16", "--memory", "1g"]) == 0
    shown = capsys.readouterr().out
    line = r"MiB   of it bfloat16 \(their parts cannot be merged or split as quantised\): 5 qkv \(from Q4_0, F16\)$"
    assert re.search(line, shown, re.MULTILINE)
    assert re.search(r"MiB   of it 8-bit weights in groups of 32: 5 gate_up \(from Q4_0, Q8_0\)$", shown, re.MULTILINE)
    assert re.search(r"MiB   of it bfloat16: 5 down \(from F16\)$", shown, re.MULTILINE)
    main(["plan", str(mixed), "-q", "int8", "--no-native"])
    assert "int8 at load; torch computes with floats, so no memory is saved" in capsys.readouterr().out


@pytest.mark.soak
def test_a_quantised_folder_is_planned_without_torch(tmp_path: Path) -> None:
    quantized, _ = write_both(tmp_path, Kind("gptq", act_order=True))
    shown = run(str(quantized), "--dtype", "bfloat16", "--memory", "1g").stdout
    assert "kept quantised" in shown and "of it 4-bit weights in groups of 32: 2 qkv, 2 output, 2 gate_up, 2 down (from GPTQ)" in shown
    assert "of it bfloat16: 1 head (from F32)" in shown
    rank = run(str(quantized), "--dtype", "bfloat16", "--memory", "1g", "-tp", "2").stdout
    assert "of it 4-bit weights in groups of 32: 2 qkv, 2 gate_up (from GPTQ)" in rank
    assert "of it bfloat16 (their parts cannot be merged or split as quantised): 2 output, 2 down (from GPTQ)" in rank


# promise: quantised-weights-stay
def test_a_plan_for_a_gpu_keeps_8_bit_floats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of 128 columns have a scale each; longer ones have blocks. A CPU has codes."""
    quantized, _ = write_both(tmp_path, Kind("fp8", 8, 64, sym=True))
    gpu = ["plan", str(quantized), "--dtype", "bfloat16", "--memory", "20g", "--device", "cuda"]
    assert main(gpu) == 0
    shown = capsys.readouterr().out
    assert "of it 8-bit floats with a scale for each row: 2 qkv, 2 output, 2 gate_up (from FP8)" in shown
    assert "of it 8-bit floats in blocks of 128: 2 down (from FP8)" in shown
    main([*gpu[:-2], "--device", "cpu"])
    assert "of it 8-bit weights in groups of 32: 2 qkv, 2 output, 2 gate_up, 2 down (from FP8)" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{")
    for word in (str(tmp_path / "config.json"), str(tmp_path / "absent"), str(tmp_path)):
        assert main(["plan", word]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("octavo: error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("4096", 4096), ("32k", 32768), ("24GiB", 24 * GIB), ("24gb", 24 * GIB), ("1.5g", 3 * GIB // 2), (".5M", MIB // 2), ("auto", None)],
)
def test_sizes_are_read_as_people_write_them(text: str, wanted: int | None) -> None:
    assert size(text) == wanted


@pytest.mark.parametrize("text", ["", "b", "12ib", "1.k", "-1g", "1e9", "g", "24 GiB", "1tb"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(Exception, match="must be a size like"):
        size(text)
