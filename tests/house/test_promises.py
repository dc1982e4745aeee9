"""What is not built does not exist: status and program agree on flags, commands, parameters, routes and variables, in both directions."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from docs.status import PAGE, promises
from octavo.cli.args import Parser
from octavo.cli.main import ALIASES, COMMANDS
from octavo.sampling_params import SamplingParams
from octavo.server.app import build_app
from octavo.server.fields import FIELDS, ChatBody, CompletionBody, ResponseBody
from octavo.server.state import Server
from octavo.server_config import ServerConfig
from tests.support.stand_in_llm import StandInLLM

ROOT = Path(__file__).resolve().parents[2]
STATUS = list(promises(PAGE.read_text()))


def named(section: str, row: str, name: str, done: bool) -> set[str]:
    """Names matched by `name` in the promises of a section that begin with `row` and are done, or are not."""
    found = [re.match(row, promise.text) for promise in STATUS if promise.section == section and promise.done == done]
    return {word for start in found if start for word in re.findall(name, start.group())}


def offered(command: str) -> set[str]:
    module = importlib.import_module(f"octavo.cli.{command}")
    if hasattr(module, "SUBCOMMANDS"):
        return set().union(*(offered(f"{command}.{name}") for name in module.SUBCOMMANDS))
    parser = Parser(prog=command, allow_abbrev=False)
    module.add_arguments(parser)
    return set(re.findall(r"(?<!\w)--?\w[\w-]*", parser.format_help()))


def assert_agree(exists: Iterable[str], done: set[str], not_yet: set[str]) -> None:
    assert done, "the rows are not read"
    assert done - set(exists) == set(), "called done, but not there"
    assert not_yet & set(exists) == set(), "there, but called not yet"


# promise: what-built-does
def test_a_flag_exists_when_its_row_is_done_and_not_before() -> None:
    rows = r"`--[^`]*`", r"(?<![\w-])--?[a-z][a-z-]*"
    exists = set().union(*(offered(command) for command in COMMANDS if command not in ALIASES))
    assert_agree(exists, named("Command line", *rows, done=True), named("Command line", *rows, done=False))


# promise: what-built-does
def test_a_command_exists_when_its_row_is_done_and_not_before() -> None:
    rows = r"`octavo [a-z]+", r"octavo ([a-z]+)"
    assert_agree(COMMANDS, named("Command line", *rows, done=True), named("Command line", *rows, done=False))


# promise: what-built-does, samplingparams-n-1
def test_a_sampling_parameter_exists_when_its_row_is_done_and_not_before() -> None:
    rows = r"`SamplingParams`: .*", r"\b[a-z]\w*(?=[=,]|$)"  # not what stands in brackets
    defaults = {field.name: field.default for field in fields(SamplingParams) if field.init}
    assert_agree(defaults, named("Python", *rows, done=True), named("Python", *rows, done=False))
    assert set(defaults) == named("Python", *rows, done=True), "there, and promised nowhere"
    promised = [text.split("=") for text in named("Python", r"`SamplingParams`: .*", r"\b[a-z]\w*=[\d.]+", done=True)]
    assert {name: float(value) for name, value in promised}.items() <= defaults.items() and len(promised) == 9


# promise: what-built-does
def test_a_keyword_of_llm_exists_when_its_row_is_done_and_not_before() -> None:
    from octavo import LLM

    rows = r"`LLM\([^`]*`", r"(\w+)="
    assert_agree(inspect.signature(LLM).parameters, named("Python", *rows, done=True), named("Python", *rows, done=False))
    for row, name in ((r"`\.\w+", r"\.(\w+)"), (r"`LLM\.\w+\(", r"\.(\w+)")):
        assert named("Python", row, name, done=True) <= set(dir(LLM))
        assert named("Python", row, name, done=False) & set(dir(LLM)) == set()


# promise: what-built-does-exist
def test_a_route_exists_when_its_row_is_done_and_not_before() -> None:
    rows = r"(`/[\w/]+`(, )?)+$", r"/[\w/]+"
    exists = build_app(Server(StandInLLM(), ServerConfig(), "m")).openapi()["paths"]  # type: ignore[arg-type]
    assert_agree(exists, named("HTTP", *rows, done=True), named("HTTP", *rows, done=False))


# promise: what-built-does-exist
def test_a_field_of_a_body_is_taken_when_its_row_is_done_and_refused_by_name_before() -> None:
    rows = r"`extra_body`: [\w, ]+|Body extra `\w+`", r"(?<![`\w])[a-z]+_[a-z_]+|(?<=extra `)\w+"
    taken = [set(body.model_fields) for body in (CompletionBody, ChatBody, ResponseBody)]
    not_yet = named("HTTP", *rows, done=False)
    assert_agree(taken[1], named("HTTP", *rows, done=True), not_yet)
    assert not_yet <= FIELDS.keys() and not any(FIELDS.keys() & fields for fields in taken)


# promise: other-environment-variables
def test_every_environment_variable_that_is_read_has_its_row() -> None:
    """Only config.py may read any (`rules.environment_offences`), so all names stand there."""
    source = ast.parse((ROOT / "octavo/config.py").read_text())
    texts = {node.value for node in ast.walk(source) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    read = {text for text in texts if re.fullmatch(r"[A-Z]+(_[A-Z]+)+", text)}
    rows = r"(Environment:|No other environment variables) .*", r"\b[A-Z]+(?:_[A-Z]+)+(?=`)"
    done, not_yet = named("Command line", *rows, done=True), named("Command line", *rows, done=False)
    assert read == done | not_yet, "read and promised nowhere, or promised and not read"
    assert not any("getenv" in path.read_text() for path in (ROOT / "octavo/native").glob("*.[ch]*"))
