"""Settings from a file: under flags, over defaults, each with its origin; and every mistake in one line that names file and key."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.cli.args import Parser, add_engine_flags, engine_config
from octavo.cli.config_file import SETTINGS
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from tests.cli.processes import FAKE, ROOT, octavo
from tests.support.settings import Chosen, Way, choices, in_toml, in_words, meant, origin, shown

WAYS: dict[str, list[Way]] = {
    "model": [('"a/b"', ["--model", "a/b"], "a/b"), ('"c.gguf"', ["--model=c.gguf"], "c.gguf")],
    "dtype": [('"float32"', ["--dtype", "float32"], "float32"), ('"auto"', ["--dtype", "auto"], "auto")],
    "quantization": [('"int8"', ["--quantization", "int8"], "int8"), ('"none"', ["-q", "none"], "none")],
    "device": [('"cuda"', ["--device", "cuda"], "cuda"), ('"auto"', ["--device", "auto"], "auto")],
    "load_format": [('"dummy"', ["--load-format", "dummy"], "dummy")],
    "max_model_len": [('"32k"', ["--max-model-len", "32k"], 32768), ("99", ["--max-model-len", "99"], 99),
                      ('"auto"', ["--max-model-len", "auto"], None)],
    "block_size": [("32", ["--block-size", "32"], 32)],
    "kv_cache_dtype": [('"int8"', ["--kv-cache-dtype", "int8"], "int8")],
    "kv_cache_layout": [('"hnd"', ["--kv-cache-layout", "hnd"], "hnd")],
    "kv_cache_memory_bytes": [('"512M"', ["--kv-cache-memory-bytes", "512m"], 2**29)],
    "mamba_ssm_cache_dtype": [('"float32"', ["--mamba-ssm-cache-dtype", "float32"], "float32")],
    "state_cache_share": [("0.5", ["--state-cache-share", "0.5"], 0.5), ("0", ["--state-cache-share=0"], 0.0)],
    "gpu_memory_utilization": [("0.5", ["--gpu-memory-utilization", "0.5"], 0.5), ("1", ["--gpu-memory-utilization=1"], 1.0)],
    "num_gpu_blocks_override": [("1_000", ["--num-gpu-blocks-override", "1000"], 1000)],
    "pipeline_parallel_size": [("2", ["-pp", "2"], 2), ("3", ["--pipeline-parallel-size", "3"], 3)],
    "tensor_parallel_size": [("2", ["-tp", "2"], 2), ("3", ["--tensor-parallel-size", "3"], 3)],
    "decode_context_parallel_size": [("1", ["-dcp", "1"], 1), ("1", ["--decode-context-parallel-size", "1"], 1)],
    "enable_expert_parallel": [("true", ["--enable-expert-parallel"], True), ("false", ["--no-enable-expert-parallel"], False)],
    "distributed_executor_backend": [('"ray"', ["--distributed-executor-backend", "ray"], "ray")],
    "max_num_seqs": [("8", ["--max-num-seqs", "8"], 8), ('"auto"', ["--max-num-seqs", "auto"], None)],
    "max_num_batched_tokens": [("300", ["--max-num-batched-tokens", "300"], 300)],
    "max_pinned_blocks": [("0", ["--max-pinned-blocks", "0"], 0), ("50", ["--max-pinned-blocks=50"], 50)],
    "enable_prefix_caching": [("false", ["--no-enable-prefix-caching"], False), ("true", ["--enable-prefix-caching"], True)],
    "scheduling_policy": [('"priority"', ["--scheduling-policy", "priority"], "priority")],
    "attention_backend": [("'cpu'", ["--attention-backend", "cpu"], "cpu")],
    "enforce_eager": [("true", ["--enforce-eager"], True), ("false", ["--no-enforce-eager"], False)],
    "deterministic": [("true", ["--deterministic"], True), ("false", ["--no-deterministic"], False)],
    "pipeline_depth": [("2", ["--pipeline-depth", "2"], 2)],
    "max_logprobs": [("0", ["--max-logprobs", "0"], 0)],
    "logprobs_mode": [('"processed"', ["--logprobs-mode", "processed"], "processed"), ('"raw"', ["--logprobs-mode=raw"], "raw")],
    "generation_config": [('"none"', ["--generation-config", "none"], "none")],
    "native": [("true", ["--native"], True), ("false", ["--no-native"], False)],
    "cpu_isa": [('"avx2"', ["--cpu-isa", "avx2"], "avx2")],
    "hf_overrides": [('{rope_theta = 5e5, rope_scaling = {factor = 2.0}}',
                      ["--hf-overrides", '{"rope_theta": 5e5, "rope_scaling": {"factor": 2.0}}'],
                      {"rope_theta": 5e5, "rope_scaling": {"factor": 2.0}}), ("'{}'", ["--hf-overrides={}"], {})],
    "revision": [('"v1"', ["--revision", "v1"], "v1")],
    "chat_template": [('"t.jinja"', ["--chat-template", "t.jinja"], "t.jinja")],
    "trace": [('"t.json"', ["--trace", "t.json"], "t.json")],
    "seed": [("0xff", ["--seed", "255"], 255)],
}  # fmt: skip
CHOSEN = choices(WAYS)
TEXTS = ("model", "hf_overrides", "revision", "chat_template", "trace")  # settings that may have no value; other open ones are numbers


def parsed(*words: str) -> Any:
    parser = Parser(prog="octavo try", allow_abbrev=False)
    add_engine_flags(parser)
    return parser.parse(words)


def test_every_setting_is_tried() -> None:
    assert set(WAYS) == set(SETTINGS)


# promise: gpu-memory-utilization, kv-cache-dtype, enforce-eager, device-auto-cpu, config-file-toml, trace-file-every, config-takes-same
# promise: show-config-prints
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(CHOSEN, CHOSEN, st.booleans())
def test_a_flag_wins_over_the_file_and_the_file_over_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], filed: Chosen, flags: Chosen, dashes: bool
) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text(in_toml(filed, dashes))
    words, expected = in_words(file, flags), EngineConfig(**meant(filed, flags))
    assert engine_config(parsed(*words)) == expected
    with pytest.raises(SystemExit) as ended:
        engine_config(parsed(*words, "--show-config"))
    rows = {name: row for name, row in shown(capsys.readouterr().out).items() if row[1] != "environment"}
    assert ended.value.code == 0 and set(rows) == set(SETTINGS)
    for name, (value, where) in rows.items():
        assert where == origin(name, file, filed, flags)
        known = expected.__getattribute__(name)
        unset = "not set" if name in TEXTS else "auto"
        text = json.dumps(known) if isinstance(known, dict) else str(known).lower() if isinstance(known, bool) else str(known)
        assert value == (unset if known is None else text)


# promise: config-takes-same
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-modle-len = 4096", "unknown setting 'max-modle-len'; did you mean max_model_len?"),
        ("top_p = 1.0", "unknown setting 'top_p'; it takes the settings of the engine and the server, which --show-config lists"),
        ("api-keys = ['a']", "unknown setting 'api-keys'; did you mean api_key?"),
        ("port = '80'", "port must be an integer from 0 to 65535, got '80'"),
        ("api_key = 'sk-secret'", "api_key must be a list"),
        ("api_key = ['sk secret']", "api_key must be 1 to 512 visible ASCII characters"),
        ("admin_key = 5", "admin_key must be text in quotes"),
        ("max_body_bytes = '4q'", "max_body_bytes: must be a size like 4096, 32k"),
        ("[sampling]\nseed = 1", "unknown setting 'sampling'"),
        ("skip_tokenizer_init = true", "unknown setting 'skip_tokenizer_init'"),
        ("seed = 1\nmax-model-len = 64\nmax_model_len = 64", "max_model_len is set twice, once with - and once with _"),
        ("block_size = 12", "block_size must be a power of two from 1 to 256, got 12"),
        ("block_size = '16'", "block_size must be an integer from 1 to 256, got '16'"),
        ("block_size = 16.0", "block_size must be an integer from 1 to 256, got 16.0"),
        ("seed = true", "seed must be an integer from 0 to 18446744073709551615, got True"),
        ("max_model_len = '4q'", "max_model_len: must be a size like 4096, 32k"),
        ("max_model_len = [1]", "max_model_len must be an integer from 2 to 2147483647, got [1]"),
        ("enable_prefix_caching = 'no'", "enable_prefix_caching must be one of True, False, got 'no'"),
        ("enable_prefix_caching = 1", "enable_prefix_caching must be one of True, False, got 1"),
        ("dtype = 'fp8'", "dtype must be one of auto, float32, bfloat16, float16, got 'fp8'"),
        ("device = 'mps'", "device must be one of auto, cpu, cuda, got 'mps': Octavo runs on a CPU or an NVIDIA GPU"),
        ("gpu_memory_utilization = 90", "gpu_memory_utilization must be a number above 0 and at most 1, got 90"),
        ("gpu_memory_utilization = '0.9'", "gpu_memory_utilization must be a number above 0 and at most 1, got '0.9'"),
        ("model = 5", "model must be text in quotes, got 5"),
        ("hf_overrides = 5", "hf_overrides must be a JSON object, got 5"),
        ("hf_overrides = '[1]'", "hf_overrides: must be a JSON object, got '[1]'"),
        ("hf_overrides = {a = 1979-05-27}", "hf_overrides must be a JSON object, got "),
        ("chat_template = {a = 1}", "chat_template must be text in quotes, got {'a': 1}"),
        ("seed = 1\nblock_size 16", "not valid TOML: Expected '=' after a key in a key/value pair (at line 2, column 12)"),
        ("seed = 1\nmodel = '''x\n", "not valid TOML: Expected \"'''\" (at line 2, the last)"),
        ("seed = 1\nseed = 2\n", "not valid TOML: Cannot overwrite a value (at line 2, column 9)"),
        ("seed = " + "1" * 5000, "not valid TOML: Exceeds the limit"),
        ("seed = " + "[" * 5000, "nested too deep"),
        ("seed = 1\nmodel = '\udcff'", "not UTF-8 text (at line 2)"),
    ],
    ids=lambda text: text[:24],
)
def test_a_mistake_is_named_with_its_file(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "octavo.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        engine_config(parsed("--config", str(file)))
    assert str(caught.value).startswith(f"{file}: {said}") and "\n" not in str(caught.value) and "secret" not in str(caught.value)


def test_a_command_takes_of_a_file_what_it_has_flags_for(tmp_path: Path) -> None:
    (tmp_path / "o.toml").write_text('model = "a/b"\nseed = 5\nblock_size = 32\n')
    parser = Parser(prog="octavo try", allow_abbrev=False)
    add_engine_flags(parser, only=("seed", "dtype"))
    assert engine_config(parser.parse(["--config", str(tmp_path / "o.toml")])) == EngineConfig(model="a/b", seed=5)


# promise: config-file-toml
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--config absent.toml: No such file or directory$"):
        engine_config(parsed("--config", "absent.toml"))
    with pytest.raises(ConfigError, match=f"^--config {tmp_path}: Is a directory$"):
        engine_config(parsed("--config", str(tmp_path)))
    with pytest.raises(ConfigError, match=r"^--config /dev/zero: more than 1,048,576 bytes"):
        engine_config(parsed("--config", "/dev/zero"))


# promise: config-file-toml
def test_a_command_runs_with_the_settings_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "octavo.toml").write_text('max-model-len = 64\nchat_template = "sub/t.jinja"\n')
    run = octavo("generate", "word " * 100, "--config", "octavo.toml", "--chat-template", "t.jinja", cwd=tmp_path, env=FAKE)
    assert run.returncode == 1 and "t.jinja" in run.stderr and "sub" not in run.stderr  # the flag wins
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "t.jinja").write_text("{{ messages[0].content }}")
    run = octavo("generate", "word " * 100, "--config", "octavo.toml", cwd=tmp_path, env=FAKE)  # found from the current folder
    assert run.returncode == 1 and "This model's maximum context length is 64 tokens" in run.stderr


# promise: show-config, show-config-prints
@pytest.mark.parametrize("words", [["chat", "a/model", "why?"], ["generate"], ["verify", "a/model"]], ids=lambda words: words[0])
def test_settings_are_shown_without_torch_or_a_model(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    (tmp_path / "o.toml").write_text("block-size = 32\nmax_num_seqs = 7\n")
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "HF_TOKEN": "hf_secret"}
    run = octavo(*words, "--show-config", "--config", "o.toml", "--seed", "3", cwd=tmp_path, env=env)
    assert (run.returncode, run.stderr) == (0, "")
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in run.stdout.splitlines()}
    assert rows["model"].split() == (["not", "set", "default"] if words[0] == "generate" else ["a/model", "command", "line"])
    assert rows["block_size"].split() == ["32", "file", "o.toml"] and rows["seed"].split() == ["3", "flag"]
    assert ("max_num_seqs" in rows) == (words[0] != "verify")  # its schedule sets that
    assert rows["HF_TOKEN"].split() == ["(set)", "environment"] and rows["OMP_NUM_THREADS"].split() == ["1", "environment"]
