"""Each house rule is shown an offender it must catch, and an innocent it must let pass."""

import pytest

from docs import house, status
from tests.house import documents, rules
from tests.house.rules import Module


def test_layers_catch_every_form_of_an_upward_import() -> None:
    for source in (
        "import octavo.worker.sampler",
        "import octavo.worker as w",
        "from octavo.worker import sampler",
        "from octavo import worker",
        "from octavo import LLM",
        "from ..worker import sampler",
        "from .. import worker",
        "def late():\n    from octavo.worker.sampler import sample",
    ):
        assert rules.layer_offences(Module("octavo/policy/scheduler.py", source), {}), source


def test_layers_let_downward_and_listed_imports_pass() -> None:
    source = "from octavo import __version__\nfrom octavo.errors import LoadError\nfrom . import request\nfrom .. import config"
    assert rules.layer_offences(Module("octavo/policy/scheduler.py", source), {}) == []
    lazy = {("octavo/engine/client.py", "octavo.cli.main"): "a reason"}
    upward = "def start():\n    from octavo.cli.main import main"
    assert rules.layer_offences(Module("octavo/engine/client.py", upward), lazy) == []
    assert rules.layer_offences(Module("octavo/engine/core.py", upward), lazy)
    assert rules.layer_offences(Module("octavo/engine/client.py", "import octavo.cli.mainframe"), lazy)


def test_layers_refuse_a_room_they_do_not_know() -> None:
    assert "not in the table" in rules.layer_offences(Module("octavo/attic/box.py", ""), {})[0]


def test_import_cycles_are_found_of_any_length_and_anywhere_in_a_file() -> None:
    files = {
        "octavo/a.py": "from octavo import b",
        "octavo/b/__init__.py": "from . import c",
        "octavo/b/c.py": "def late():\n    from octavo.a import name",
        "octavo/d.py": "import octavo.e",
        "octavo/e.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from octavo.d import D",
        "octavo/f.py": "import octavo.a\nimport octavo.g",
        "octavo/g.py": "import torch",
    }
    ring, pair = ["octavo.a", "octavo.b", "octavo.b.c"], ["octavo.d", "octavo.e"]
    assert house.cycles(house.import_graph(files, with_types=False)) == [ring]
    assert house.cycles(house.import_graph(files, with_types=True)) == [ring, pair]
    assert house.with_one_importer(house.import_graph(files, with_types=False)) == ["octavo.b", "octavo.b.c", "octavo.e", "octavo.g"]


def test_table_of_rooms_has_no_cycle() -> None:
    reach = {room: set(below) for room, below in rules.MAY_IMPORT.items()}
    for _ in reach:
        reach = {room: below.union(*(reach[other] for other in below)) for room, below in reach.items()}
    assert [room for room, below in reach.items() if room in below] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle.cloudpickle",
        "def f():\n    import marshal",
        "import torch\ntorch.load('x')",
        "import torch as t\nread = t.load",
        "from torch import load",
        "import torch.serialization\ntorch.serialization.load('x')",
        "eval('1')",
        "run = exec",
        "import builtins\nbuiltins.eval('1')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import os\nos.system('ls')",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
        "from jinja2 import Environment",
        "import jinja2\njinja2.Environment()",
        "from jinja2 import Template\nTemplate('{{ x }}')",
    ],
)
def test_banned_calls_are_caught(source: str) -> None:
    assert rules.banned_offences(Module("octavo/x.py", source))


def test_namesakes_of_banned_calls_pass() -> None:
    source = "from jinja2.sandbox import ImmutableSandboxedEnvironment\nimport json\nmodel.eval()\njson.load(f)\nrun(cmd, shell=False)\n"
    source += "from jinja2 import Template\ndef build() -> Template: ..."
    assert rules.banned_offences(Module("octavo/x.py", source)) == []


def test_environment_is_read_in_config_alone() -> None:
    for source in ("import os\nos.environ['A']", "import os as o\no.getenv('A')", "from os import environ"):
        assert rules.environment_offences(Module("octavo/log.py", source)), source
        assert rules.environment_offences(Module("octavo/config.py", source)) == []


def test_sizes_are_counted_and_exceptions_kept() -> None:
    long_function = "def f():\n" + "    pass\n" * 60
    for path, source, name in (
        ("octavo/a.py", long_function, "octavo/a.py::f"),
        ("octavo/a.py", "class A:\n    async " + long_function.replace("\n", "\n    ").rstrip() + "\n", "octavo/a.py::f"),
        ("octavo/a.py", "x = 1\n" * 401, "octavo/a.py"),
    ):
        module = Module(path, source)
        assert [offence.split(": ")[0] for offence in rules.size_offences(module, {})] == [name]
        assert rules.size_offences(module, {name: "a reason"}) == rules.size_offences(module, {"octavo/": "a reason"}) == []
        assert rules.size_offences(module, {"octavo/ab.py": "a reason"})
    assert rules.size_offences(Module("octavo/a.py", "def f():\n" + "    pass\n" * 59 + "x = 1\n" * 340), {}) == []


def test_heads_are_asked_for() -> None:
    assert rules.head_offences(Module("octavo/a.py", "x = 1"))
    assert rules.head_offences(Module("octavo/a.py", '"""' + "line\n" * 16 + '"""'))
    assert rules.head_offences(Module("octavo/a.py", '"""A head."""')) == []


def test_getattr_on_a_config_is_caught() -> None:
    assert rules.config_getattr_offences(Module("octavo/a.py", "def f(config, self):\n    getattr(config, 'a')"))
    assert rules.config_getattr_offences(Module("octavo/a.py", "getattr(self.model_config, 'a', None)"))
    assert rules.config_getattr_offences(Module("octavo/a.py", "getattr(module, 'a')")) == []


def test_kwargs_handed_on_are_caught() -> None:
    assert rules.kwargs_offences(Module("octavo/a.py", "def f(a, **rest):\n    return g(a, **rest)"))
    assert rules.kwargs_offences(Module("octavo/a.py", "def f(values, **rest):\n    check(rest)\n    return g(**values)")) == []
    named = "from typing import Unpack\ndef f(a, **rest: Unpack[Names]):\n    return g(a, **rest)"
    assert rules.kwargs_offences(Module("octavo/a.py", named)) == []
    stands_for = "def f(*args: P.args, **rest: P.kwargs):\n    return g(*args, **rest)"
    assert not rules.kwargs_offences(Module("octavo/a.py", stands_for))
    assert rules.kwargs_offences(Module("octavo/a.py", named.replace("Unpack[Names]", "Any")))


@pytest.mark.parametrize("source", ["free_pages = 1", "class PageTable: ...", "def f(page): ...", "self.num_pages = 1", "def page_of(): 1"])
def test_page_is_not_a_word_of_ours(source: str) -> None:
    assert rules.word_offences(Module("octavo/a.py", source))


def test_paged_is() -> None:
    assert rules.word_offences(Module("octavo/a.py", "paged = mmap.PAGESIZE\nclass PagedAttention: ...")) == []


def test_deep_inheritance_and_mixins_are_caught_across_files() -> None:
    first = Module("octavo/a.py", "import torch\nclass A(torch.nn.Module): ...\nclass B(A): ...")
    assert rules.inheritance_offences([first]) == []
    assert rules.inheritance_offences([first, Module("octavo/b.py", "from octavo import a\nclass C(a.B): ...")])
    assert rules.inheritance_offences([Module("octavo/b.py", "class LoraMixin: ...")])


def test_machine_paths_are_caught() -> None:
    for path in ("/" + "work/main", "see `/" + "root/x`", "/" + "home/me/octavo", "/" + "Users/me"):
        assert documents.machine_path_offences("a.md", "first\n" + path)[0].startswith("a.md:2: "), path
    for path in ("octavo/" + "worker/x.py", "https://host/" + "work/x", "/" + "worker", "/tmp"):
        assert documents.machine_path_offences("a.md", path) == [], path


def test_decisions_short_of_a_line_or_out_of_order_are_caught() -> None:
    good = "# Head\n\n## 1. A\n- Context: x\n- Choice: y\n- Cost: z\n"
    assert documents.decision_offences(good) == []
    assert documents.decision_offences(good.replace("- Cost: z\n", ""))
    assert documents.decision_offences(good + "And more.\n")
    assert documents.decision_offences(good.replace("## 1", "## 2"))


PROMISES = """# Status

## HTTP

- [x] `a|b` works,
  and more [a-b]
- [ ] Later
"""

LISTED = """- [x] `a|b` works, and more [a-b]
  - `tests/a.py`: `test_a`, `TestMachine`
- [ ] Later
"""


def test_tests_are_listed_below_the_promise_that_they_name() -> None:
    above = "# promise: a-b\n@mark(\n    1,\n)\ndef test_a(): ...\ndef test_b(): ...\n# promise: a-b\nTestMachine = Machine.TestCase\n"
    found = status.proofs({"tests/a.py": above + "# promise: a-b\n\ndef test_of_another(): ...\n"})
    page = status.written(PROMISES, found)
    assert page.endswith(LISTED) and status.written(page, found) == page and status.offences(page, found) == []
    done, later = status.promises(page)
    assert (done.section, done.text, done.done, done.id) == ("HTTP", "`a|b` works, and more", True, "a-b")
    assert (later.text, later.done, later.id) == ("Later", False, None)


@pytest.mark.parametrize(
    ("before", "after"), [(" [a-b]", ""), ("[a-b]", "[c]"), ("Later", "Later [d]"), ("- [ ] Later", "- [x] Again [a-b]"), ("[ ]", "[x]")]
)
def test_a_promise_and_its_tests_that_do_not_fit_together_are_caught(before: str, after: str) -> None:
    found = {"a-b": ["tests/a.py::test_a"]}
    assert status.offences(PROMISES, found) == [] and status.offences(PROMISES.replace(before, after), found)


@pytest.mark.parametrize("tests", ["soon", "`tests/a.py`", "`tests/b.py::test_a`", "`tests/a.py::test_b`", "`tests/a.py::test_a` and more"])
def test_a_failure_mode_without_its_test_is_caught(tests: str) -> None:
    sources = {"tests/a.py": "def test_a(): ..."}
    row = "| {} | it stalls | {} |\n"
    assert documents.failure_mode_offences(row.format(1, tests), sources.get)
    assert documents.failure_mode_offences(row.format(2, "not yet"), sources.get)
    assert documents.failure_mode_offences(row.format(1, "`tests/a.py::test_a`") + row.format(2, "not yet"), sources.get) == []
