"""What is not built does not exist: status and program agree on flags, commands and parameters, in both directions."""

import importlib
import inspect
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from octavo.cli.args import Parser
from octavo.cli.main import COMMANDS
from octavo.sampling_params import SamplingParams
from tests.house.documents import promises

STATUS = promises((Path(__file__).resolve().parents[2] / "docs/status.md").read_text())


def named(section: str, row: str, name: str, done: bool) -> set[str]:
    """Names matched by `name` in the promises of a section that begin with `row` and are done, or are not."""
    found = [re.match(row, promise) for promise, status in STATUS[section] if status.startswith("done") == done]
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


def test_a_flag_exists_when_its_row_is_done_and_not_before() -> None:
    rows = r"`--[^`]*`", r"(?<![\w-])--?[a-z][a-z-]*"
    exists = set().union(*(offered(command) for command in COMMANDS))
    assert_agree(exists, named("Command line", *rows, done=True), named("Command line", *rows, done=False))


def test_a_command_exists_when_its_row_is_done_and_not_before() -> None:
    rows = r"`octavo [a-z]+", r"octavo ([a-z]+)"
    assert_agree(COMMANDS, named("Command line", *rows, done=True), named("Command line", *rows, done=False))


def test_a_sampling_parameter_exists_when_its_row_is_done_and_not_before() -> None:
    rows = r"`SamplingParams`: .*", r"\b[a-z]\w*(?=[=,]|$)"  # not what stands in brackets
    defaults = {field.name: field.default for field in fields(SamplingParams) if field.init}
    assert_agree(defaults, named("Python", *rows, done=True), named("Python", *rows, done=False))
    assert set(defaults) == named("Python", *rows, done=True), "there, and promised nowhere"
    promised = [text.split("=") for text in named("Python", r"`SamplingParams`: .*", r"\b[a-z]\w*=[\d.]+", done=True)]
    assert {name: float(value) for name, value in promised}.items() <= defaults.items() and len(promised) == 9


def test_a_keyword_of_llm_exists_when_its_row_is_done_and_not_before() -> None:
    from octavo import LLM

    rows = r"`LLM\([^`]*`", r"(\w+)="
    assert_agree(inspect.signature(LLM).parameters, named("Python", *rows, done=True), named("Python", *rows, done=False))
    for row, name in ((r"`\.\w+", r"\.(\w+)"), (r"`LLM\.\w+\(", r"\.(\w+)")):
        assert named("Python", row, name, done=True) <= set(dir(LLM))
        assert named("Python", row, name, done=False) & set(dir(LLM)) == set()
