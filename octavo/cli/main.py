"""The `octavo` command finds the sub-command, runs it, and turns an error into one line and an exit code.

    0  done      1  an error, in one line      2  wrong usage      130  Ctrl-C      141  the reader of stdout is gone

A sub-command is a module with `add_arguments(parser)` and `run(args) -> int`, or a package with SUBCOMMANDS. Only the module
of the sub-command that runs is imported. It imports the engine only in `run`, so that help does not wait for torch.
"""

import argparse
import importlib
import io
import os
import platform
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn

from octavo import __version__
from octavo.cli import suggestions
from octavo.cli.args import Parser
from octavo.cli.suggestions import meant
from octavo.cli.words import named_model
from octavo.config import log_level
from octavo.errors import ConfigError, OctavoError
from octavo.platforms import platform_refusal

COMMANDS = {
    "serve": "start a server with OpenAI's API and a web page",
    "chat": "chat with a model, or ask it one question",
    "run": "the same as chat; the name is ollama's",
    "generate": "complete one or more prompts",
    "pull": "download a model",
    "list": "list the models on this machine",
    "rm": "remove a downloaded model",
    "plan": "show how much memory a model needs, without loading it",
    "bench": "measure throughput, latency, start-up time, or a running server",
    "verify": "prove that the paged cache equals a contiguous one, bit for bit",
    "top": "watch a running server: its block pool, requests and steps",
    "doctor": "check this machine, and say what to fix",
}
ALIASES = {"run": "chat"}  # command -> the module of another one
EXAMPLES = """examples:
  octavo serve                        the default model at http://127.0.0.1:8000
  octavo chat "Why is the sky blue?"  one answer in the terminal
  octavo pull Qwen/Qwen3-0.6B         download a model from the hub
  octavo chat Qwen/Qwen3-0.6B         chat with it

"octavo COMMAND --help" lists the options of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    if refusal := platform_refusal(platform.system()):
        print(f"octavo: error: {refusal}", file=sys.stderr)
        return 1
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal lacks becomes ?
    try:
        code = _run("octavo", "an LLM inference engine with paged KV memory", "octavo.cli", COMMANDS, words)
        sys.stdout.flush()  # so that a reader that is gone is noticed here, and handled below
        return code
    except OctavoError as error:
        if _debugging():
            traceback.print_exc()
        print(f"octavo: error: {_one_line(str(error))}", file=sys.stderr)
        return 1
    except ImportError as error:
        if _debugging():
            traceback.print_exc()
        print(f"octavo: error: {' '.join(str(error).split())[:300]}; run `octavo doctor` to see what to fix", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout once more when it ends
        return 141


def _run(program: str, summary: str, package: str, commands: Mapping[str, str], words: Sequence[str]) -> int:
    if not words or words[0] not in commands:
        _no_command(program, summary, commands, words or ["--help"])
    name, rest = words[0], words[1:]
    command = importlib.import_module(f"{package}.{ALIASES.get(name, name)}")
    if hasattr(command, "SUBCOMMANDS"):
        return _run(f"{program} {name}", commands[name], command.__name__, command.SUBCOMMANDS, rest)
    parser = _parser(f"{program} {name}", commands[name])
    parser.set_defaults(fail=parser.error, typed=_typed([*program.split(), *words]))
    command.add_arguments(parser)
    return int(command.run(parser.parse(rest)))


def _parser(program: str, summary: str) -> Parser:
    form = argparse.RawDescriptionHelpFormatter  # examples at the end of the help keep their lines
    return Parser(prog=program, description=f"{summary[0].upper()}{summary[1:]}.", allow_abbrev=False, formatter_class=form)


def _no_command(program: str, summary: str, commands: Mapping[str, str], words: Sequence[str]) -> NoReturn:
    """Handles words that do not begin with a sub-command: prints help or the version, or says what is wrong."""
    parser = _parser(program, summary)
    parser.epilog = EXAMPLES if commands is COMMANDS else f'"{program} COMMAND --help" lists the options of a command.'
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    listed = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, summary in commands.items():
        listed.add_parser(name, help=summary)
    word, known = words[0], [*commands, "--help", "--version"]
    if word.startswith("-"):
        parser.parse_known_args(words[:1])  # --help and --version end here
        later = next((other for other in words if other in commands), None)
        order = "" if later is None else f"; options come after the command: {program} {later} {word}"
        parser.error(f"unknown option {word}{order or meant(word, known, {})}")
    if model := named_model(word) or (word if "/" in word else None):
        parser.error(f"unknown command {word}; a model comes after a command: {program} {next(iter(commands))} {model}")
    parser.error(f"unknown command {word}{meant(word, known, suggestions.COMMANDS)}")


def _one_line(text: str) -> str:
    """Returns the text as one line without control characters, which names that come from files may have."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in " ".join(text.split()))


def _typed(words: Sequence[str]) -> str:
    """Returns the command line without API keys, for files that a user may share."""
    shown = list(words)
    for index, word in enumerate(shown):
        name, given, _ = word.partition("=")
        if name.endswith("-key") and given:
            shown[index] = f"{name}=***"
        elif name.endswith("-key") and index + 1 < len(shown):
            shown[index + 1] = "***"
    return shlex.join(shown)


def _debugging() -> bool:
    try:
        return log_level("WARNING") == "DEBUG"
    except ConfigError:  # the variable has a wrong value, which the command itself reports
        return False
