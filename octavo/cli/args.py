"""Makes flags out of dataclasses: each field of `EngineConfig` is a flag with the field's help, type and default, and for a server
each field of `ServerConfig`, too.

A flag that is not given is absent from the parsed arguments, so the defaults are in one place: the dataclass. A flag wins over
the file of --config, and the file over the default. --show-config prints where each value came from.

    --max-model-len 32k      int | None: a number (k, m, g are powers of 1024) or auto
    --dtype float32          Literal: a choice
    --no-enable-prefix-caching       bool: the flag and its --no- form
    --api-key A --api-key B          tuple[str, ...]: may be repeated
    --hf-overrides '{"rope_theta": 1e6}'    dict: a JSON object
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from typing import Any, Literal, NoReturn, get_args, get_origin

from octavo.cli.config_file import SERVER_SETTINGS, SETTINGS, is_size, json_object, read_settings, settings_table, size
from octavo.cli.suggestions import FLAGS, VALUES, meant
from octavo.config import EngineConfig, api_key
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams, is_unset
from octavo.server_config import LESSON, LESSON_SERVER, ServerConfig

SHORT = {
    "quantization": "-q", "tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "decode_context_parallel_size": "-dcp",
    "data_parallel_size": "-dp",
}  # fmt: skip

SAMPLING_FLAGS: dict[str, tuple[Callable[[str], object], str]] = {
    "temperature": (float, "0: always the most likely token; higher: more varied"),
    "top_p": (float, "sample from the most likely tokens that together have this probability"),
    "top_k": (int, "sample from this many of the most likely tokens; 0: no limit"),
    "min_p": (float, "leave out tokens whose probability is below this share of the highest one"),
    "repetition_penalty": (float, "above 1: fewer words that are already in the prompt or the answer"),
    "presence_penalty": (float, "from -2 to 2; above 0: fewer words that are already in the answer"),
    "frequency_penalty": (float, "from -2 to 2; above 0: fewer repeated words, the more often the answer has them"),
    "max_tokens": (int, "maximum number of tokens in the answer"),
}


def field_help(field: Field[Any]) -> str:
    default = "" if field.default in (None, ()) else f" (default: {str(field.default).lower()})"
    return f"{field.metadata['help']}{default}"


MODEL_HELP = field_help(EngineConfig.__dataclass_fields__["model"])


class Parser(argparse.ArgumentParser):
    """Accepts options and words in any order. An error is one line, and suggests what was probably meant."""

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        options = argv[: argv.index("--")] if "--" in argv else argv
        for name in (word.partition("=")[0] for word in options):
            if name in FLAGS and name not in self._option_string_actions:
                self.unknown(name)  # before argparse, which reads -ngl as -n with the value gl
        args, unknown = self.parse_known_intermixed_args(argv)
        if unknown:
            self.unknown(unknown[0].partition("=")[0])
        return args

    def unknown(self, name: str) -> NoReturn:
        if not name.startswith("-"):
            self.error(f"unexpected word {name}")
        self.error(f"unknown option {name}{meant(name, self._option_string_actions, FLAGS)}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nsee: {self.prog} --help\n")


def add_engine_flags(parser: argparse.ArgumentParser, only: Sequence[str] | None = None) -> None:
    """Adds a flag for each field, or only for the fields in `only`, if the command sets the others itself."""
    group = parser.add_argument_group("engine")
    group.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    offered = SETTINGS if only is None else ("model", *only)
    for field in fields(EngineConfig):
        if field.name in offered and field.name != "model":
            _add_field(group, field)
    text = "a TOML file with settings under the same names; flags win over it"
    group.add_argument("--config", metavar="FILE", help=text)
    group.add_argument("--show-config", action="store_true", help="print each setting and where it came from, then exit")
    parser.set_defaults(settings=frozenset(offered))


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a server and all flags of the engine."""
    group = parser.add_argument_group("server")
    for field in fields(ServerConfig):
        _add_field(group, field)
    add_engine_flags(parser)
    parser.set_defaults(settings=frozenset((*SETTINGS, *SERVER_SETTINGS)))


def engine_config(args: argparse.Namespace, model: str | None = None) -> EngineConfig:
    """Returns the config that file and flags give. With --show-config it prints the config and ends the command.

    `model`: a model that was given as a word. It wins over --model.
    """
    given = _given(args, model)
    config = EngineConfig(**given.of(SETTINGS))
    if args.show_config:
        given.show(config)
    return config


def server_configs(args: argparse.Namespace, model: str | None = None) -> tuple[EngineConfig, ServerConfig]:
    """Returns both configs of a server, as `engine_config` does for the engine."""
    given = _given(args, model)
    if key := api_key():
        given.values["api_key"] = (*given.values.get("api_key", ()), key)
        given.origins["api_key"] = ", ".join(filter(None, [given.origins.get("api_key"), "environment"]))
    if given.values.get("lesson"):
        given.take_lesson()
    engine, server = EngineConfig(**given.of(SETTINGS)), ServerConfig(**given.of(SERVER_SETTINGS))
    if args.show_config:
        given.show(engine, server)
    return engine, server


@dataclass(slots=True)
class _Given:
    """Settings that were given, and where each came from."""

    values: dict[str, Any]
    origins: dict[str, str]
    settings: frozenset[str]  # the settings that the command has

    def of(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: value for name, value in self.values.items() if name in names}

    def take_lesson(self) -> None:
        """Adds the settings of the lesson. None of them may be given."""
        lesson = LESSON | LESSON_SERVER
        if taken := next((name for name in lesson if name in self.values), None):
            raise ConfigError(f"{taken} is set by the lesson ({lesson[taken]}): leave out --{taken.replace('_', '-')} or --lesson")
        self.values |= lesson
        self.origins |= dict.fromkeys(lesson, "lesson")

    def show(self, *configs: EngineConfig | ServerConfig) -> NoReturn:
        print(settings_table(configs, self.settings, self.origins), flush=True)
        raise SystemExit(0)


def _given(args: argparse.Namespace, model: str | None) -> _Given:
    filed = read_settings(args.config) if args.config else {}
    filed = {name: value for name, value in filed.items() if name in args.settings}  # a file may have settings for other commands, too
    given = {name: value for name, value in vars(args).items() if name in args.settings}
    flags = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if args.model is None:
        del flags["model"]
    words = {} if model in (None, args.model) else {"model": model}
    origins = {**dict.fromkeys(filed, f"file {args.config}"), **dict.fromkeys(flags, "flag"), **dict.fromkeys(words, "command line")}
    return _Given({**filed, **flags, **words}, origins, args.settings)


def add_sampling_flags(parser: argparse.ArgumentParser, defaults: Mapping[str, object]) -> None:
    """Adds the flags of sampling. `defaults`: values of this command that differ from those of SamplingParams."""
    group = parser.add_argument_group("sampling")
    own = {field.name: field.default for field in fields(SamplingParams)}
    for name, (convert, text) in SAMPLING_FLAGS.items():
        default = {**own, **defaults}[name]
        default = "the rest of the context" if default is None else default
        text += f" (default: {'what the model recommends, else ' if is_unset(own[name]) else ''}{default})"
        group.add_argument(_flag(name), type=convert, metavar=_metavar(convert), default=argparse.SUPPRESS, help=text)
    text = "end the answer before this text; may be repeated"
    group.add_argument("--stop", action="append", metavar="TEXT", default=argparse.SUPPRESS, help=text)


def sampling_values(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of SamplingParams that were given as flags."""
    return {name: value for name, value in vars(args).items() if name in {*SAMPLING_FLAGS, "stop", "n"}}


def _add_field(group: argparse._ArgumentGroup, field: Field[Any]) -> None:
    flag, text = _flag(field.name), field_help(field)
    names = [flag, *([SHORT[field.name]] if field.name in SHORT else [])]
    if field.type is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
    elif get_origin(field.type) is Literal:
        choices = "{" + ",".join(get_args(field.type)) + "}"
        group.add_argument(*names, type=_choice(field), metavar=choices, default=argparse.SUPPRESS, help=text)
    elif field.type == tuple[str, ...]:
        group.add_argument(flag, action="append", metavar="TEXT", default=argparse.SUPPRESS, help=text)
    else:
        converts: dict[object, Callable[[str], object]] = {int | None: size, int: int, float: float, dict[str, Any] | None: json_object}
        convert = size if is_size(field) else converts.get(field.type, str)
        group.add_argument(*names, type=convert, metavar=_metavar(convert), default=argparse.SUPPRESS, help=text)


def _choice(field: Field[Any]) -> Callable[[str], str]:
    """Checks a choice as argparse does. The error also says why there are no other choices, and which one was probably meant."""
    choices, because = get_args(field.type), field.metadata["because"]

    def convert(text: str) -> str:
        if text not in choices:
            message = f"invalid choice: {text!r} (choose from {', '.join(choices)})" + (f": {because}" if because else "")
            raise argparse.ArgumentTypeError(message + meant(text, choices, VALUES))
        return text

    return convert


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(convert: Callable[[str], object]) -> str:
    return {int: "N", float: "X", size: "SIZE", json_object: "JSON"}.get(convert, "TEXT")
