"""Settings: what is wrong is refused by name and number before anything starts; switches for tests are parsed strictly."""

import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from octavo.config import VARIABLES, Debug, EngineConfig, environment, log_level, no_color
from octavo.errors import ConfigError
from octavo.inputs import Settings
from octavo.own_file import state_dir

NO_INTEGERS: list[Any] = [1.5, "16", True, -1]
BAD: dict[str, list[Any]] = {
    "revision": [5, b"main"],
    "hf_overrides": ["{}", [1], {1: 2}, {"rope_theta": float("nan")}, {"x": b"y"}],
    "dtype": ["float8", "", None, 5],
    "quantization": ["awq", "fp8", "int2", None, 4],
    "device": ["gpu", "mps", "", None, 5],
    "kv_cache_dtype": ["float8", "int4", "", None, 8],
    "kv_cache_layout": ["ndh", "NHD", "", None, 1],
    "load_format": ["pt", None],
    "generation_config": ["vllm", None],
    "native": ["yes", None],
    "cpu_isa": ["sse", None],
    "max_model_len": [0, 1, *NO_INTEGERS],
    "block_size": [0, 3, 12, 512, None, *NO_INTEGERS],
    "kv_cache_memory_bytes": [0, *NO_INTEGERS],
    "state_cache_share": [-0.1, 0.91, 1, float("nan"), "0.2", True, None],
    "mamba_ssm_cache_dtype": ["bfloat16", "float16", "", None, 32],
    "gpu_memory_utilization": [0, 0.0, -0.5, 1.01, float("nan"), float("inf"), "0.9", True, None],
    "num_gpu_blocks_override": [0, 1, *NO_INTEGERS],
    "tensor_parallel_size": [0, 2**40, None, *NO_INTEGERS],
    "pipeline_parallel_size": [0, 2**40, None, *NO_INTEGERS],
    "decode_context_parallel_size": [0, 2, 2**40, None, *NO_INTEGERS],  # 2 of one rank
    "enable_expert_parallel": ["yes", None, 1],
    "distributed_executor_backend": ["uni", "Ray", "", None, 1],
    "attention_backend": ["flash", "CPU", "", None, 1],
    "max_num_seqs": [0, 2**40, *NO_INTEGERS],
    "max_num_batched_tokens": [0, *NO_INTEGERS],
    "max_pinned_blocks": NO_INTEGERS,
    "enable_prefix_caching": ["false", None, 2, 1],
    "scheduling_policy": ["lifo", None],
    "enforce_eager": ["no", None, 1],
    "deterministic": ["yes", None, 0],
    "pipeline_depth": [0, 3, *NO_INTEGERS],
    "max_logprobs": [None, *NO_INTEGERS],
    "logprobs_mode": ["processed_logprobs", "", None, True],
    "skip_tokenizer_init": ["no", None],
    "trace": ["", 5, b"t.json"],
    "seed": [2**64, None, *NO_INTEGERS],
}


def test_the_keywords_of_llm_are_the_settings_of_the_engine() -> None:
    """mypy compares the types, where `LLM` hands them on."""
    assert list(Settings.__annotations__) == [each.name for each in fields(EngineConfig)][1:]


# promise: gpu-memory-utilization, enforce-eager, llm-gpu-memory
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values], ids=repr)
def test_a_setting_without_meaning_is_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} (must be|is) .*{re.escape(str(value))}"):
        EngineConfig(**{name: value})


# promise: decode-context-parallel-size
def test_ranks_share_a_context_in_groups_of_equal_size() -> None:
    with pytest.raises(ConfigError, match=r"decode_context_parallel_size is 4, which does not divide tensor_parallel_size \(6\): .* of 4$"):
        EngineConfig(tensor_parallel_size=6, decode_context_parallel_size=4)
    assert EngineConfig(tensor_parallel_size=6, decode_context_parallel_size=3).block_tokens == 48


def test_what_is_not_checked_here_is_a_path_or_a_name_that_another_door_knows() -> None:
    assert set(EngineConfig.__dataclass_fields__) - set(BAD) == {"model", "chat_template"}


# promise: device-mps-refused, windows-through-wsl2
def test_a_device_that_is_not_built_is_refused_with_the_reason() -> None:
    said = "^device must be one of auto, cpu, cuda, got 'mps': Octavo runs on a CPU or an NVIDIA GPU$"
    with pytest.raises(ConfigError, match=said):
        EngineConfig(device="mps")  # type: ignore[arg-type]


# promise: mamba-ssm-cache-dtype
def test_states_of_recurrent_layers_are_float32() -> None:
    said = "^mamba_ssm_cache_dtype must be one of auto, float32, got 'bfloat16': rounding errors of a state would add up with every token$"
    with pytest.raises(ConfigError, match=said):
        EngineConfig(mamba_ssm_cache_dtype="bfloat16")  # type: ignore[arg-type]
    assert EngineConfig(mamba_ssm_cache_dtype="float32").mamba_ssm_cache_dtype == "float32"


def test_a_step_must_hold_one_token_of_every_sequence() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens is 31, which is less than max_num_seqs \(32\)"):
        EngineConfig(max_num_seqs=32, max_num_batched_tokens=31)
    EngineConfig(max_num_seqs=32, max_num_batched_tokens=32)
    for size in (1, 2, 64, 256):
        EngineConfig(block_size=size)


def test_nothing_is_written_back() -> None:
    with pytest.raises(AttributeError):
        EngineConfig().block_size = 32  # type: ignore[misc]


# promise: environment-octavo-debug
def test_debug_switches_are_parsed_strictly() -> None:
    text = " check=1,preempt.every=3 ,forward.raise@7,forward.nan@8,sample.bad_id@9,cache.force_miss=1,runner=fake,isa=avx2,native=off,"
    text += "forward.sleep=20,ipc.drop@1,ipc.truncate@2,ipc.garbage@3,exit.sigkill@4,loop.slow=200,step.slow=1000"
    assert Debug.parse(text) == Debug(
        check=True, preempt_every=3, forward_raise=7, forward_nan=8, sample_bad_id=9, cache_force_miss=True, runner="fake",
        isa="avx2", native="off", forward_sleep=20, ipc_drop=1, ipc_truncate=2, ipc_garbage=3, exit_sigkill=4,
        loop_slow=200, step_slow=1000,
    )  # fmt: skip
    assert Debug.parse("") == Debug.parse("check=0") == Debug()
    assert Debug.parse("").switched_on == [] and Debug.parse(text).switched_on[:2] == ["check=True", "runner=fake"]
    for bad in ("forward", "forward.raise=@7", "check", "check=-1", "check=yes", "preempt.every@@3", "=1", "isa=sse", "isa", "native=0"):
        with pytest.raises(ConfigError, match="OCTAVO_DEBUG"):
            Debug.parse(bad)


def test_the_environment_is_read_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_LOG_LEVEL", raising=False)
    assert log_level("WARNING") == "WARNING"
    monkeypatch.setenv("OCTAVO_LOG_LEVEL", "debug")
    assert log_level("WARNING") == "DEBUG"
    assert state_dir() == Path.home() / ".local/state/octavo"
    monkeypatch.setenv("NO_COLOR", "")
    assert not no_color()
    monkeypatch.setenv("NO_COLOR", "1")
    assert no_color()


# promise: show-config-prints
def test_what_is_shown_of_the_environment_is_on_one_line_and_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("OCTAVO_", "HF_")) or name in VARIABLES]:
        monkeypatch.delenv(name)
    assert environment() == {}
    given = {"HF_TOKEN": "hf_secret", "HF_ENDPOINT": "https://me:sec@ret@hub.example/x", "OCTAVO_K": "secret", "HF_HOME": "a\n b"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    shown = {"HF_ENDPOINT": "https://(set)@hub.example/x", "HF_HOME": "a b", "HF_TOKEN": "(set)", "OCTAVO_K": "(set)"}
    assert environment() == shown
