"""Settings of the server, frozen like those of the engine: every field is a flag of `octavo serve` and a key of its --config file.

A field says its own range, so that a new one is a line here. Keys are secrets: no repr and no table shows them.
"""

import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from octavo.errors import ConfigError

LogFormat = Literal["text", "json"]
ToolCallParser = Literal["auto", "hermes", "llama3_json", "none"]
ReasoningParser = Literal["auto", "think", "none"]


def _flag(default: Any, text: str, least: float | None = None, most: float | None = None, secret: bool = False) -> Any:
    """A field with its help text, and the range of its number."""
    meta = {"help": text, "because": "", "least": least, "most": most, "secret": secret}
    return field(default=default, metadata=meta, repr=not secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = _flag("127.0.0.1", "address to listen on; 0.0.0.0: every one this machine has, which wants --api-key")
    port: int = _flag(8000, "port to listen on; 0: any that is free", 0, 65535)
    api_key: tuple[str, ...] = _flag((), "ask for this key; may be repeated, and OCTAVO_API_KEY is one more", secret=True)
    admin_key: str | None = _flag(None, "open the admin routes, with this key", secret=True)
    served_model_name: str | None = _flag(None, "what clients call the model; default: its own name")
    allowed_hosts: tuple[str, ...] = _flag((), "a name this server may be called by, beside its address; may be repeated")
    allowed_origins: tuple[str, ...] = _flag((), "an origin (https://example.org) whose web sites may ask; may be repeated")
    api_processes: int = _flag(1, "processes that answer HTTP, on one port, for one engine", 1, 64)
    max_queue: int = _flag(1024, "most requests that wait; one more is told to come back later (429)", 0, 2**31 - 1)
    queue_timeout: float = _flag(300.0, "seconds a request may wait before it is told to come back later (503)", 0.001, 86400.0)
    request_timeout: float = _flag(3600.0, "seconds a request may take in all (504)", 0.001, 86400.0)
    read_timeout: float = _flag(30.0, "seconds a client may take to send a request (408)", 0.001, 86400.0)
    write_timeout: float = _flag(30.0, "seconds a client may leave an answer unread before it is cut off", 0.001, 86400.0)
    shutdown_timeout: float = _flag(30.0, "seconds that open requests have to end once the server was told to stop", 0.0, 86400.0)
    max_restarts: int = _flag(3, "how often an engine or API process that died is started again; a healthy minute begins anew", 0, 1000)
    max_body_bytes: int = _flag(8 * 2**20, "largest body of a request (413)", 1024, 2**40)
    max_prompts: int = _flag(1024, "most prompts in one request", 1, 2**31 - 1)
    max_n: int = _flag(128, "most samples of a prompt", 1, 2**31 - 1)
    max_stop: int = _flag(4, "most stop strings of a request", 0, 2**31 - 1)
    max_temperature: float = _flag(2.0, "highest temperature of a request", 0.0, 1e6)
    tool_call_parser: ToolCallParser = _flag("auto", "form of the model's tool calls; auto: as its chat template says")
    reasoning_parser: ReasoningParser = _flag("auto", "think: <think> tells thinking from answers; auto: where the chat template has it")
    metrics_prefix: str = _flag("octavo:", "how names at /metrics begin; vllm: makes dashboards made for vLLM work")
    log_format: LogFormat = _flag("text", "json: an object a line")
    lesson: bool = _flag(False, "play scenes that show how paging works, in a tiny pool; sets the pool and its limits itself")
    lesson_pace: float = _flag(0.3, "seconds that a step takes in the lesson", 0.0, 60.0)
    enable_log_requests: bool = _flag(False, "log a line for every request that the server answers; never its text")
    inspector: bool = _flag(True, "let clients watch the engine at /v1/view, text of prompts included; --no-inspector: nobody can")
    record: str | None = _flag(None, "write what can be watched to this file")

    def __post_init__(self) -> None:
        for each in fields(self):
            check_setting(each.name, getattr(self, each.name))
        if self.lesson and not self.inspector:
            raise ConfigError("the lesson needs the inspector: leave out --lesson or --no-inspector")
        if self.record is not None and not self.inspector:
            raise ConfigError("record needs the inspector: leave out --record or --no-inspector")


# Settings of the engine in the lesson: small enough that everything happens within a few steps, and every block is seen.
LESSON = {"num_gpu_blocks_override": 33, "max_num_batched_tokens": 48, "max_num_seqs": 8, "max_model_len": 320, "block_size": 16}
SECRETS = frozenset(each.name for each in fields(ServerConfig) if each.metadata["secret"])
_KEY = re.compile(r"[!-~]{1,512}"), "1 to 512 visible ASCII characters"  # what a header carries unchanged
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
    """One field by itself."""
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
