"""The `octavo` command: finds the sub-command, runs it, and turns whatever goes wrong into one line and an exit code.

    0  done      1  an error, in one line      2  used wrongly      130  Ctrl-C      141  nobody reads our output any more

A sub-command is a module with `add_arguments(parser)` and `run(args) -> int`, or a package with SUBCOMMANDS. Only
the one that is asked for is imported, and it imports the engine only in `run`: help must not wait for torch.
"""

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
from octavo.cli.args import Parser, nearest
from octavo.config import log_level
from octavo.errors import ConfigError, OctavoError
from octavo.worker.device import platform_refusal

COMMANDS = {
    "serve": "answer HTTP as OpenAI's clients expect it",
    "chat": "talk to a model, or ask it one question",
    "generate": "complete prompts, from the command line or a file",
    "bench": "measure throughput, latency, start-up, or a running server",
    "plan": "say whether and how a model fits, before it is loaded",
    "verify": "prove that paging is invisible, bit for bit",
    "top": "watch a running server: its block pool, requests and steps",
    "doctor": "say what is here, what is missing and what to fix",
}


def main(argv: Sequence[str] | None = None) -> int:
    if refusal := platform_refusal(platform.system()):
        print(f"octavo: error: {refusal}", file=sys.stderr)
        return 1
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a narrow terminal encoding is no reason to lose an answer
    try:
        code = _run("octavo", "A paged LLM inference engine", "octavo.cli", COMMANDS, words)
        sys.stdout.flush()  # here, where a reader that has gone is handled
        return code
    except OctavoError as error:
        if _debugging():
            traceback.print_exc()
        print(f"octavo: error: {_one_line(str(error))}", file=sys.stderr)
        return 1
    except ImportError as error:
        if _debugging():
            traceback.print_exc()
        print(f"octavo: error: {' '.join(str(error).split())[:300]}; `octavo doctor` says what helps", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more as it leaves
        return 141


def _run(program: str, summary: str, package: str, commands: Mapping[str, str], words: Sequence[str]) -> int:
    if not words or words[0] not in commands:
        _no_command(program, summary, commands, words or ["--help"])
    name, rest = words[0], words[1:]
    command = importlib.import_module(f"{package}.{name}")
    if hasattr(command, "SUBCOMMANDS"):
        return _run(f"{program} {name}", commands[name], command.__name__, command.SUBCOMMANDS, rest)
    parser = Parser(prog=f"{program} {name}", description=f"{commands[name]}.", allow_abbrev=False)
    parser.set_defaults(fail=parser.error, typed=_typed([*program.split(), *words]))
    command.add_arguments(parser)
    return int(command.run(parser.parse(rest)))


def _no_command(program: str, summary: str, commands: Mapping[str, str], words: Sequence[str]) -> NoReturn:
    """Everything that is no sub-command: help, the version, and mistakes."""
    parser = Parser(prog=program, description=f"{summary}.", allow_abbrev=False)
    parser.epilog = f"{program} COMMAND --help says more."
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    listed = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, summary in commands.items():
        listed.add_parser(name, help=summary)
    kind = "option" if words[0].startswith("-") else "command"
    if kind == "option":
        parser.parse_known_args(words[:1])  # --help and --version end here
    parser.error(f"unknown {kind} {words[0]}{nearest(words[0], [*commands, '--help', '--version'])}")


def _one_line(text: str) -> str:
    """Names out of a file may hold anything, also what a terminal would obey."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in " ".join(text.split()))


def _typed(words: Sequence[str]) -> str:
    """The command as it is quoted in files that may be passed on: without keys."""
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
    except ConfigError:  # a wrong level is reported like any error, and asks for nothing
        return False
