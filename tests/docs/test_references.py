"""Pages that describe the code agree with it: the Python reference, flags, error messages, figures, links."""

import ast
import importlib.util
import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import octavo
from octavo import errors
from octavo.async_llm import AsyncLLM
from octavo.llm import LLM
from octavo.messages import LifeRecord
from octavo.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, Logprob, PinnedPrefix, RequestOutput, TextDelta
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from octavo.structured_outputs import StructuredOutputsParams
from tests.docs.sources import GAP, ROOT, documents, helps, literals

DOCS = ROOT / "docs"
OUTPUTS = [RequestOutput, CompletionOutput, BeamSearchOutput, BeamSearchSequence, PinnedPrefix, TextDelta, Logprob, LifeRecord]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
CODE = re.compile(r"`([^`]+)`")


def section(page: str, title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page} has no section {title}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of all tables, without their heads."""
    cells = [[cell.strip() for cell in line.strip().strip("|").split(" |")] for line in text.splitlines() if line.startswith("|")]
    rules = [index for index, line in enumerate(cells) if set("".join(line)) <= set("-:| ")]
    return [line for index, line in enumerate(cells) if index not in rules and index + 1 not in rules]


def named(cell: str) -> str:
    """The name that a first cell has in code quotes."""
    found = CODE.search(cell)
    assert found is not None, cell
    return found[1]


# -- docs/python.md


def defaults_of(callable_or_class: Any) -> dict[str, object]:
    if callable_or_class is LLM:
        return {name: each.default for name, each in inspect.signature(LLM).parameters.items()}
    return {each.name: each.default for each in fields(callable_or_class) if each.init and each.default is not MISSING}


@pytest.mark.parametrize(
    ("title", "described"),
    [
        ("LLM", LLM), ("SamplingParams", SamplingParams), ("BeamSearchParams", BeamSearchParams),
        ("StructuredOutputsParams", StructuredOutputsParams),
    ],
)
def test_every_setting_is_in_the_python_reference_with_its_default(title: str, described: Any) -> None:
    shown = {named(row[0]): value_of(named(row[1])) for row in rows(section("python.md", title)) if len(row) == 3}
    assert shown == defaults_of(described)


def value_of(text: str) -> object:
    kind, _, member = text.partition("RequestOutputKind.")
    return RequestOutputKind[member] if member and not kind else ast.literal_eval(text)


@pytest.mark.parametrize("described", OUTPUTS)
def test_every_field_of_an_output_is_in_the_python_reference(described: Any) -> None:
    assert [named(row[0]) for row in rows(section("python.md", described.__name__))] == [each.name for each in fields(described)]


def test_methods_errors_and_exports_are_those_of_the_code() -> None:
    for cls in (LLM, AsyncLLM):
        table = section("python.md", cls.__name__).partition("\n| method")[2].partition("\n\n")[0]
        shown = [named(row[0]) for row in rows("| method" + table)]
        assert {text.partition("(")[0] for text in shown} == {name for name in vars(cls) if not name.startswith("_")}
        for text in shown:
            if "(" in text:
                assert described_call(text) == called_with(getattr(cls, text.partition("(")[0])), text
    family = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.OctavoError)]
    listed = {named(row[0]): named(row[1]) for row in rows(section("python.md", "Errors"))}
    assert listed == {kind.__name__: kind.__bases__[-1].__name__ for kind in family}
    assert all(f"`{name}`" in (DOCS / "python.md").read_text() for name in octavo.__all__)


def described_call(text: str) -> dict[str, object]:
    """`f(a, b=1)` as written -> each argument with its default."""
    (function,) = ast.parse(f"def {text}: pass").body
    assert isinstance(function, ast.FunctionDef)
    names = [each.arg for each in function.args.args]
    values = [ast.literal_eval(each) for each in function.args.defaults]
    keywords = {each.arg: ast.literal_eval(value) for each, value in zip(function.args.kwonlyargs, function.args.kw_defaults) if value}
    return dict(zip(names, [inspect.Parameter.empty] * (len(names) - len(values)) + values)) | keywords


def called_with(method: Any) -> dict[str, object]:
    """Without `**unknown`, which names what an argument of vLLM's is to be replaced by."""
    return {name: each.default for name, each in inspect.signature(method).parameters.items() if name not in ("self", "unknown")}


# -- flags and commands


def known_flags() -> set[str]:
    return {flag for text in helps().values() for flag in FLAG.findall(text)}


# promise: docs-checked-against
@pytest.mark.parametrize("page", ["from-vllm.md", "from-ollama.md"])
def test_every_flag_that_a_page_promises_to_newcomers_exists(page: str) -> None:
    """The last cell of a row is Octavo's, and so is all text outside of tables; what is missing here stands in a table of its own."""
    text = (DOCS / page).read_text()
    serve = set(FLAG.findall(helps()["octavo serve"]))
    present, _, rest = text.partition("**Not there**")
    missing, _, more = rest.partition("**Only here**")
    promised = [line if not line.startswith("|") else line.strip("| ").split(" | ")[-1] for line in (present + more).splitlines()]
    promised = [line for line in promised if not line.startswith(("vllm ", "pip "))]
    others = {"--merge", "--system", "--enable-auto-tool-choice"}  # of llama-gguf-split, of octavo chat, and one that is not needed
    assert set(FLAG.findall("\n".join(promised))) - others <= serve
    assert {flag for row in rows(missing) for flag in FLAG.findall(row[0])} & serve == set(), "built now: move it to the flags that exist"


def test_every_flag_in_the_documents_is_a_flag_of_some_command() -> None:
    """In lines that call octavo; other programs have flags of their own."""
    wrong = []
    for path in documents():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for call in re.findall(r"`(octavo [^`]*)`|^(octavo .*)$", line):
                command = next(filter(None, call)).split(" #")[0]
                wrong += [f"{path.name}:{number}: {flag}" for flag in FLAG.findall(command) if flag not in known_flags()]
    assert wrong == []


# -- docs/troubleshooting.md


# promise: docs-checked-against
def test_every_message_in_troubleshooting_is_one_the_code_can_say() -> None:
    quoted = [span for row in rows((DOCS / "troubleshooting.md").read_text()) for span in CODE.findall(row[0])]
    messages = [span.strip(f" {GAP}") for span in quoted if " " in span and not span.startswith("octavo")]
    assert len(messages) > 25
    said = "\0".join([*(each.text for each in literals()), (ROOT / "Makefile").read_text()])
    unknown = [message for message in messages if not re.search(r"[^\0]*?".join(map(re.escape, message.split(GAP))), said)]
    assert unknown == []


# -- figures and links


def script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_charts_and_tables_are_made_of_the_figures_that_were_measured() -> None:
    stale = [path.name for path, text in script(DOCS / "figures.py").made().items() if path.read_text() != text]
    assert stale == [], "run: python docs/figures.py"


NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")


def test_figures_that_pages_repeat_are_those_of_the_measurements() -> None:
    measured = set(NUMBER.findall((DOCS / "performance.md").read_text()))
    quantisation = (DOCS / "quantisation.md").read_text()
    repeated = {
        "figures.md": rows((DOCS / "figures.md").read_text()),
        "quantisation.md": rows(quantisation[quantisation.index("**Quality.**") : quantisation.index("## KV cache")]),
    }
    for page, table in repeated.items():
        numbers = [number for row in table for cell in row[1:] for number in NUMBER.findall(cell)]
        assert len(numbers) > 10
        assert [number for number in numbers if number not in measured] == [], page


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for path in documents():
        for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", path.read_text()):
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            if not file.exists() or (anchor and anchor not in _anchors(file)):
                broken.append(f"{path.name}: {target}")
    assert broken == []


def _anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_lists_every_document() -> None:
    index = (DOCS / "README.md").read_text()
    assert [path.name for path in DOCS.glob("*.md") if path.name != "README.md" and f"({path.name})" not in index] == []


# -- the image


def test_the_dockerfile_installs_by_the_scripts_that_ci_runs() -> None:
    runs = re.findall(r"^RUN (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    scripts = {f".ci/{name}" for line in runs for name in re.findall(r"/source/\.ci/(\w+)", line)}
    assert scripts == {".ci/wheel", ".ci/install"}
    package = (ROOT / ".ci/package").read_text()
    assert all(script in package and (ROOT / script).stat().st_mode & 0o111 for script in scripts)
    rest = [line for line in runs if "/source/.ci/" not in line]
    tools = "python -m pip install --quiet -c /source/requirements/base.txt -r /source/requirements/build.txt"
    known = ("apt-get ", tools, "useradd ")  # what CI's machine has already
    assert [line for line in rest if not line.startswith(known)] == []
