"""Settings of the server: each by flag, by file and by default, each refused where it means nothing, keys never shown."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.cli.args import Parser, add_server_flags, engine_config, server_configs
from octavo.cli.config_file import SERVER_SETTINGS, SETTINGS
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.server_config import SECRETS, ServerConfig
from tests.support.settings import Chosen, Way, choices, in_toml, in_words, meant, origin, shown

NO_INTEGERS: list[Any] = [1.5, "16", True, None, -1, 2**63]
NO_SECONDS: list[Any] = ["1", True, None, -1, float("nan"), float("inf"), 1e9]
BAD: dict[str, list[Any]] = {
    "host": ["", "a b", "http://x", None, 5],
    "port": [65536, *NO_INTEGERS],
    "api_key": ["key", [""], ["a b"], ["é"], [5], ["k" * 513], None],
    "admin_key": ["", "a b", "é", 5, ["key"]],
    "served_model_name": ["", " a", "a\nb", 5],
    "allowed_hosts": ["name", ["http://x"], [""], None],
    "allowed_origins": ["https://x.org", ["x.org"], ["https://x.org/"], ["https://x.org/path"], ["ftp://x.org"], [""], None],
    "api_processes": [0, 65, *NO_INTEGERS],
    "data_parallel_size": [0, 65, *NO_INTEGERS],
    "routing": ["first", "", None, 1],
    "max_queue": NO_INTEGERS,
    "queue_timeout": [0, *NO_SECONDS],
    "request_timeout": [0, *NO_SECONDS],
    "read_timeout": [0, *NO_SECONDS],
    "write_timeout": [0, *NO_SECONDS],
    "shutdown_timeout": NO_SECONDS,
    "max_restarts": NO_INTEGERS,
    "max_body_bytes": [0, 1023, *NO_INTEGERS],
    "max_prompts": [0, *NO_INTEGERS],
    "max_n": [0, *NO_INTEGERS],
    "max_stop": NO_INTEGERS,
    "max_temperature": NO_SECONDS,
    "metrics_prefix": ["", "a-b", "1", "a b", "é", 5, None],
    "log_format": ["xml", "", None, 1],
    "tool_call_parser": ["qwen", "", None],
    "reasoning_parser": ["deepseek", None, True],
    "lesson": ["yes", 1, None],
    "lesson_pace": NO_SECONDS,
    "enable_log_requests": ["yes", 1, None],
    "inspector": ["yes", 1, None],
    "record": ["", "a\0b", 5, True],
}
WAYS: dict[str, list[Way]] = {
    "host": [('"0.0.0.0"', ["--host", "0.0.0.0"], "0.0.0.0"), ('"::1"', ["--host", "::1"], "::1")],
    "port": [("0", ["--port", "0"], 0)],
    "api_key": [('["k-a", "k-b"]', ["--api-key", "k-a", "--api-key", "k-b"], ("k-a", "k-b")), ('["k-c"]', ["--api-key=k-c"], ("k-c",))],
    "admin_key": [('"k-d"', ["--admin-key", "k-d"], "k-d")],
    "served_model_name": [('"org/name"', ["--served-model-name", "org/name"], "org/name")],
    "allowed_hosts": [('["x.org", "[::1]"]', ["--allowed-hosts", "x.org", "--allowed-hosts", "[::1]"], ("x.org", "[::1]"))],
    "allowed_origins": [('["https://x.org:8"]', ["--allowed-origins", "https://x.org:8"], ("https://x.org:8",)),
                        ('["*"]', ["--allowed-origins", "*"], ("*",))],
    "api_processes": [("2", ["--api-processes", "2"], 2)],
    "data_parallel_size": [("3", ["-dp", "3"], 3), ("2", ["--data-parallel-size", "2"], 2)],
    "routing": [('"turns"', ["--routing", "turns"], "turns")],
    "max_queue": [("0", ["--max-queue", "0"], 0)],
    "queue_timeout": [("1", ["--queue-timeout", "1"], 1.0)],
    "request_timeout": [("0.5", ["--request-timeout", "0.5"], 0.5)],
    "read_timeout": [("7", ["--read-timeout", "7"], 7.0)],
    "write_timeout": [("8", ["--write-timeout", "8"], 8.0)],
    "shutdown_timeout": [("0", ["--shutdown-timeout", "0"], 0.0)],
    "max_restarts": [("0", ["--max-restarts", "0"], 0)],
    "max_body_bytes": [('"1m"', ["--max-body-bytes", "1m"], 2**20), ("4096", ["--max-body-bytes", "4096"], 4096)],
    "max_prompts": [("5", ["--max-prompts", "5"], 5)],
    "max_n": [("1", ["--max-n", "1"], 1)],
    "max_stop": [("16", ["--max-stop", "16"], 16)],
    "max_temperature": [("5", ["--max-temperature", "5"], 5.0)],
    "metrics_prefix": [('"vllm:"', ["--metrics-prefix", "vllm:"], "vllm:")],
    "log_format": [('"json"', ["--log-format", "json"], "json")],
    "tool_call_parser": [('"hermes"', ["--tool-call-parser", "hermes"], "hermes")],
    "reasoning_parser": [('"none"', ["--reasoning-parser", "none"], "none")],
    "lesson": [("false", ["--no-lesson"], False)],  # with it other settings are its own: tests/server/test_lesson.py
    "lesson_pace": [("0.5", ["--lesson-pace", "0.5"], 0.5)],
    "enable_log_requests": [("true", ["--enable-log-requests"], True), ("false", ["--no-enable-log-requests"], False)],
    "inspector": [("true", ["--inspector"], True)],
    "record": [('"r.ndjson"', ["--record", "r.ndjson"], "r.ndjson")],
}  # fmt: skip
CHOSEN = choices(WAYS)


def parsed(*words: str) -> Any:
    parser = Parser(prog="octavo serve", allow_abbrev=False)
    add_server_flags(parser)
    return parser.parse(words)


# promise: flags-fields-serverconfig
@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values], ids=repr)
def test_a_setting_without_meaning_is_refused_by_name_and_no_key_is_shown(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be ") as caught:
        ServerConfig(**{name: value})
    shown = value[0] if isinstance(value, list) else value
    assert str(caught.value).endswith(f"got {shown!r}") == (name not in SECRETS)


def test_every_setting_is_tried_and_none_is_the_engines_too() -> None:
    assert set(WAYS) == set(BAD) == set(SERVER_SETTINGS) and not set(SERVER_SETTINGS) & set(SETTINGS)


# promise: flags-fields-serverconfig, served-model-name, tool-call-parser, reasoning-parser, max-queue, queue-timeout, request-timeout
# promise: max-restarts, metrics-prefix
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(CHOSEN, CHOSEN, st.booleans())
def test_a_flag_wins_over_the_file_and_the_file_over_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], filed: Chosen, flags: Chosen, dashes: bool
) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text(f"{in_toml(filed, dashes)}seed = 5\n")
    words, server = in_words(file, flags), ServerConfig(**meant(filed, flags))
    assert server_configs(parsed(*words), "a/b") == (EngineConfig(model="a/b", seed=5), server)
    assert engine_config(parsed("--config", str(file))) == EngineConfig(seed=5)  # a command without a server takes its own part
    with pytest.raises(SystemExit) as ended:
        server_configs(parsed(*words, "--show-config"))
    out = capsys.readouterr().out
    rows = shown(out)
    assert ended.value.code == 0 and set(rows) >= {*SETTINGS, *SERVER_SETTINGS}
    for name in SERVER_SETTINGS:
        assert rows[name][1] == origin(name, file, filed, flags)
    assert not re.search("k-[abcd]", out) and "k-" not in repr(server)
    for name in ("served_model_name", "record"):
        assert rows[name][0] == (server.__getattribute__(name) or "not set")
    assert rows["allowed_hosts"][0] == (", ".join(server.allowed_hosts) or "not set")
    assert rows["admin_key"][0] == ("(set)" if server.admin_key else "not set")
    assert rows["api_key"][0] == ("(set)" if server.api_key else "not set") and rows["seed"] == ("5", f"file {file}")


# promise: environment-octavo-api
def test_a_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "sk-hidden")
    assert server_configs(parsed())[1].api_key == ("sk-hidden",)
    assert server_configs(parsed("--api-key", "sk-flag"))[1].api_key == ("sk-flag", "sk-hidden")
    with pytest.raises(SystemExit):
        server_configs(parsed("--api-key", "sk-flag", "--show-config"))
    out = capsys.readouterr().out
    assert re.search(r"api_key +\(set\) +flag, environment", out) and re.search(r"OCTAVO_API_KEY +\(set\) +environment", out)
    assert "sk-" not in out
    monkeypatch.setenv("OCTAVO_API_KEY", "two words")
    with pytest.raises(ConfigError, match=r"^api_key must be 1 to 512 visible ASCII characters$"):
        server_configs(parsed())
