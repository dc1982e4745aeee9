"""The settings of the server. Every field is a flag of `octavo serve` and a key of its --config file.

A field has its help text and its range, so a new setting is one line here. API keys are secrets: no repr and no table shows them.
"""

import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from octavo.errors import ConfigError

LogFormat = Literal["text", "json"]
ToolCallParser = Literal[
    "auto", "hermes", "llama3_json", "mistral", "phi4_mini_json", "granite", "qwen3_coder", "pythonic", "harmony", "none"
]  # fmt: skip
RoutingPolicy = Literal["prefix", "least", "turns"]
ReasoningParser = Literal["auto", "think", "harmony", "none"]


def _flag(default: Any, text: str, least: float | None = None, most: float | None = None, secret: bool = False) -> Any:
    """Returns a field with its help text and the range of its number."""
    meta = {"help": text, "because": "", "least": least, "most": most, "secret": secret}
    return field(default=default, metadata=meta, repr=not secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What a user sets for a server."""

    host: str = _flag("127.0.0.1", "address to listen on; 0.0.0.0: all addresses of this machine, to be used with --api-key")
    port: int = _flag(8000, "port to listen on; 0: any free port", 0, 65535)
    api_key: tuple[str, ...] = _flag((), "key that clients must send; may be repeated; OCTAVO_API_KEY adds one", secret=True)
    admin_key: str | None = _flag(None, "key for the admin routes and for reading the text of all users", secret=True)
    served_model_name: str | None = _flag(None, "name of the model for clients; default: its own name")
    allowed_hosts: tuple[str, ...] = _flag((), "host name that clients may use for this server, besides its address; may be repeated")
    allowed_origins: tuple[str, ...] = _flag((), "origin (https://example.org) whose web pages may use this server; may be repeated")
    api_processes: int = _flag(1, "number of processes that answer HTTP, on one port, for one engine", 1, 64)
    data_parallel_size: int = _flag(1, "number of engines that share the requests; each holds the whole model", 1, 64)
    routing: RoutingPolicy = _flag(
        "prefix", "engine for a request; prefix: one that has the start of its prompt cached; least: the least busy; turns: each in turn"
    )
    max_queue: int = _flag(1024, "maximum number of requests in the queue; the server refuses more with 429", 0, 2**31 - 1)
    queue_timeout: float = _flag(300.0, "maximum seconds in the queue; a request that waits longer gets 503", 0.001, 86400.0)
    request_timeout: float = _flag(3600.0, "maximum seconds for a whole request; one that takes longer gets 504", 0.001, 86400.0)
    read_timeout: float = _flag(30.0, "maximum seconds for a client to send its request; a slower one gets 408", 0.001, 86400.0)
    write_timeout: float = _flag(30.0, "seconds that a client may leave an answer unread before its connection is reset", 0.001, 86400.0)
    shutdown_timeout: float = _flag(30.0, "maximum seconds for running requests to finish when the server stops", 0.0, 86400.0)
    max_restarts: int = _flag(3, "maximum restarts in a row of the engine or an API process; a healthy minute resets the count", 0, 1000)
    max_body_bytes: int = _flag(8 * 2**20, "maximum size of a request body, such as 8m; a larger one gets 413", 1024, 2**40)
    max_prompts: int = _flag(1024, "maximum number of prompts in one request", 1, 2**31 - 1)
    max_n: int = _flag(128, "maximum number of samples per prompt", 1, 2**31 - 1)
    max_stop: int = _flag(4, "maximum number of stop strings in one request", 0, 2**31 - 1)
    max_temperature: float = _flag(2.0, "maximum temperature of a request", 0.0, 1e6)
    tool_call_parser: ToolCallParser = _flag("auto", "format of the model's tool calls; auto: the one in its chat template")
    reasoning_parser: ReasoningParser = _flag(
        "auto", "how reasoning is marked; think: by <think> tags; harmony: by the channel analysis; auto: as in the chat template"
    )
    metrics_prefix: str = _flag("octavo:", "prefix of the names at /metrics; with 'vllm:', dashboards for vLLM work")
    log_format: LogFormat = _flag("text", "format of the log; json: one JSON object per line")
    lesson: bool = _flag(False, "play scenes that show how paging works, in a tiny KV cache; sets its size and limits itself")
    lesson_pace: float = _flag(0.3, "seconds per step of the lesson", 0.0, 60.0)
    enable_log_requests: bool = _flag(False, "log one line for every request, without its text")
    inspector: bool = _flag(True, "let clients watch the engine at /v1/view; text is shown on this machine, or with the key")
    record: str | None = _flag(None, "write what /v1/view shows to this file; without text on a shared address without a key")

    def __post_init__(self) -> None:
        for each in fields(self):
            check_setting(each.name, getattr(self, each.name))
        if self.lesson and not self.inspector:
            raise ConfigError("the lesson needs the inspector: leave out --lesson or --no-inspector")
        if self.record is not None and not self.inspector:
            raise ConfigError("record needs the inspector: leave out --record or --no-inspector")


# Settings of the engine in the lesson. They are small, so that evictions and preemptions come within a few steps.
LESSON = {
    "num_gpu_blocks_override": 33, "max_num_batched_tokens": 48, "max_num_seqs": 8, "max_model_len": 320, "block_size": 16,
    "state_cache_share": 0.9,  # a state of a recurrent model is as large as many blocks
}  # fmt: skip
LESSON_SERVER = {"data_parallel_size": 2, "api_processes": 1}  # one engine dies in the last scene
SECRETS = frozenset(each.name for each in fields(ServerConfig) if each.metadata["secret"])
_KEY = re.compile(r"[!-~]{1,512}"), "1 to 512 visible ASCII characters"  # characters that a header carries unchanged
_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}"), "a name or an address"
_FORMS: dict[str, tuple[re.Pattern[str], str]] = {
    "host": _HOST,
    "api_key": _KEY,
    "admin_key": _KEY,
    "served_model_name": (re.compile(r"[!-~]([ -~]{0,254}[!-~])?"), "1 to 256 ASCII characters"),
    "allowed_hosts": _HOST,
    "metrics_prefix": (re.compile(r"[A-Za-z_:][A-Za-z0-9_:]{0,63}"), "letters, digits, _ and :, and no digit first"),
    "record": (re.compile(r"[^\0]+"), "the path of a file"),
    "allowed_origins": (re.compile(r"https?://[A-Za-z0-9._-]+(:\d{1,5})?|\*"), "an origin like https://example.org, or *"),
}


def check_setting(name: str, value: object) -> None:
    """Raises ConfigError if a value does not fit its field."""
    known = ServerConfig.__dataclass_fields__[name]
    if name in _FORMS:
        _check_text(name, value, several=known.type == tuple[str, ...], optional=known.default is None)
    elif known.type in (int, float):
        _check_number(name, value, known.type is int, known.metadata["least"], known.metadata["most"])
    else:
        choices = (True, False) if known.type is bool else get_args(known.type)
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise ConfigError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def _check_text(name: str, value: object, several: bool, optional: bool) -> None:
    pattern, form = _FORMS[name]
    if several and not isinstance(value, tuple | list):
        raise ConfigError(f"{name} must be a list" + ("" if name in SECRETS else f", got {value!r}"))
    for one in value if several and isinstance(value, tuple | list) else [value]:
        if not (one is None and optional) and not (isinstance(one, str) and pattern.fullmatch(one)):
            raise ConfigError(f"{name} must be {form}" + ("" if name in SECRETS else f", got {one!r}"))


def _check_number(name: str, value: object, whole: bool, least: float, most: float) -> None:
    right = type(value) is int or (not whole and type(value) is float)
    if not right or not least <= value <= most:  # type: ignore[operator]
        raise ConfigError(f"{name} must be {'an integer' if whole else 'a number'} from {least} to {most}, got {value!r}")
